"""Reads along in the streams and finds what must never stand there.

A stream is one order of everything (docs/architecture.md, rule 1), so whoever reads it
from its beginning can say of each message whether it was allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from corefleet.adapters.nats_bus import NatsBus
from corefleet.adapters.nats_follow import NatsFollower
from corefleet.adapters.nats_log import NatsLog
from corefleet.bus import Stored
from corefleet.codec import decode
from corefleet.ids import shard_of_task
from corefleet.messages.records import TERMINAL, JournalEntry, OwnerMark, ResultRecord, TaskRecord
from corefleet.subjects import Layout, kind_of

_READ_S = 2.0
_UNNUMBERED = frozenset({"open", "intent"})
"""An intent is the same step as its tool; an open is none."""


@dataclass(slots=True)
class _Task:
    record: TaskRecord | None = None
    entries: dict[tuple[int, int], bytes] = field(default_factory=dict)
    steps: dict[int, tuple[int, int]] = field(default_factory=dict)
    result: bytes = b""


class Audit:
    """What the streams held so far; `wrong` is empty as long as the rules hold."""

    def __init__(self, bus: NatsBus, layout: Layout) -> None:
        self._log = NatsLog(bus)
        self._layout = layout
        self._followers: list[NatsFollower] = []
        self._tasks: dict[str, _Task] = {}
        self._marks: dict[int, OwnerMark] = {}
        self.outdated: list[str] = []
        """Records placed or requeued under an epoch below that of the shard's mark (rule 7)."""
        self.wrong: list[str] = []
        self.read = 0

    async def start(self) -> None:
        for stream in range(self._layout.streams):
            subjects = [self._layout.stream_subjects(stream)]
            self._followers.append(await self._log.follow(stream, subjects, self._take))

    async def close(self) -> None:
        for follower in self._followers:
            await follower.close()
        self._followers.clear()

    def unended(self, tasks: set[str]) -> list[str]:
        """Return those of `tasks` that the streams hold no result for."""
        return sorted(t for t in tasks if t not in self._tasks or not self._tasks[t].result)

    async def live(self) -> list[str]:
        """Return the records that are not terminal. Raises Unavailable.

        A terminal record expires in seconds: one that was not seen has gone by now.
        """
        found = []
        for name, task in self._tasks.items():
            if task.record is None or task.record.state in TERMINAL:
                continue
            subject = self._layout.task(shard_of_task(name), name)
            stored = await self._log.last(subject, _READ_S)
            if stored is None:
                task.record = None
                continue
            record = decode(stored.payload, TaskRecord)
            if record.state not in TERMINAL:
                found.append(f"{record} at {stored.sequence}")
        return found

    def _take(self, stored: Stored) -> None:
        self.read += 1
        match kind_of(stored.subject):
            case "task":
                self._take_record(decode(stored.payload, TaskRecord), stored)
            case "owner":
                mark = decode(stored.payload, OwnerMark)
                self._marks[mark.shard] = mark
            case "log":
                self._judge_entry(decode(stored.payload, JournalEntry), stored)
            case "res":
                self._judge_result(decode(stored.payload, ResultRecord), stored)

    def _take_record(self, record: TaskRecord, stored: Stored) -> None:
        task = self._tasks.setdefault(record.task, _Task())
        before, task.record = task.record, record
        mark = self._marks.get(shard_of_task(record.task))
        moved = before is not None and before.attempt != record.attempt
        if moved and mark is not None and record.owner_epoch < mark.epoch:
            self.outdated.append(
                f"{stored.subject} at {stored.sequence}: attempt {record.attempt} of owner epoch "
                f"{record.owner_epoch}; {mark.controld} had begun {mark.epoch}"
            )

    def _judge_entry(self, entry: JournalEntry, stored: Stored) -> None:
        task = self._tasks.setdefault(entry.task, _Task())
        if entry.finish:
            numbers = [s.step for s in entry.steps if s.kind not in _UNNUMBERED]
            if len(numbers) != len(set(numbers)):
                self._accuse(stored, f"its trace has steps twice: {numbers}")
            return
        self._judge_fence(task, entry, stored)
        at = entry.attempt, entry.number
        before = task.entries.setdefault(at, stored.payload)
        if before != stored.payload:
            self._accuse(stored, f"append {at} stands there with other content")
            return
        for step in entry.steps:
            if step.kind not in _UNNUMBERED and task.steps.setdefault(step.step, at) != at:
                self._accuse(stored, f"step {step.step} of {task.steps[step.step]} again in {at}")

    def _judge_fence(self, task: _Task, entry: JournalEntry, stored: Stored) -> None:
        """Rule 1: no attempt appends after the write that fenced it."""
        record = task.record
        if record is None:
            return
        requeued = record.attempt == entry.attempt and record.state == "queued"
        if record.attempt > entry.attempt or requeued:
            self._accuse(
                stored,
                f"attempt {entry.attempt} appends; {record.state} at attempt {record.attempt}",
            )

    def _judge_result(self, result: ResultRecord, stored: Stored) -> None:
        task = self._tasks.setdefault(result.task, _Task())
        if task.result and task.result != stored.payload:
            self._accuse(stored, "a second, different result")
        task.result = stored.payload

    def _accuse(self, stored: Stored, what: str) -> None:
        self.wrong.append(f"{stored.subject} at {stored.sequence}: {what}")
