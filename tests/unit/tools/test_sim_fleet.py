"""A simulated fleet's shape, its durations, and what one of its nodes answers."""

from __future__ import annotations

from random import Random
from statistics import mean, median

import pytest

from corefleet.errors import InvalidInput
from corefleet.messages.records import TaskRecord
from corefleet.messages.wire import Assignment, HeldAttempt, InventoryQuery
from tools.fleet.node import SimNode
from tools.fleet.plan import NODES_PER_RACK, Durations, Job, Shape


def test_4096_nodes_fill_103_racks() -> None:
    names = Shape(4096).names()
    assert len({node for node, _ in names}) == 4096
    assert len({rack for _, rack in names}) == 103
    assert [rack for _, rack in names].count("rack-000") == NODES_PER_RACK


def test_two_processes_simulate_one_fleet_without_a_node_twice() -> None:
    together = Shape(30).names() + Shape(34, first=30).names()
    assert together == Shape(64).names()


@pytest.mark.parametrize(
    ("text", "centre"), [("fixed:0.5", 0.5), ("exp:2", 2.0), ("lognormal:0.1,1", 0.1)]
)
def test_durations_are_drawn_from_their_law(text: str, centre: float) -> None:
    rng = Random(7)
    drawn = [Durations.parse(text).draw(rng) for _ in range(4000)]
    found = median(drawn) if text.startswith("lognormal") else mean(drawn)
    assert found == pytest.approx(centre, rel=0.1)
    assert min(drawn) >= 0


@pytest.mark.parametrize("text", ["", "exp", "exp:x", "fixed:-1", "lognormal:1", "normal:1,2"])
def test_durations_that_are_none_are_named(text: str) -> None:
    with pytest.raises(InvalidInput, match="durations"):
        Durations.parse(text)


@pytest.mark.parametrize(
    ("text", "job"),
    [("", Job(0)), ("3", Job(3)), ("3 0.5", Job(3, 0.5)), ("hello", Job(0)), ("-1", Job(0))],
)
def test_an_input_says_what_a_task_does(text: str, job: Job) -> None:
    assert Job.parse(text) == job


def assignment(task: str, attempt: int = 1, epoch: int = 3, domain: int = 0) -> Assignment:
    record = TaskRecord(
        task=task, pool="p", session="s", request_id="r", input="", attempt=attempt,
        node="n", node_epoch=epoch, domain=domain,
    )  # fmt: skip
    return Assignment(record=record, revision=5, create_seq=4)


@pytest.fixture
def node() -> SimNode:
    return SimNode("n", "rack-000", {"p": 2}, life="alive", epoch=3)


def test_a_node_takes_what_it_has_places_for(node: SimNode) -> None:
    assert [node.assigned(assignment(task))[1] for task in ("a", "b")] == [True, True]
    answer, runs = node.assigned(assignment("c"))
    assert (answer.accepted, runs) == (False, False)
    assert "all 2 places" in answer.reason
    assert node.assigned(assignment("d", domain=1))[0].accepted
    use = {(each.pool, each.domain): (each.total, each.used) for each in node.beat(0).slots}
    assert use == {("p", 0): (2, 2), ("p", 1): (2, 1)}


def test_an_attempt_that_is_offered_again_is_accepted_again_and_run_once(node: SimNode) -> None:
    item = assignment("a")
    assert node.assigned(item)[1]
    answer, runs = node.assigned(item)
    assert (answer.accepted, runs) == (True, False)


@pytest.mark.parametrize("epoch", [2, 4])
def test_an_assignment_for_another_life_of_the_node_is_refused(node: SimNode, epoch: int) -> None:
    answer, runs = node.assigned(assignment("a", epoch=epoch))
    assert (answer.accepted, runs) == (False, False)
    assert "epoch" in answer.reason


def test_an_inventory_names_what_is_not_there(node: SimNode) -> None:
    node.assigned(assignment("a", attempt=2))
    held = (HeldAttempt("a", 2), HeldAttempt("a", 1), HeldAttempt("b", 1))
    answer = node.inventory(InventoryQuery(shard=1, owner_epoch=1, held=held))
    assert answer.node_epoch == 3
    assert answer.absent == held[1:]


def test_what_a_node_held_dies_with_it(node: SimNode) -> None:
    item = assignment("a")
    node.assigned(item)
    assert node.die() == [item]
    assert node.held == {}
    assert node.life == "dead"
