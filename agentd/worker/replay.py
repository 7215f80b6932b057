"""What a journal answers to a program that runs again. Pure.

Two things make a repeated run the same as the first: each step is answered by the
journaled result of its number, and steps that ran in parallel are answered in the order
in which they ended, which is the order of the journal.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from corefleet.errors import CorefleetError
from corefleet.messages.records import Step, StepKind

ORDERED: frozenset[str] = frozenset({"infer", "tool", "send"})
"""Kinds that take time: the program can see in which order they end."""

_DIGEST_BYTES = 12
_SHOWN = 120

_canonical = msgspec.msgpack.Encoder(order="deterministic")


class NonDeterministic(CorefleetError):
    """A repeated run asked something else than the run that wrote the journal."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A step that the program came to."""

    step: int
    kind: StepKind
    name: str
    fingerprint: bytes
    known: Step | None = None
    """The journaled result, if an earlier run got that far."""
    intent: bool = False
    """The journal says that an earlier run began it, and not how it ended."""


class Replay:
    """Numbers the steps of one run and answers those that the journal holds."""

    def __init__(self, journal: Iterable[Step]) -> None:
        self.next_step = 0
        self._known: dict[int, Step] = {}
        self._intents: dict[int, Step] = {}
        self._due: deque[int] = deque()
        for step in journal:
            if step.kind == "intent":
                self._intents[step.step] = step
            elif step.kind != "open" and step.step not in self._known:
                self._known[step.step] = step
                if step.kind in ORDERED:
                    self._due.append(step.step)

    def due(self, waiting: Container[int]) -> int | None:
        """Return which of the steps `waiting` the journal answers next; None if there is none.

        Steps before it that the program has not come to are passed over: only a program
        that waits for something else than steps can be late for its turn.
        """
        return next((step for step in self._due if step in waiting), None)

    def ask(self, kind: StepKind, name: str, request: Any) -> Asked:
        """Number the program's next step; raises NonDeterministic.

        `request` is all that the program asked, of types that MessagePack has.
        """
        number = self.next_step
        fingerprint = digest(kind, name, request)
        known = self._known.get(number)
        then = known or self._intents.get(number)
        if then is not None and then.fingerprint != fingerprint:
            raise NonDeterministic(_difference(then, kind, name, request))
        self.next_step = number + 1
        return Asked(number, kind, name, fingerprint, known, number in self._intents)

    def delivered(self, step: int) -> None:
        """The program was given the journaled result of `step`."""
        self._due.remove(step)

    def check_end(self) -> None:
        """Raise NonDeterministic if the run ended before it asked for all of the journal."""
        for number in sorted(self._known):
            if number >= self.next_step:
                raise NonDeterministic(
                    f"the agent is not deterministic: it ended before step {number}, "
                    f"which an earlier run asked: {_titled(self._known[number])}"
                )


def digest(kind: str, name: str, request: Any) -> bytes:
    """Return the fingerprint of what a step asks."""
    data = _canonical.encode((kind, name, request))
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _difference(known: Step, kind: str, name: str, request: Any) -> str:
    shown = msgspec.json.encode(request).decode()
    if len(shown) > _SHOWN:
        shown = f"{shown[: _SHOWN - 3]}..."
    same = (known.kind, known.name) == (kind, name)
    then = f"{_titled(known)} with another request" if same else _titled(known)
    return (
        f"the agent is not deterministic: step {known.step} was {then} in attempt "
        f"{known.attempt}, and is now {kind} {name!r} with {shown}"
    )


def _titled(step: Step) -> str:
    return f"{step.kind} {step.name!r}"
