"""What is stored of one task, as the stream's leader knows it: result, record, journal."""

from __future__ import annotations

from dataclasses import dataclass

from controld.api import render
from controld.api.guard import Access
from controld.calls import OwnerCalls
from controld.cluster import Cluster
from corefleet.codec import decode
from corefleet.errors import NotFound, Unavailable
from corefleet.ids import check_task_id, shard_of_task
from corefleet.messages.records import (
    TERMINAL,
    JournalEntry,
    ResultRecord,
    Step,
    TaskRecord,
)
from corefleet.messages.wire import ListTasks
from corefleet.rpc import tasks_pb2

_READ_S = 2.0
_REASON_S = 0.3


@dataclass(frozen=True, slots=True)
class Story:
    """A task as it stands; `result` is set when it has ended."""

    task: tasks_pb2.Task
    result: ResultRecord | None
    stored: TaskRecord | ResultRecord
    """The result, or the record of a task that goes on."""


class Stories:
    """Reads tasks. Every method raises Unavailable when the stream does not answer."""

    def __init__(self, cluster: Cluster, calls: OwnerCalls) -> None:
        self._cluster = cluster
        self._calls = calls

    async def read(self, task: str) -> Story:
        """Return the task as it stands, with its owner's reason if that answers at once.

        Raises NotFound when no such task was accepted or its result has expired, and
        InvalidInput when `task` is no task id of this cluster.
        """
        check_task_id(task, self._cluster.settings.shards)
        result = await self.result(task)
        if result is not None:
            return Story(render.ended_task(result), result, result)
        record = await self._record(task)
        if record is not None and record.state not in TERMINAL:
            steps, journaled = await self._journal(task, record.create_seq)
            reason = await self._reason(record)
            return Story(render.live_task(record, steps, reason, journaled), None, record)
        # It may have ended between the two reads.
        result = await self.result(task)
        if result is None:
            raise NotFound(f"task {task}: not known; it never was, or its result has expired")
        return Story(render.ended_task(result), result, result)

    async def read_for(self, access: Access, task: str) -> Story:
        """Do as `read` does for a caller; raises PermissionDenied, too."""
        story = await self.read(task)
        access.check(story.stored.pool, story.stored.tenant)
        return story

    async def check(self, access: Access, task: str) -> None:
        """Raise what `read_for` raises; reads nothing for a caller who may see all tasks."""
        if not access.everywhere:
            await self.read_for(access, task)

    async def result(self, task: str) -> ResultRecord | None:
        """Return how the task ended; None while it has not, or when that has expired."""
        subject = self._cluster.layout.result(shard_of_task(task), task)
        stored = await self._cluster.log.last(subject, _READ_S)
        return decode(stored.payload, ResultRecord) if stored else None

    async def ended(self, task: str) -> ResultRecord | None:
        """Return the result if the task has ended, None while it is live.

        Raises NotFound when neither a result nor a live record is left.
        """
        result = await self.result(task)
        if result is not None:
            return result
        record = await self._record(task)
        if record is not None and record.state not in TERMINAL:
            return None
        result = await self.result(task)
        if result is None:
            raise NotFound(f"task {task}: it has ended and its result has expired")
        return result

    async def _record(self, task: str) -> TaskRecord | None:
        subject = self._cluster.layout.task(shard_of_task(task), task)
        stored = await self._cluster.log.last(subject, _READ_S)
        return decode(stored.payload, TaskRecord) if stored else None

    async def _journal(self, task: str, create_seq: int) -> tuple[tuple[Step, ...], int]:
        """Return the committed steps in order, and the newest attempt that appended.

        What lies before the task's create is of an earlier one of the same request id.
        """
        subject = self._cluster.layout.journal(shard_of_task(task), task)
        newest = await self._cluster.log.last(subject, _READ_S)
        if newest is None:
            return (), 0
        steps: dict[int, Step] = {}
        attempt = 0
        try:
            stored = await self._cluster.log.read(subject, newest.sequence, _READ_S)
        except NotFound:
            # It ended meanwhile and its journal was rolled up: the result will be read.
            return (), 0
        for message in stored:
            if message.sequence < create_seq:
                continue
            entry = decode(message.payload, JournalEntry)
            attempt = max(attempt, entry.attempt)
            steps.update((step.step, step) for step in entry.steps if step.kind != "intent")
        return tuple(steps[number] for number in sorted(steps)), attempt

    async def _reason(self, record: TaskRecord) -> str:
        filters = ListTasks(pool=record.pool, session=record.session)
        try:
            lines = await self._calls.list(shard_of_task(record.task), filters, _REASON_S)
        except Unavailable:
            return "its shard has no owner just now"
        for line in lines.tasks:
            if line.record.task == record.task:
                return line.reason
        return ""
