"""A log in memory whose users are stepped by hand, and what must hold of a task in it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from corefleet.adapters.memory_bus import MemoryServer
from corefleet.adapters.memory_log import Fault, MemoryLog
from corefleet.adapters.memory_stream import MemoryStream
from corefleet.bus import Entry
from corefleet.clock import ManualClock
from corefleet.codec import decode, encode
from corefleet.ids import shard_of_task
from corefleet.journal import Journal, Patience, committed_steps, end_task, place
from corefleet.messages.records import (
    ClusterSettings,
    Failure,
    ResultRecord,
    SessionHead,
    Step,
    TaskRecord,
)
from corefleet.subjects import Layout

T = TypeVar("T")

LOST: list[Fault] = ["lose_ack", "drop", "refuse", "late"]
"""The ways to leave an append's sender in the dark."""

SETTINGS = ClusterSettings(shards=4, streams=1)
LAYOUT = Layout(SETTINGS.shards, SETTINGS.streams)
TASK = "2-01j5x0c9k2m4n6p8q0r2s4t6v8"
MOST_STEPS = 5000


class Run(Generic[T]):
    """A coroutine that goes on by one turn when told to. Dropping it is a kill -9."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self.done = False
        self.error: Exception | None = None
        self._value: list[T] = []

    def step(self) -> None:
        if self.done:
            return
        try:
            self._work.send(None)
        except StopIteration as stop:
            self._value.append(stop.value)
            self.done = True
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error
            self.done = True

    def kill(self) -> None:
        self._work.close()
        self.done = True

    def finish(self) -> T:
        """Step to the end; return the value or raise the error."""
        for _ in range(MOST_STEPS):
            if self.done:
                break
            self.step()
        else:
            raise AssertionError("no end after so many steps")
        if self.error is not None:
            raise self.error
        return self._value[0]


class Faults:
    """What goes wrong with the next appends, in order; None is nothing."""

    def __init__(self) -> None:
        self.next: list[Fault | None] = []
        self.appends: list[Entry] = []

    def __call__(self, entries: Sequence[Entry]) -> Fault | None:
        self.appends.extend(entries)
        return self.next.pop(0) if self.next else None


class World:
    """One stream, one task, and as many processes as a test wants."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.server = MemoryServer(self.clock)
        self.patience = Patience(now=self.clock.monotonic, sleep=self._sleep)
        Run(MemoryLog(self.server).ensure(SETTINGS)).finish()
        self.faults = Faults()
        self.log = MemoryLog(self.server, self.faults)
        self.stream: MemoryStream = self.server.streams[LAYOUT.stream_name(0)]

    async def _sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await asyncio.sleep(0)

    def put(self, subject: str, record: object, rollup: bool = True) -> int:
        """Write without anything going wrong."""
        return self.stream.append([Entry(subject, encode(record), rollup=rollup)])

    def placed(self, record: TaskRecord) -> int:
        return self.put(task_subject(), record)

    def journal(self, record: TaskRecord, revision: int) -> Journal:
        return Journal(self.log, LAYOUT, record, revision, self.patience)

    # What is stored, as the leader has it.

    def record(self) -> tuple[TaskRecord, int] | None:
        stored = self.stream.last(task_subject())
        return None if stored is None else (decode(stored.payload, TaskRecord), stored.sequence)

    def head(self) -> tuple[SessionHead, int] | None:
        stored = self.stream.last(LAYOUT.head(2, "pool", "session"))
        return None if stored is None else (decode(stored.payload, SessionHead), stored.sequence)

    def results(self) -> list[ResultRecord]:
        return [
            decode(stored.payload, ResultRecord)
            for stored in self.stream.of(LAYOUT.result(2, TASK))
        ]

    def steps(self) -> tuple[Step, ...]:
        """The journal as the next attempt would be given it."""
        return committed_steps(self.stream.of(LAYOUT.journal(2, TASK)))

    def check_ended(self, keeps_head: bool = False) -> ResultRecord:
        """Assert that the task has ended, wholly and once; return its result.

        `keeps_head`: its attempts leave the session's head as it is.
        """
        [payload] = {encode(result) for result in self.results()}
        result = decode(payload, ResultRecord)
        found = self.record()
        if found is not None:
            assert found[0].ending is None
            assert found[0].state == result.state
            assert found[0].failure == result.failure
        head = self.head()
        if keeps_head:
            assert head is None
        elif result.state == "done":
            assert head is not None
            assert head[0].last_task == TASK
            assert head[0].home_node == result.node
        else:
            assert head is None or head[0].last_task != TASK
        return result


def task_subject() -> str:
    return LAYOUT.task(shard_of_task(TASK), TASK)


def task_record(attempt: int = 1, **changes: Any) -> TaskRecord:
    record = TaskRecord(
        task=TASK,
        pool="pool",
        session="session",
        request_id="r1",
        input="do it",
        state="placed" if attempt else "queued",
        attempt=attempt,
        node=f"n{attempt}" if attempt else "",
    )
    return msgspec.structs.replace(record, **changes)


def result_of(record: TaskRecord, steps: tuple[Step, ...] = (), **changes: Any) -> ResultRecord:
    result = ResultRecord(
        task=record.task,
        pool=record.pool,
        session=record.session,
        request_id=record.request_id,
        state="done",
        output=f"by attempt {record.attempt}",
        attempt=record.attempt,
        node=record.node,
        steps=steps,
    )
    return msgspec.structs.replace(result, **changes)


def head_of(record: TaskRecord, version: int = 1) -> SessionHead:
    return SessionHead(
        pool="pool",
        session="session",
        version=version,
        last_task=record.task,
        home_node=record.node,
    )


def step(number: int, attempt: int = 1, **changes: Any) -> Step:
    made = Step(step=number, kind="tool", attempt=attempt, result=b"%d" % number)
    return msgspec.structs.replace(made, **changes)


def begin(world: World, attempt: int = 1) -> tuple[TaskRecord, Journal]:
    record = task_record(attempt)
    return record, world.journal(record, world.placed(record))


def requeue(world: World, to: int) -> tuple[TaskRecord, int]:
    """Place the task's next attempt as its owner does, keeping what the record holds."""
    found = world.record()
    assert found is not None
    record = msgspec.structs.replace(found[0], attempt=to, node=f"n{to}")
    revision = Run(place(world.log, LAYOUT, record, found[1], world.patience)).finish()
    return record, revision


def cancel(world: World, record: TaskRecord, revision: int) -> Run[ResultRecord]:
    result = result_of(record, state="cancelled", failure=Failure("cancelled", "asked"))
    return Run(end_task(world.log, LAYOUT, record, revision, result, world.patience))
