"""How a task begins: accepted once for each request id, and placed under its fence.

docs/architecture.md, rule 4. A submission writes the request id first (create, time to
live) and then the record, fenced on the request id's message. A request id that is
there without record and result belongs to a submission that died in between: whoever
meets it rewrites it, which fences the dead one for good, and creates the record. The
request id expires before the result can, so one that is there is never mistaken.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from corefleet.bus import Entry, Log, Stored
from corefleet.codec import decode, encode
from corefleet.ending import Superseded, shelf_of
from corefleet.errors import Conflict, Fenced, StoreFull, Unavailable
from corefleet.ids import shard_of_task
from corefleet.messages.records import RequestRecord, TaskRecord
from corefleet.subjects import Layout
from corefleet.sure_append import BackOff, Patience, append_surely


async def submit(
    log: Log,
    layout: Layout,
    request: RequestRecord,
    record: TaskRecord,
    patience: Patience | None = None,
) -> tuple[str, bool]:
    """Accept a task; return its id and whether an earlier submission had made it.

    `record` is durable when this returns. Raises Conflict when the request id was used
    for something else, StoreFull, and Unavailable when it is unclear whether the task
    was accepted: the same submission, repeated, finds out.
    """
    patience = patience or Patience()
    submission = _Submission(log, layout, request, record, patience)
    try:
        return await submission.first()
    except StoreFull:
        raise
    except (Fenced, Unavailable):
        pass  # the second look finds out what that meant
    back_off = BackOff(patience)
    while True:
        try:
            return await submission.again()
        except StoreFull:
            raise
        except (Fenced, Unavailable) as error:
            await back_off.after(error)


async def place(
    log: Log, layout: Layout, record: TaskRecord, revision: int, patience: Patience | None = None
) -> int:
    """Rewrite a record whose sequence is `revision`; return its new sequence.

    Places or requeues: either fences the attempt before. Raises Fenced when somebody
    else rewrote it first, Unavailable when that stays unclear.
    """
    shelf = shelf_of(log, layout, record.task, patience or Patience())
    entry = Entry(shelf.record, encode(record), fence_sequence=revision, rollup=True)

    async def resolve() -> int | None:
        stored = await shelf.last(shelf.record)
        if stored is not None and stored.sequence == revision:
            return None
        if stored is not None and stored.payload == entry.payload:
            return stored.sequence
        raise Superseded(stored)

    try:
        return await append_surely(log, entry, resolve, shelf.patience, wait_for_room=False)
    except Superseded as moved:
        now_at = moved.stored.sequence if moved.stored is not None else "gone"
        raise Fenced(f"{record.task}: the record is not at {revision} but {now_at}") from None


@dataclass(slots=True, frozen=True)
class _Submission:
    """One submission. Its methods raise Fenced when somebody else was faster."""

    log: Log
    layout: Layout
    request: RequestRecord
    record: TaskRecord
    patience: Patience

    async def first(self) -> tuple[str, bool]:
        """Write request id and record as if nobody had before."""
        entry = Entry(
            self._subject(), encode(self.request), fence_sequence=0, ttl_s=self.record.result_ttl_s
        )
        revision = await self.log.append(entry, self.patience.call_s)
        return await self._create(self.record.task, revision)

    async def again(self) -> tuple[str, bool]:
        """Find out what is there, and do what is missing."""
        stored = await self._last(self._subject())
        if stored is None:
            return await self.first()
        standing = self._same(stored)
        if await self._known(standing.task):
            return standing.task, standing.task != self.record.task
        taken = Entry(
            self._subject(),
            stored.payload,
            fence_sequence=stored.sequence,
            rollup=True,
            ttl_s=self.record.result_ttl_s,
        )
        revision = await self.log.append(taken, self.patience.call_s)
        if await self._known(standing.task):
            return standing.task, standing.task != self.record.task
        return await self._create(standing.task, revision)

    async def _create(self, task: str, revision: int) -> tuple[str, bool]:
        record = msgspec.structs.replace(self.record, task=task)
        entry = Entry(
            self.layout.task(shard_of_task(task), task),
            encode(record),
            fence_sequence=revision,
            fence_subject=self._subject(),
        )
        await self.log.append(entry, self.patience.call_s)
        return task, task != self.record.task

    async def _known(self, task: str) -> bool:
        """Whether the task lives or has ended: the record goes only after the result came."""
        shard = shard_of_task(task)
        if await self._last(self.layout.task(shard, task)) is not None:
            return True
        return await self._last(self.layout.result(shard, task)) is not None

    async def _last(self, subject: str) -> Stored | None:
        return await self.log.last(subject, self.patience.call_s)

    def _same(self, stored: Stored) -> RequestRecord:
        standing = decode(stored.payload, RequestRecord)
        if standing.digest != self.request.digest:
            raise Conflict(
                f"request_id {standing.request_id}: used for another submission (task "
                f"{standing.task}); expected the same pool, session and input"
            )
        return standing

    def _subject(self) -> str:
        return self.layout.request(shard_of_task(self.record.task), self.request.request_id)
