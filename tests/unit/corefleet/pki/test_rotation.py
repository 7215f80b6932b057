"""The passes of a CA's rotation, in any order and any number of times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from corefleet.errors import Conflict
from corefleet.pki.rotation import (
    PASSES,
    TABLE,
    AuthorityState,
    Pass,
    begun,
    finished,
    is_done,
    switched,
)


def after(state: AuthorityState, step: Pass, fresh: str) -> AuthorityState:
    if step == "begin":
        return begun(state, fresh)
    return switched(state) if step == "switch" else finished(state)


@given(st.lists(st.sampled_from(PASSES), max_size=12))
def test_who_signs_was_trusted_before_and_stays_trusted_after(steps: list[Pass]) -> None:
    """So files of the pass before and of the pass after are believed by each other's holders."""
    state = AuthorityState(signer="0")
    for number, step in enumerate(steps, 1):
        try:
            new = after(state, step, str(number))
        except Conflict:
            continue
        assert new.signer in state.trusted
        assert state.signer in new.trusted
        assert new.trusted[0] == new.signer
        assert (new.phase == "steady") == (new.other == "")
        assert is_done(new, step)
        assert after(new, step, "again") == new
        state = new


def test_a_rotation_begins_switches_and_finishes() -> None:
    state = AuthorityState(signer="a")
    seen = [state := after(state, step, "b") for step in PASSES]
    assert [(each.phase, each.trusted) for each in seen] == [
        ("begun", ("a", "b")),
        ("switched", ("b", "a")),
        ("steady", ("b",)),
    ]
    assert len(TABLE) == 6
