"""Rule 11: no verdict without two looks, and none that waits for the second."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from controld.core.liveness_io import (
    Found,
    LossDecided,
    LossHeld,
    Observe,
    Observed,
    PeersSeen,
    Probe,
    ProbeAnswered,
    PushVerdict,
    StoreLost,
)
from controld.core.observers import Observers
from tests.unit.controld.core.driven_rack import DrivenRack


def test_rule_11_probe_and_second_look_start_together_and_the_verdict_comes_at_three_beats() -> (
    None
):
    rack = DrivenRack("a", answers=False, peers=("c2",), observed="nobody")
    rack.beat()
    rack.wait(1.0)
    assert rack.when(Probe)[0] == rack.when(Observe)[0] == 0.45
    assert rack.all(Observe)[0] == Observe("a", 1, "a:9", "c2")
    assert rack.when(PushVerdict) == [0.65]


def test_rule_10_an_owner_whom_no_observer_answers_condemns_nobody() -> None:
    rack = DrivenRack("a", answers=False, peers=("c2", "c3"))
    rack.beat()
    rack.wait(5.0)
    assert rack.when(PushVerdict) == []
    assert {look.observer for look in rack.all(Observe)} == {"c2", "c3"}, "each is asked"
    rack.feed(Observed("a", 1, "c3", "nobody"))
    assert rack.states() == ["lost"]


def test_rule_11_an_observer_asked_late_is_waited_for() -> None:
    rack = DrivenRack("a", answers=False)
    rack.beat()
    rack.wait(0.6)
    rack.feed(PeersSeen((), ("c2",)))
    rack.wait(0.14)
    assert rack.states() == []
    rack.feed(Observed("a", 1, "c2", "nobody"))
    assert rack.states() == ["lost"]


def test_rule_10_a_node_that_the_second_observer_sees_is_cut_and_not_lost() -> None:
    rack = DrivenRack("a", answers=False, peers=("c2", "c3"), observed="alive")
    rack.beat()
    rack.wait(4.0)
    assert rack.states() == ["cut"]
    assert rack.when(PushVerdict) == [3.0]
    assert {look.observer for look in rack.all(Observe)} == {"c2", "c3"}, "they take turns"


def test_one_of_three_observers_that_sees_the_node_is_enough() -> None:
    rack = DrivenRack("a", answers=False, peers=("c2", "c3", "c4"))
    rack.beat()
    answered = 0
    for _ in range(280):
        rack.wait(0.01)
        for look in rack.all(Observe)[answered:]:
            answered += 1
            found: Found = "alive" if look.observer == "c3" else "nobody"
            rack.feed(Observed("a", 1, look.observer, found))
    assert rack.states() == []


def test_a_node_that_dies_after_it_was_seen_is_lost_a_moment_later() -> None:
    rack = DrivenRack("a", answers=False, peers=("c2",), observed="alive")
    rack.beat()
    rack.wait(0.7)
    rack.observed = "nobody"
    rack.wait(0.8)
    assert rack.states() == []
    rack.wait(0.3)
    assert rack.states() == ["lost"]


def test_an_observer_that_cannot_look_is_replaced_at_once() -> None:
    rack = DrivenRack("a", answers=False, peers=("c2", "c3"))
    rack.beat()
    rack.wait(0.46)
    (first,) = rack.all(Observe)
    rack.feed(Observed("a", 1, first.observer, "unable"))
    _, second = rack.all(Observe)
    assert second.observer != first.observer
    rack.feed(Observed("a", 1, second.observer, "alive"))
    rack.wait(0.5)
    assert rack.states() == []


def test_a_second_look_at_an_older_silence_says_nothing_of_a_new_one() -> None:
    rack = DrivenRack("a", answers=False, peers=("c2",))
    rack.beat()
    rack.wait(0.5)
    rack.beat()
    rack.feed(Observed("a", 1, "c2", "alive"))
    rack.wait(0.6)
    rack.feed(Observed("a", 1, "c2", "nobody"))
    assert rack.states() == []
    rack.wait(0.1)
    assert rack.states() == ["lost"]


def test_observers_prefer_owners_of_other_racks_and_leave_failed_ones_alone() -> None:
    observers = Observers(offset=5)
    assert observers.pick(0.0) == ""
    observers.seen(("c2", "c3"), ("c9",))
    assert {observers.pick(0.0) for _ in range(4)} == {"c2", "c3"}
    observers.failed("c2", 1.0)
    assert {observers.pick(1.1) for _ in range(4)} == {"c3"}
    observers.failed("c3", 1.1)
    assert observers.pick(1.2) == "c9"
    observers.failed("c9", 1.2)
    assert observers.pick(1.3) == ""
    assert observers.pick(3.05) == "c2"


def test_a_held_loss_is_probed_on_and_stored_once_agreed() -> None:
    rack = DrivenRack("a", answers=False)
    rack.beat()
    rack.wait(1.0)
    rack.feed(LossHeld("a", 1))
    probes = len(rack.all(Probe))
    rack.wait(0.5)
    view = rack.view()
    assert view is not None
    assert view.state == "held"
    assert len(rack.all(Probe)) > probes
    rack.feed(LossDecided("a", 1, agreed=True))
    rack.feed(LossDecided("a", 1, agreed=True))
    assert [action.agreed for action in rack.all(StoreLost)] == [False, True]
    assert rack.states() == ["lost"], "what was pushed is not pushed again"


def test_a_held_loss_that_most_do_not_find_is_withdrawn_and_becomes_a_cut() -> None:
    rack = DrivenRack("a", answers=False, peers=("c2",), observed="nobody")
    rack.beat()
    rack.wait(1.0)
    rack.feed(LossHeld("a", 1))
    rack.feed(LossDecided("a", 1, agreed=False))
    rack.observed = "alive"
    rack.wait(0.3)
    view = rack.view()
    assert view is not None
    assert view.state == "suspect"
    rack.wait(3.0)
    assert rack.states() == ["lost", "cut"]


def test_a_held_node_that_beats_again_is_ready_at_its_epoch() -> None:
    rack = DrivenRack("a", answers=False)
    rack.beat()
    rack.wait(1.0)
    rack.feed(LossHeld("a", 1))
    rack.beat()
    rack.wait(0.3, beating=("a",))
    view = rack.view()
    assert view is not None
    assert (view.state, view.epoch) == ("ready", 1)


FOUND = st.sampled_from(["alive", "nobody", "unable"])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["wait", "own", "second", "beat"]), FOUND),
        max_size=60,
    ),
    st.integers(0, 3),
)
def test_rule_11_no_node_is_lost_without_both_looks(
    story: list[tuple[str, Found]], peers: int
) -> None:
    rack = DrivenRack("a", peers=tuple(f"c{number}" for number in range(2, 2 + peers)))
    rack.beat()
    own: Found | None = None
    seen_at: float | None = None
    found_dead = False
    for what, found in story:
        asked = len(rack.all(Observe))
        before = len(rack.states())
        if what == "wait":
            rack.wait(0.05)
        elif what == "own" and rack.all(Probe):
            rack.feed(ProbeAnswered("a", 1, found))
            own = own if found == "unable" else found
        elif what == "second" and asked:
            rack.feed(Observed("a", 1, rack.all(Observe)[-1].observer, found))
            found_dead = found == "nobody" or (found_dead and found == "unable")
            seen_at = rack.now if found == "alive" else seen_at
        elif what == "beat" and not rack.states():
            rack.beat()
            own = seen_at = None
            found_dead = False
        if "lost" in rack.states()[before:]:
            assert own == "nobody", "our own probe"
            assert seen_at is None or rack.now - seen_at >= 1.0 - 1e-9, "nobody vouches for it"
            assert found_dead or not peers, "the second look"
            return
