"""Attempts that are asked back: batch for online, and all of a drained node."""

from __future__ import annotations

from random import Random
from typing import Any

from controld.core.attempt_policy import EXTRA_ATTEMPTS
from controld.core.batch_places import BatchPlaces
from controld.core.eligibility import Slot
from controld.core.fleet import Fleet
from controld.core.rng import Rng
from controld.core.shard import ShardCore
from controld.core.shard_io import (
    Action,
    AttemptReturned,
    CaughtUp,
    EndTask,
    NodeDraining,
    RecordStored,
    SendAssignment,
    SendDrop,
    SendYield,
    WriteRecord,
)
from controld.core.shard_state import ShardSettings
from corefleet.messages.records import PoolSpec, TaskRecord
from corefleet.messages.wire import ListTasks, TaskRequeued
from tests.unit.controld.core.driving import ShardDriver, of_kind, only, told

POOLS = {
    "chat": PoolSpec(name="chat", agent="some:Agent"),
    "crunch": PoolSpec(name="crunch", agent="some:Agent", pool_class="batch"),
}


def driver(**changes: Any) -> ShardDriver:
    return ShardDriver(**{"pools": POOLS, **changes})


def batch(shard: ShardDriver, **changes: Any) -> TaskRecord:
    return shard.run(pool="crunch", pool_class="batch", **changes)


def yields(actions: list[Action]) -> list[tuple[str, str, int]]:
    return [(y.node, y.ask.task, y.ask.attempt) for y in of_kind(actions, SendYield)]


def returned(shard: ShardDriver, asked: SendYield) -> list[Action]:
    ask = asked.ask
    return shard.feed(AttemptReturned(ask.task, ask.attempt, asked.node, ask.reason))


# Preemption.


def test_the_youngest_batch_attempt_yields_to_an_online_task_that_waits_too_long() -> None:
    shard = driver(nodes=1, slots=2)
    batch(shard)
    young = batch(shard)
    shard.run()
    shard.run()
    assert shard.submit() == []
    assert yields(shard.wait(0.1)) == [], "it has not waited for long"
    asked = only(shard.wait(0.15), SendYield)
    assert (asked.node, asked.ask.task, asked.ask.attempt) == ("n0", young.task, 1)
    assert asked.ask.reason == "preempted: task t5 of pool chat waits for a place"
    write = only(returned(shard, asked), WriteRecord)
    assert (write.record.state, write.left) == ("queued", "preempted")
    assert write.record.past[0].reason == "preempted: task t5 of pool chat waits for a place"


def test_one_yield_is_asked_for_each_waiting_task_and_again_only_after_a_while() -> None:
    shard = driver(nodes=1, slots=3)
    for _ in range(3):
        batch(shard)
    for _ in range(3):
        shard.run()
    shard.submit()
    shard.submit()
    assert yields(shard.wait(0.3)) == [("n0", "t3", 1), ("n0", "t2", 1)]
    for _ in range(10):
        assert yields(shard.wait(0.4)) == []
    assert len(yields(shard.wait(1.5))) == 2, "forgotten: perhaps the asking was lost"


def test_nobody_yields_while_a_limit_and_not_a_place_is_what_is_missing() -> None:
    shard = driver(nodes=1, slots=2)
    batch(shard)
    shard.limits.set_share("chat", 0)
    shard.set_pools({"chat": PoolSpec(name="chat", max_in_flight=1)})
    shard.submit()
    assert yields(shard.wait(0.5)) == []


def test_batch_yields_only_where_the_online_pool_could_run() -> None:
    shard = driver(nodes=2, slots=1)
    record = batch(shard)
    for _ in range(2):
        shard.run()
    shard.submit()
    shard.fleets.see(record.node, state="suspect", now=shard.now)
    assert yields(shard.wait(0.3)) == []


def test_a_fleet_that_knows_which_place_would_open_is_asked() -> None:
    class Knowing(Fleet):
        found: Slot | None = None

        def preemptable(self, pool: str, rng: Rng) -> Slot | None:
            return self.found

    places, fleet = BatchPlaces(), Knowing()
    shard = driver(nodes=2, slots=1)
    for node in ("n0", "n1"):
        places.began(shard.record(node=node, domain=0, attempt=1))
    assert places.youngest(fleet, "chat", Random(0), 0.0) is None
    fleet.found = shard.fleet.slot("n0", 1, "crunch", 0)
    found = places.youngest(fleet, "chat", Random(0), 0.0)
    assert found is not None
    assert found.node == "n0"


def test_a_preempted_task_keeps_its_place_in_the_queue() -> None:
    shard = driver(nodes=1, slots=1)
    first = batch(shard)
    shard.submit(pool="crunch", pool_class="batch")
    shard.run()
    shard.submit()
    asked = only(shard.wait(0.3), SendYield)
    shard.fleets.see("n0", state="suspect", now=shard.now)
    requeue = only(returned(shard, asked), WriteRecord)
    assert told(shard.written(requeue)) == [
        TaskRequeued(
            task=first.task,
            at_ms=shard.wall_ms,
            attempt=1,
            node="n0",
            reason="task t4 of pool chat waits for a place",
        )
    ]
    assert shard.core.queue_content()["crunch"] == [first.task, "t2"]


def test_yields_count_against_nobody_however_many() -> None:
    shard = driver(nodes=1, slots=1)
    record = batch(shard, max_attempts=1)
    for attempt in range(1, EXTRA_ATTEMPTS + 20):
        reason = "preempted: for t9" if attempt % 2 else "draining: a new kernel"
        actions = shard.feed(AttemptReturned(record.task, attempt, "n0", reason))
        assert of_kind(actions, EndTask) == []
        offers: list[SendAssignment] = []
        while not offers:
            writes = of_kind(actions, WriteRecord)
            actions = shard.written(writes[0]) if writes else shard.wait(0.3)
            offers = of_kind(actions, SendAssignment)
        shard.accepted(offers[0])
    end = only(shard.feed(AttemptReturned(record.task, EXTRA_ATTEMPTS + 20, "n0", "boom")), EndTask)
    assert end.result.failure is not None
    assert end.result.failure.message == "1 of 1 attempts failed; the last: returned: boom"


# Drains.


def test_all_attempts_of_a_drained_node_are_asked_online_first_and_go_elsewhere() -> None:
    shard = driver(nodes=1, slots=2)
    batch(shard)
    shard.run()
    shard.fleets.join("n1")
    asks = of_kind(shard.feed(NodeDraining("n0", "new kernel")), SendYield)
    assert [(ask.node, ask.ask.task) for ask in asks] == [("n0", "t2"), ("n0", "t1")]
    assert {ask.ask.reason for ask in asks} == {"draining: new kernel"}
    write = only(returned(shard, asks[0]), WriteRecord)
    assert (write.record.node, write.left) == ("n1", "draining")
    assert write.record.past[0].reason == "draining: new kernel"


def test_a_drain_asks_again_every_few_seconds_until_it_is_taken_back() -> None:
    shard = driver(nodes=1)
    shard.run()
    shard.feed(NodeDraining("n0", "new kernel"))
    asked = sum(len(yields(shard.wait(0.5))) for _ in range(40))
    assert 3 <= asked <= 4
    shard.feed(NodeDraining("n0", on=False))
    assert [yields(shard.wait(0.5)) for _ in range(40)] == [[]] * 40


def test_at_the_drains_deadline_attempts_are_taken_and_fenced() -> None:
    shard = driver(nodes=1)
    shard.run()
    shard.fleets.join("n1")
    shard.feed(NodeDraining("n0", "new kernel", deadline_ms=shard.wall_ms + 2000))
    assert of_kind(shard.wait(1.0), WriteRecord) == []
    write = only(shard.wait(1.1), WriteRecord)
    assert (write.record.node, write.record.attempt, write.left) == ("n1", 2, "drained")
    assert write.record.past[0].reason == "drained: new kernel; its time is over"
    assert only(shard.written(write), SendDrop).node == "n0"


def test_a_drain_known_before_the_take_over_is_done_is_carried_out_by_the_new_owner() -> None:
    shard = driver(nodes=1)
    record = shard.run()
    core = ShardCore(7, "c2", 4, shard.fleet, Random(0), ShardSettings())
    core.handle(NodeDraining("n0", "new kernel"), shard.now, shard.wall_ms)
    core.handle(RecordStored(record, 200), shard.now, shard.wall_ms)
    actions = core.handle(CaughtUp(), shard.now, shard.wall_ms)
    assert yields(actions) == [("n0", record.task, 1)]


def test_what_is_left_on_a_node_is_listed_with_its_state_and_when_it_was_asked() -> None:
    shard = driver(nodes=2, slots=1)
    here = shard.run()
    shard.run()
    asked_ms = shard.wall_ms
    shard.feed(NodeDraining(here.node, "new kernel"))
    shard.wait(2.0)
    (line,) = shard.core.list_tasks(ListTasks(node=here.node)).tasks
    assert (line.record.task, line.state, line.asked_ms) == (here.task, "running", asked_ms)
    assert line.reason == "asked 2.0 s ago to yield at its next step boundary"
    assert shard.core.list_tasks(ListTasks(node="n9")).tasks == ()
