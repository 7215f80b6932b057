"""A shard's shell: the barrier of a take-over, and one answer to every action.

docs/architecture.md, rule 7: nothing is decided before our own mark was seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest

from controld.assigner import Assigner
from controld.cluster import Cluster
from controld.core.shard import ShardCore
from controld.core.shard_io import (
    Action,
    AnswerCancel,
    AttemptReturned,
    CancelRequested,
    CaughtUp,
    EndTask,
    HeadStored,
    Notify,
    ReadRecord,
    RecordMissing,
    RecordRead,
    RecordRefused,
    RecordStored,
    RecordWritten,
    SendYield,
    TaskEnded,
    WriteRecord,
    WriteUnavailable,
)
from controld.gauges import make_gauges
from controld.runner import ShardRunner, Surroundings
from corefleet.adapters.memory_bus import MemoryBus, MemoryServer
from corefleet.adapters.memory_log import Fault, MemoryLog
from corefleet.background import Background
from corefleet.bus import Entry, Incoming
from corefleet.clock import SystemClock
from corefleet.codec import decode, encode
from corefleet.errors import IllegalTransition
from corefleet.messages.records import (
    ClusterSettings,
    Failure,
    OwnerMark,
    ResultRecord,
    SessionHead,
    TaskRecord,
)
from corefleet.messages.wire import (
    CancelAnswer,
    CancelTask,
    EventBatch,
    TaskReturned,
    TaskWaiting,
    YieldAttempt,
)
from corefleet.metrics import Metrics
from corefleet.subjects import Layout, events, node_yield, shard_cancel, shard_returned

SETTINGS = ClusterSettings(shards=4, streams=1)
LAYOUT = Layout(4, 1)
SHARD = 3
TASK = "3-0123456789abcdefghjkmnpqrs"
OTHER = "3-0123456789abcdefghjkmnpqrt"


def record(task: str = TASK, **fields: Any) -> TaskRecord:
    return TaskRecord(
        task=task, pool="p", session=f"s{task[-1]}", request_id="r", input="", **fields
    )


def result(task: str = TASK) -> ResultRecord:
    return ResultRecord(
        task=task, pool="p", session=f"s{task[-1]}", request_id="r", state="cancelled",
        failure=Failure("cancelled", "told to"),
    )  # fmt: skip


class FakeCore:
    """Keeps what it is told; answers with the actions that a test put there."""

    def __init__(self) -> None:
        self.live = False
        self.closed = 0
        self.events: list[object] = []
        self.replies: dict[type[Any], Callable[[Any], list[Action]]] = {}
        self._more = asyncio.Event()

    def handle(self, event: object, now: float, wall_ms: int) -> list[Action]:
        self.events.append(event)
        self._more.set()
        if isinstance(event, CaughtUp):
            self.live = True
        reply = self.replies.get(type(event))
        return reply(event) if reply else []

    def close(self, now: float) -> None:
        self.closed += 1

    async def until(self, kind: type[Any]) -> Any:
        """Return the newest event of `kind`, once there is one."""
        async with asyncio.timeout(5):
            while not any(isinstance(event, kind) for event in self.events):
                self._more.clear()
                await self._more.wait()
        return next(event for event in reversed(self.events) if isinstance(event, kind))

    def of(self, *kinds: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kinds)]


@dataclass
class Shard:
    """One runner on a server in memory."""

    server: MemoryServer
    bus: MemoryBus
    log: MemoryLog
    background: Background
    core: FakeCore
    runner: ShardRunner
    superseded: list[tuple[int, int]]
    broken: list[int]
    metrics: Metrics
    may_act: bool = True


@pytest.fixture
async def shard() -> AsyncIterator[Shard]:
    failures: list[BaseException] = []
    server = MemoryServer()
    bus, log = MemoryBus(server), MemoryLog(server)
    await log.ensure(SETTINGS)
    background = Background(failures.append)
    cluster = Cluster("c1", SETTINGS, LAYOUT, bus, log, None, SystemClock())  # type: ignore[arg-type]
    metrics = Metrics()
    gauges = make_gauges(metrics)
    core, superseded, broken = FakeCore(), list[tuple[int, int]](), list[int]()
    made: Shard

    surroundings = Surroundings(
        cluster=cluster,
        background=background,
        assigner=Assigner(cluster, background, gauges),
        gauges=gauges,
        may_act=lambda: made.may_act,
        handled=lambda: None,
        superseded=lambda number, newer: superseded.append((number, newer)),
        broken=broken.append,
    )
    runner = ShardRunner(surroundings, cast(ShardCore, core), SHARD, epoch=5)
    made = Shard(server, bus, log, background, core, runner, superseded, broken, metrics)
    yield made
    await runner.close()
    await background.close()
    await bus.close()
    assert failures == []


async def append(shard: Shard, subject: str, message: object) -> int:
    return await shard.log.append(Entry(subject, encode(message)), 1)


async def test_all_that_was_there_is_told_before_the_barrier(shard: Shard) -> None:
    first = await append(shard, LAYOUT.task(SHARD, TASK), record())
    head = SessionHead(pool="p", session="s")
    await append(shard, LAYOUT.head(SHARD, "p", "s"), head)
    await append(shard, LAYOUT.owner(SHARD), OwnerMark(shard=SHARD, epoch=4, controld="c0"))
    await append(shard, LAYOUT.task(2, OTHER), record(OTHER))
    await shard.runner.start()
    await shard.core.until(CaughtUp)
    assert [type(event) for event in shard.core.events] == [RecordStored, HeadStored, CaughtUp]
    assert shard.core.events[0] == RecordStored(record(), first)
    mark = await shard.log.last(LAYOUT.owner(SHARD), 1)
    assert mark is not None
    assert decode(mark.payload, OwnerMark) == OwnerMark(shard=SHARD, epoch=5, controld="c1")


async def test_what_comes_later_is_told_too(shard: Shard) -> None:
    await shard.runner.start()
    await shard.core.until(CaughtUp)
    await append(shard, LAYOUT.task(SHARD, TASK), record())
    assert (await shard.core.until(RecordStored)).record == record()


async def test_a_newer_mark_in_the_stream_ends_the_attempt_to_take_over(shard: Shard) -> None:
    await append(shard, LAYOUT.owner(SHARD), OwnerMark(shard=SHARD, epoch=6, controld="c2"))
    await shard.runner.start()
    assert shard.superseded == [(SHARD, 6)]
    assert not shard.runner.live
    last = await shard.log.last(LAYOUT.owner(SHARD), 1)
    assert last is not None
    assert decode(last.payload, OwnerMark).epoch == 6


async def test_a_newer_mark_that_comes_later_halts_us(shard: Shard) -> None:
    await shard.runner.start()
    await shard.core.until(CaughtUp)
    await append(shard, LAYOUT.owner(SHARD), OwnerMark(shard=SHARD, epoch=6, controld="c2"))
    await append(shard, LAYOUT.task(SHARD, TASK), record())
    async with asyncio.timeout(5):
        while not shard.superseded:  # noqa: ASYNC110 - the follower has no event of its own
            await asyncio.sleep(0)
    assert shard.core.closed == 1
    assert shard.core.of(RecordStored) == []


async def test_a_mark_whose_answer_was_lost_is_found_again(shard: Shard) -> None:
    faults: list[Fault] = ["lose_ack"]
    shard.log.fault = lambda entries: faults.pop() if faults else None
    await shard.runner.start()
    await shard.core.until(CaughtUp)


async def test_nothing_is_decided_without_a_valid_lease(shard: Shard) -> None:
    await shard.runner.start()
    await shard.core.until(CaughtUp)
    shard.may_act = False
    before = len(shard.core.events)
    shard.runner.handle(CancelRequested(1, TASK, ""))
    assert len(shard.core.events) == before


async def test_calls_wait_for_the_barrier(shard: Shard) -> None:
    release = asyncio.Event()
    last = shard.log.last

    async def slow(subject: str, timeout_s: float) -> Any:
        await release.wait()
        return await last(subject, timeout_s)

    shard.log.last = slow  # type: ignore[method-assign]
    starting = asyncio.create_task(shard.runner.start())
    await asyncio.sleep(0)
    given = TaskReturned(task=TASK, attempt=1, node="n1", node_epoch=1, reason="full")
    shard.bus.publish(shard_returned(SHARD, "n1"), encode(given))
    release.set()
    await starting
    await shard.core.until(AttemptReturned)
    kinds = [type(event) for event in shard.core.events]
    assert kinds.index(CaughtUp) < kinds.index(AttemptReturned)


async def test_a_cancel_is_answered_to_who_asked(shard: Shard) -> None:
    answer = CancelAnswer(found=True, cancelled=True, state="cancelled")
    shard.core.replies[CancelRequested] = lambda event: [AnswerCancel(event.call, answer)]
    await shard.runner.start()
    reply = await shard.bus.request(shard_cancel(SHARD), encode(CancelTask(task=TASK)), 5)
    assert decode(reply, CancelAnswer) == answer


async def test_a_write_is_answered_once_with_its_revision(shard: Shard) -> None:
    revision = await append(shard, LAYOUT.task(SHARD, TASK), record())
    await shard.runner.start()
    await shard.core.until(CaughtUp)
    placed = record(state="placed", attempt=1, node="n1")
    shard.core.replies[CancelRequested] = lambda event: [WriteRecord(placed, revision)]
    shard.runner.handle(CancelRequested(1, TASK, ""))
    written = await shard.core.until(RecordWritten)
    stored = await shard.log.last(LAYOUT.task(SHARD, TASK), 1)
    assert stored is not None
    assert written == RecordWritten(TASK, 1, stored.sequence)


async def test_a_write_that_lost_the_race_is_refused(shard: Shard) -> None:
    await append(shard, LAYOUT.task(SHARD, TASK), record())
    await shard.runner.start()
    await shard.core.until(CaughtUp)
    placed = record(state="placed", attempt=1, node="n1")
    shard.core.replies[CancelRequested] = lambda event: [WriteRecord(placed, 77)]
    shard.runner.handle(CancelRequested(1, TASK, ""))
    assert await shard.core.until(RecordRefused) == RecordRefused(TASK, 1)


async def test_a_full_stream_makes_a_write_unavailable(shard: Shard) -> None:
    revision = await append(shard, LAYOUT.task(SHARD, TASK), record())
    await shard.runner.start()
    await shard.core.until(CaughtUp)
    shard.log.fault = lambda entries: "full"
    placed = record(state="placed", attempt=1, node="n1")
    shard.core.replies[CancelRequested] = lambda event: [WriteRecord(placed, revision)]
    shard.runner.handle(CancelRequested(1, TASK, ""))
    assert (await shard.core.until(WriteUnavailable)).task == TASK


async def test_ending_a_task_says_whose_end_stands(shard: Shard) -> None:
    revision = await append(shard, LAYOUT.task(SHARD, TASK), record())
    await shard.runner.start()
    await shard.core.until(CaughtUp)
    shard.core.replies[CancelRequested] = lambda event: [EndTask(record(), revision, result())]
    shard.runner.handle(CancelRequested(1, TASK, ""))
    assert await shard.core.until(TaskEnded) == TaskEnded(TASK, True, result())
    stored = await shard.log.last(LAYOUT.result(SHARD, TASK), 1)
    assert stored is not None
    assert decode(stored.payload, ResultRecord) == result()


async def test_ending_a_task_that_moved_on_is_lost(shard: Shard) -> None:
    await append(shard, LAYOUT.task(SHARD, TASK), record())
    await shard.runner.start()
    await shard.core.until(CaughtUp)
    shard.core.replies[CancelRequested] = lambda event: [EndTask(record(), 77, result())]
    shard.runner.handle(CancelRequested(1, TASK, ""))
    assert await shard.core.until(TaskEnded) == TaskEnded(TASK, False, None)


async def test_a_record_is_read_from_the_leader(shard: Shard) -> None:
    revision = await append(shard, LAYOUT.task(SHARD, TASK), record())
    await shard.runner.start()
    await shard.core.until(CaughtUp)
    asked = iter([TASK, OTHER])
    shard.core.replies[CancelRequested] = lambda event: [ReadRecord(next(asked))]
    shard.runner.handle(CancelRequested(1, TASK, ""))
    assert await shard.core.until(RecordRead) == RecordRead(record(), revision)
    shard.runner.handle(CancelRequested(2, OTHER, ""))
    assert await shard.core.until(RecordMissing) == RecordMissing(OTHER)


async def test_news_go_to_the_controld_that_accepted_the_task(shard: Shard) -> None:
    heard: asyncio.Queue[Incoming] = asyncio.Queue()
    await shard.bus.subscribe(events("c9", TASK), heard.put_nowait)
    await shard.runner.start()
    event = TaskWaiting(task=TASK, reason="no node")
    shard.core.replies[CancelRequested] = lambda asked: [Notify("c9", event)]
    shard.runner.handle(CancelRequested(1, TASK, ""))
    message = await asyncio.wait_for(heard.get(), 5)
    assert decode(message.payload, EventBatch).events == (event,)


async def test_a_damaged_record_does_not_hold_up_the_shard(shard: Shard) -> None:
    await shard.log.append(Entry(LAYOUT.task(SHARD, OTHER), b"\xc1"), 1)
    await append(shard, LAYOUT.task(SHARD, TASK), record())
    await shard.runner.start()
    await shard.core.until(CaughtUp)
    assert [event.record.task for event in shard.core.of(RecordStored)] == [TASK]


async def test_after_the_halt_nothing_is_decided(shard: Shard) -> None:
    await shard.runner.start()
    await shard.core.until(CaughtUp)
    shard.runner.halt()
    before = len(shard.core.events)
    await append(shard, LAYOUT.task(SHARD, TASK), record())
    await shard.runner.close()
    await shard.runner.close()
    assert len(shard.core.events) == before
    assert shard.core.closed == 1


async def test_a_core_that_is_wrong_stops_its_own_shard_only(
    shard: Shard, caplog: pytest.LogCaptureFixture
) -> None:
    await shard.runner.start()
    await shard.core.until(CaughtUp)

    def break_down(event: CancelRequested) -> list[Action]:
        raise IllegalTransition(f"task {TASK}", "running", "placing", "0.000 queued")

    shard.core.replies[CancelRequested] = break_down
    shard.runner.handle(CancelRequested(1, TASK, ""))
    assert shard.broken == [SHARD]
    assert not shard.runner.live
    assert shard.core.closed == 1
    assert value(shard, "corefleet_broken_cores_total") == 1


async def test_a_core_made_anew_decides_only_behind_a_mark_of_its_own(shard: Shard) -> None:
    await shard.runner.start()
    await shard.core.until(CaughtUp)
    await shard.runner.close()
    last = await append(shard, LAYOUT.task(SHARD, TASK), record())
    core = FakeCore()
    anew = ShardRunner(shard.runner._on, cast(ShardCore, core), SHARD, epoch=5, anew=True)
    await anew.start()
    await core.until(CaughtUp)
    assert core.events[0] == RecordStored(record(), last)
    mark = await shard.log.last(LAYOUT.owner(SHARD), 1)
    assert mark is not None
    assert mark.sequence > last
    assert shard.superseded == []
    await anew.close()


async def test_nodes_are_asked_to_yield(shard: Shard) -> None:
    heard: asyncio.Queue[Incoming] = asyncio.Queue()
    await shard.bus.subscribe(node_yield("n1"), heard.put_nowait)
    await shard.runner.start()
    ask = YieldAttempt(task=TASK, attempt=2, reason="draining: new kernel")
    shard.core.replies[CancelRequested] = lambda asked: [SendYield("n1", ask)]
    shard.runner.handle(CancelRequested(1, TASK, ""))
    message = await asyncio.wait_for(heard.get(), 5)
    assert decode(message.payload, YieldAttempt) == ask


async def test_placements_and_requeues_are_counted_and_timed(shard: Shard) -> None:
    revision = await append(shard, LAYOUT.task(SHARD, TASK), record())
    await shard.runner.start()
    await shard.core.until(CaughtUp)
    placed = record(state="placed", attempt=1, node="n1", created_ms=1)
    shard.core.replies[CancelRequested] = lambda event: [WriteRecord(placed, revision)]
    shard.runner.handle(CancelRequested(1, TASK, ""))
    written = await shard.core.until(RecordWritten)
    moved = record(state="placed", attempt=2, node="n2", created_ms=1)
    shard.core.replies[CancelRequested] = lambda event: [
        WriteRecord(moved, written.revision, "draining")
    ]
    shard.core.events.clear()
    shard.runner.handle(CancelRequested(2, TASK, ""))
    await shard.core.until(RecordWritten)
    assert value(shard, "corefleet_placements_total", pool="p") == 2
    assert value(shard, "corefleet_requeues_total", pool="p", cause="draining") == 1
    assert value(shard, "corefleet_queue_wait_seconds_count", pool="p") == 1
    assert value(shard, "corefleet_decision_seconds_count") == 2


def value(shard: Shard, name: str, **labels: str) -> float | None:
    return shard.metrics.registry.get_sample_value(name, labels)
