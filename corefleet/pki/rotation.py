"""Which CA signs and which are trusted, while one CA takes over from another. Pure.

Three passes (docs/pki.md): `begin` makes the next CA and lets everyone trust both; `switch` lets
the next one sign; `finish` ends the trust in the old one. After each the same pass again changes
nothing, so an interrupted one is simply repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

from corefleet.errors import Conflict

Phase = Literal["steady", "begun", "switched"]
Pass = Literal["begin", "switch", "finish"]
VERSION = 1
"""Of the state's form: a program that does not know it leaves the CA alone."""
PASSES: tuple[Pass, ...] = get_args(Pass)


class AuthorityState(msgspec.Struct, frozen=True, kw_only=True):
    """`signer` and `other` are ids of CAs; `other` is the next one, then the old one."""

    version: int = VERSION
    phase: Phase = "steady"
    signer: str
    other: str = ""

    @property
    def trusted(self) -> tuple[str, ...]:
        """Ids of the CAs of the bundle; the one that signs is first."""
        return (self.signer, self.other) if self.other else (self.signer,)


TABLE: Mapping[tuple[Phase, Pass], Phase] = {
    ("steady", "begin"): "begun",
    ("begun", "begin"): "begun",
    ("begun", "switch"): "switched",
    ("switched", "switch"): "switched",
    ("switched", "finish"): "steady",
    ("steady", "finish"): "steady",
}
"""(phase, pass) -> phase. A pass that leaves the phase as it is was done before."""

_INSTEAD: Mapping[Phase, str] = {
    "steady": "no rotation is going on: `begin` first",
    "begun": "the next CA does not sign yet: `switch` first",
    "switched": "the last rotation is not over: `finish` it first",
}


def is_done(state: AuthorityState, step: Pass) -> bool:
    """Whether `step` has nothing left to do; raises Conflict when its turn has not come."""
    after = TABLE.get((state.phase, step))
    if after is None:
        raise Conflict(f"rotate-ca {step}: the phase is {state.phase!r}; {_INSTEAD[state.phase]}")
    return after == state.phase


def begun(state: AuthorityState, fresh: str) -> AuthorityState:
    """Return the state in which `fresh` is trusted beside the CA that signs."""
    return _moved(state, "begin", state.signer, fresh)


def switched(state: AuthorityState) -> AuthorityState:
    """Return the state in which the next CA signs and the old one is still trusted."""
    return _moved(state, "switch", state.other, state.signer)


def finished(state: AuthorityState) -> AuthorityState:
    """Return the state in which only the CA that signs is trusted."""
    return _moved(state, "finish", state.signer, "")


def _moved(state: AuthorityState, step: Pass, signer: str, other: str) -> AuthorityState:
    if is_done(state, step):
        return state
    return AuthorityState(phase=TABLE[state.phase, step], signer=signer, other=other)
