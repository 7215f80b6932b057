"""How a task begins: accepted once for each request id, and placed under its fence.

docs/architecture.md, rule 4. A task's id is derived from its request id, and its record is
created only if nothing of the task is there, neither record nor result: one write, fenced
by the server on all the subjects where either would lie. The record is there until the
result is, and the result for the pool's `result_ttl_s`: so long the request id makes no
second task, whoever repeats it.
"""

from __future__ import annotations

from corefleet.bus import Entry, Log
from corefleet.codec import decode, encode
from corefleet.ending import Superseded, shelf_of
from corefleet.errors import Conflict, CorefleetError, Fenced, StoreFull, Unavailable
from corefleet.ids import shard_of_task
from corefleet.messages.records import ResultRecord, TaskRecord
from corefleet.subjects import Layout
from corefleet.sure_append import BackOff, Patience, append_surely


async def submit(
    log: Log, layout: Layout, record: TaskRecord, patience: Patience | None = None
) -> tuple[str, bool]:
    """Accept a task; return its id and whether an earlier submission had made it.

    `record.task` is `task_id_of` its shard and request id. `record` is durable when this
    returns. Raises Conflict when the request id was used for something else, StoreFull, and
    Unavailable when it is unclear whether the task was accepted: the same submission,
    repeated, finds out.
    """
    patience = patience or Patience()
    try:
        await log.append(creation(layout, record), patience.call_s)
    except StoreFull:
        raise
    except (Fenced, Unavailable):
        return await find_out(log, layout, record, patience)
    return record.task, False


def creation(layout: Layout, record: TaskRecord) -> Entry:
    """Return what creates the record, unless something of the task is there."""
    shard = shard_of_task(record.task)
    return Entry(
        layout.task(shard, record.task),
        encode(record),
        fence_sequence=0,
        fence_subject=layout.task_or_result(shard, record.task),
    )


def rewrite(layout: Layout, record: TaskRecord, revision: int) -> Entry:
    """Return what replaces the record if its sequence is still `revision`."""
    subject = layout.task(shard_of_task(record.task), record.task)
    return Entry(subject, encode(record), fence_sequence=revision, rollup=True)


async def find_out(
    log: Log, layout: Layout, record: TaskRecord, patience: Patience
) -> tuple[str, bool]:
    """Go on with a submission whose creation was refused or not answered, as `submit` does."""
    back_off = BackOff(patience)
    while True:
        try:
            standing = await _standing(log, layout, record, patience)
            if standing is not None:
                return record.task, not _made_by(record, standing)
            await log.append(creation(layout, record), patience.call_s)
            return record.task, False
        except StoreFull:
            raise
        except (Fenced, Unavailable) as error:
            await back_off.after(error)


async def _standing(
    log: Log, layout: Layout, record: TaskRecord, patience: Patience
) -> TaskRecord | ResultRecord | None:
    """Return the record or the result that is there; the record goes only after the result came."""
    shard = shard_of_task(record.task)
    found: TaskRecord | ResultRecord
    stored = await log.last(layout.task(shard, record.task), patience.call_s)
    if stored is not None:
        found = decode(stored.payload, TaskRecord)
    else:
        stored = await log.last(layout.result(shard, record.task), patience.call_s)
        if stored is None:
            return None
        found = decode(stored.payload, ResultRecord)
    if found.digest != record.digest and found.digest:
        raise Conflict(
            f"request_id {record.request_id}: used for another submission (task "
            f"{record.task}); expected the same pool, session and input"
        )
    return found


def _made_by(record: TaskRecord, standing: TaskRecord | ResultRecord) -> bool:
    """Whether what stands was made by the submission of `record`."""
    origin = standing.origin if isinstance(standing, TaskRecord) else record.origin
    return (origin, standing.created_ms) == (record.origin, record.created_ms)


async def place(
    log: Log,
    layout: Layout,
    record: TaskRecord,
    revision: int,
    patience: Patience | None = None,
    first: CorefleetError | None = None,
) -> int:
    """Rewrite a record whose sequence is `revision`; return its new sequence.

    Places or requeues: either fences the attempt before. `first` is what an append of the
    `rewrite` came to that is over already. Raises Fenced when somebody
    else rewrote it first, Unavailable when that stays unclear.
    """
    shelf = shelf_of(log, layout, record.task, patience or Patience())
    entry = rewrite(layout, record, revision)

    async def resolve() -> int | None:
        stored = await shelf.last(shelf.record)
        if stored is not None and stored.sequence == revision:
            return None
        if stored is not None and stored.payload == entry.payload:
            return stored.sequence
        raise Superseded(stored)

    try:
        return await append_surely(log, entry, resolve, shelf.patience, False, first)
    except Superseded as moved:
        now_at = moved.stored.sequence if moved.stored is not None else "gone"
        raise Fenced(f"{record.task}: the record is not at {revision} but {now_at}") from None
