"""A cancel in every state of a task, writes under way included: answered, and final."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from controld.core.shard_io import (
    Action,
    AnswerCancel,
    AttemptReturned,
    CancelRequested,
    EndTask,
    NodeDraining,
    RecordStored,
    RecordWritten,
    SendAssignment,
    WriteRecord,
    WriteUnavailable,
)
from corefleet.messages.records import PoolSpec
from tests.unit.controld.core.driving import ShardDriver, of_kind, only

LIMITED = {"chat": PoolSpec(name="chat", max_in_flight=1, max_in_flight_per_tenant=1)}
TENANT = {"chat": PoolSpec(name="chat", max_in_flight_per_tenant=1)}


def without_a_place() -> ShardDriver:
    shard = ShardDriver(nodes=0)
    shard.submit("a")
    return shard


def backing_off() -> ShardDriver:
    shard = ShardDriver()
    shard.submit("a")
    shard.feed(WriteUnavailable("t1", 1, "no leader"))
    return shard


def running() -> ShardDriver:
    shard = ShardDriver()
    shard.run("a")
    return shard


def asked_to_yield() -> ShardDriver:
    shard = running()
    shard.feed(NodeDraining(shard.core._state.tasks["t1"].node, "new kernel"))
    return shard


def offered() -> ShardDriver:
    shard = ShardDriver()
    shard.written(only(shard.submit("a"), WriteRecord))
    return shard


def moving_without_a_write() -> ShardDriver:
    shard = running()
    node = shard.core._state.tasks["t1"].node
    shard.feed(AttemptReturned("t1", 1, node, "boom"))
    shard.feed(WriteUnavailable("t1", 2, "no leader"))
    return shard


def cancelled(shard: ShardDriver, task: str = "t1") -> list[Action]:
    return shard.feed(CancelRequested(1, task, "changed my mind"))


def judge(shard: ShardDriver, end: EndTask, task: str = "t1") -> None:
    """The end is decided: the cancel is answered, and nothing of the task is left."""
    answer = only(shard.ended(end), AnswerCancel).answer
    assert (answer.found, answer.cancelled, answer.state) == (True, True, "cancelled")
    assert task not in shard.core.states()
    assert ("chat", "") not in shard.limits.counts()
    following = only(shard.submit("a"), WriteRecord) if shard.fleet.offers("chat") else None
    assert following is None or following.record.attempt == 1


@pytest.mark.parametrize(
    "bring",
    [without_a_place, backing_off, offered, running, asked_to_yield, moving_without_a_write],
)
def test_a_cancel_between_writes_ends_the_task_at_once(bring: Callable[[], ShardDriver]) -> None:
    shard = bring()
    end = only(cancelled(shard), EndTask)
    assert shard.core.states() == {"t1": "ending"}
    judge(shard, end)


@pytest.mark.parametrize("shown_first", [False, True])
def test_a_cancel_while_it_is_being_placed_ends_it_before_it_is_offered(shown_first: bool) -> None:
    shard = ShardDriver()
    write = only(shard.submit("a"), WriteRecord)
    assert cancelled(shard) == []
    revision = shard.next()
    actions = shard.feed(
        RecordStored(write.record, revision) if shown_first else RecordWritten("t1", 1, revision)
    )
    assert of_kind(actions, SendAssignment) == []
    end = only(actions, EndTask)
    assert end.expected == revision
    judge(shard, end)


@pytest.mark.parametrize("durable", [True, False])
def test_a_cancel_while_it_is_being_moved_ends_it_whatever_becomes_of_the_move(
    durable: bool,
) -> None:
    shard = running()
    node = shard.core._state.tasks["t1"].node
    write = only(shard.feed(AttemptReturned("t1", 1, node, "boom")), WriteRecord)
    assert cancelled(shard) == []
    if durable:
        actions = shard.written(write)
    else:
        actions = shard.feed(WriteUnavailable("t1", write.record.attempt, "no leader"))
    assert of_kind(actions, SendAssignment) == []
    judge(shard, only(actions, EndTask))


@pytest.mark.parametrize("pools", [LIMITED, TENANT])
def test_a_cancel_of_what_waits_for_a_limit_frees_nothing_and_lets_the_next_go(
    pools: dict[str, PoolSpec],
) -> None:
    shard = ShardDriver(pools=pools)
    first = shard.run(tenant="acme")
    shard.submit("a", tenant="acme")
    shard.submit("b", tenant="acme")
    end = only(cancelled(shard, "t2"), EndTask)
    only(shard.ended(end), AnswerCancel)
    assert shard.limits.counts()["chat", ""] == 1
    assert only(shard.done(first), WriteRecord).record.task == "t3"
