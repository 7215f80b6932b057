"""Which nodes are drained: planned ones all, by prediction a bounded share, oldest first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controld.core.drains import DrainPlan, NodeDrain, plan_drains
from corefleet.messages.records import Drain, LostNode, NodeRegistration


def node(number: int, since_ms: int = 0, epoch: int = 1) -> NodeRegistration:
    return NodeRegistration(
        node=f"n{number:03d}", epoch=epoch, draining=bool(since_ms), draining_since_ms=since_ms
    )


def plan(
    *nodes: NodeRegistration,
    drains: tuple[str, ...] = (),
    lost: dict[str, int] | None = None,
    share: float = 0.05,
) -> DrainPlan:
    return plan_drains(
        {name: Drain(node=name, by="ada", at_ms=1) for name in drains},
        {each.node: each for each in nodes},
        {name: LostNode(node=name, epoch=epoch) for name, epoch in (lost or {}).items()},
        share,
    )


def test_a_planned_drain_stands_as_its_record_says() -> None:
    drain = Drain(node="n1", by="ada@desk", reason="new memory", at_ms=7, deadline_ms=99)
    made = plan_drains({"n1": drain}, {"n1": NodeRegistration(node="n1")}, {}, 0.05)
    assert made.standing == {"n1": NodeDrain("n1", "new memory", "ada@desk", 7, 99)}
    assert made.standing["n1"].planned
    assert not made.waiting


def test_a_node_that_asks_is_drained_without_a_deadline_and_says_why() -> None:
    asks = NodeRegistration(
        node="n1", draining=True, draining_reason="heat on package 0", draining_since_ms=5
    )
    made = plan_drains({}, {"n1": asks}, {}, 0.05)
    assert made.standing == {"n1": NodeDrain("n1", "heat on package 0", since_ms=5)}
    assert not made.standing["n1"].planned


def test_the_oldest_go_first_and_the_others_wait() -> None:
    fleet = [node(i) for i in range(60)]
    asking = [node(60, 30), node(61, 10), node(62, 20), node(63, 40)]
    made = plan(*fleet, *asking)
    assert list(made.standing) == ["n061", "n062", "n060"], "5 % of 64"
    assert list(made.waiting) == ["n063"]


def test_one_may_always_go_and_with_a_share_of_0_none() -> None:
    assert list(plan(node(1, 10), node(2, 5), node(3)).standing) == ["n002"]
    made = plan(node(1, 10), node(2, 5), node(3), share=0.0)
    assert (list(made.standing), list(made.waiting)) == ([], ["n002", "n001"])


def test_a_share_that_comes_to_a_whole_number_is_that_number() -> None:
    asking = [node(i, 1 + i) for i in range(100)]
    for percent in range(1, 101):
        assert len(plan(*asking, share=percent / 100).standing) == percent


def test_who_is_well_again_or_lost_makes_room_for_the_next() -> None:
    fleet = [node(i) for i in range(10)]
    asking = (node(20, 1), node(21, 2), node(22, 3))
    assert list(plan(*fleet, *asking).standing) == ["n020"]
    assert list(plan(*fleet, node(20), *asking[1:]).standing) == ["n021"]
    made = plan(*fleet, *asking, lost={"n020": 1})
    assert (list(made.standing), list(made.waiting)) == (["n021"], ["n022"])
    returned = node(20, 1, epoch=2)
    made = plan(*fleet, returned, *asking[1:], lost={"n020": 1})
    assert list(made.standing) == ["n020"]


def test_planned_drains_are_no_ones_turn() -> None:
    fleet = [node(i) for i in range(20)]
    made = plan(*fleet, node(30, 1), node(31, 2), drains=("n030", "n000", "n001"))
    assert list(made.standing) == ["n030", "n000", "n001", "n031"]
    assert made.standing["n030"].planned, "the operator's word has the deadline"


@given(
    since=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    share=st.floats(0, 1),
    drained=st.sets(st.integers(0, 59)),
    lost=st.sets(st.integers(0, 59)),
)
def test_the_share_is_never_passed_and_all_that_ask_are_told_apart(
    since: list[int], share: float, drained: set[int], lost: set[int]
) -> None:
    fleet = [node(i, at) for i, at in enumerate(since)]
    names = {each.node for each in fleet}
    dead = {f"n{i:03d}": 1 for i in lost} if lost else {}
    wanted = tuple(f"n{i:03d}" for i in sorted(drained))
    made = plan(*fleet, drains=wanted, lost=dead, share=share)
    living = names - dead.keys()
    predicted = [drain for drain in made.standing.values() if not drain.planned]
    assert len(predicted) <= max(1, share * len(living) + 1e-6)
    asking = {n.node for n in fleet if n.draining and n.node in living} - set(wanted)
    assert {drain.node for drain in predicted} | made.waiting.keys() == asking
    assert not made.standing.keys() & made.waiting.keys()
    if predicted and made.waiting:
        first = min(drain.since_ms for drain in made.waiting.values())
        assert max(drain.since_ms for drain in predicted) <= first
