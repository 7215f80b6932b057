"""How a task ends: decided by one write, carried out by whoever finds it decided.

docs/architecture.md, rule 3. The decision is the record itself, rewritten under
compare-and-set with an `Ending` in it; that fences the journal and everybody else who
would end or requeue the task. Then, each step harmless when repeated: the session head
(compare-and-set; if another one stands there, the ending is void), the result (create),
the journal in short form, and last the record's terminal form, which expires at once.
Whoever dies in between leaves the ending in the record, and the next attempt, or the
owner, carries it out.

An attempt that leaves its session's head as it was decides by the result itself: its
create is fenced on the record, so it can be written only while the attempt holds the
task, and whoever holds the task later finds it before doing anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from corefleet.bus import Entry, Log, Stored
from corefleet.codec import decode, encode
from corefleet.errors import CorefleetError, Fenced, NotFound
from corefleet.ids import ShardId, shard_of_task
from corefleet.messages.records import (
    TERMINAL,
    Ending,
    JournalEntry,
    ResultRecord,
    SessionHead,
    TaskRecord,
)
from corefleet.subjects import Layout
from corefleet.sure_append import Patience, append_surely, read_surely

TERMINAL_TTL_S = 15
"""How long followers have to see that a record is terminal: longer than a stream is without a
leader, or a follower on its way to another server (4 to 9 s, docs/failure-matrix.md)."""
RESULT_SLACK_S = 5
"""A result outlives its request id by this, which `submit` counts on."""


Stands = Callable[[ResultRecord], None]


class HeadMoved(Exception):
    """The session head is not the one that the ending was made from: the ending is void."""


class Superseded(Exception):
    """The record is no longer the one that was to be ended; `stored` is what is there."""

    def __init__(self, stored: Stored | None) -> None:
        super().__init__("the task's record has moved on")
        self.stored = stored


@dataclass(slots=True, frozen=True)
class Shelf:
    """Where one task's records lie."""

    log: Log
    layout: Layout
    task: str
    shard: ShardId
    patience: Patience

    @property
    def record(self) -> str:
        return self.layout.task(self.shard, self.task)

    @property
    def journal(self) -> str:
        return self.layout.journal(self.shard, self.task)

    @property
    def result(self) -> str:
        return self.layout.result(self.shard, self.task)

    async def last(self, subject: str) -> Stored | None:
        return await self.log.last(subject, self.patience.call_s)


def shelf_of(log: Log, layout: Layout, task: str, patience: Patience) -> Shelf:
    return Shelf(log, layout, task, shard_of_task(task), patience)


def ending_of(
    result: ResultRecord,
    head: SessionHead | None = None,
    head_revision: int = 0,
    number: int = 0,
    journaled: bool = True,
) -> Ending:
    """Return the Ending that makes `result` the task's result and `head` its session's head."""
    return Ending(
        state=result.state,
        failure=result.failure,
        result=encode(result),
        head=b"" if head is None else encode(head),
        head_revision=head_revision,
        number=number,
        journaled=journaled,
    )


async def end_task(
    log: Log,
    layout: Layout,
    record: TaskRecord,
    revision: int,
    result: ResultRecord,
    patience: Patience | None = None,
) -> ResultRecord:
    """End a task by its owner's hand: cancel, deadline, dead letter.

    Returns the result that stands: `result` itself, or that of whoever was first.
    Raises Fenced when the record was rewritten without being ended, NotFound when
    neither record nor result is there any more, Unavailable.
    """
    shelf = shelf_of(log, layout, record.task, patience or Patience())
    if record.ending is not None:
        try:
            return await carry_out(shelf, record, revision)
        except HeadMoved:
            pass  # void: the task can be ended otherwise
        except Superseded as moved:
            return await _winner(shelf, moved.stored)
    ending = ending_of(result, journaled=record.attempt > 0)
    try:
        decided, sequence = await decide(shelf, record, revision, ending)
        return await carry_out(shelf, decided, sequence, result)
    except Superseded as moved:
        return await _winner(shelf, moved.stored)


async def settle(
    shelf: Shelf,
    record: TaskRecord,
    revision: int,
    result: ResultRecord,
    ending: Ending,
    stands: Stands,
    first: CorefleetError | None = None,
) -> None:
    """End a task whose session's head stays as it was; `ending` is that of `result`.

    `first` is what an append of the result came to that is over already. Raises Superseded
    and Unavailable.
    """
    entry = _settling(shelf, record, revision, ending)

    async def resolve() -> int | None:
        found = await shelf.last(shelf.result)
        if found is not None and found.payload == entry.payload:
            return found.sequence
        stored = await shelf.last(shelf.record)
        if found is None and stored is not None and stored.sequence == revision:
            return None
        raise Superseded(stored)

    await append_surely(shelf.log, entry, resolve, shelf.patience, first=first)
    stands(result)
    await _close(shelf, record, revision, ending, result)


def settle_soon(
    shelf: Shelf,
    record: TaskRecord,
    revision: int,
    result: ResultRecord,
    ending: Ending,
    stands: Stands,
    done: Callable[[Callable[[], Coroutine[Any, Any, None]] | None], None],
) -> None:
    """Do as `settle` does, with nobody waiting as long as every answer is plain.

    `done` is called with None when all is written, else with what does the rest.
    """
    log, call_s = shelf.log, shelf.patience.call_s

    def settled(outcome: int | CorefleetError) -> None:
        if isinstance(outcome, CorefleetError):
            done(partial(settle, shelf, record, revision, result, ending, stands, outcome))
            return
        stands(result)
        if ending.journaled:
            log.append_soon(_closing(shelf, record, revision, ending, result), call_s, closed)
        else:
            closed(0)

    def closed(outcome: int | CorefleetError) -> None:
        if isinstance(outcome, CorefleetError):
            done(rest)
        else:
            log.append_soon(_terminal(shelf, record, revision, ending), call_s, ended)

    def ended(outcome: int | CorefleetError) -> None:
        done(rest if isinstance(outcome, CorefleetError) else None)

    rest = partial(_close, shelf, record, revision, ending, result)
    log.append_soon(_settling(shelf, record, revision, ending), call_s, settled)


def _settling(shelf: Shelf, record: TaskRecord, revision: int, ending: Ending) -> Entry:
    return Entry(
        shelf.result,
        ending.result,
        fence_sequence=revision,
        fence_subject=shelf.record,
        ttl_s=record.result_ttl_s + RESULT_SLACK_S,
    )


async def settled(shelf: Shelf, record: TaskRecord, revision: int) -> ResultRecord | None:
    """Return the result that an earlier attempt settled on, its end carried out.

    None when there is none: then none can come, for `record` fences all earlier ones.
    """
    found = await read_surely(lambda: shelf.last(shelf.result), shelf.patience)
    if found is None:
        return None
    result = decode(found.payload, ResultRecord)
    await _close(shelf, record, revision, ending_of(result), result)
    return result


async def decide(
    shelf: Shelf, record: TaskRecord, revision: int, ending: Ending
) -> tuple[TaskRecord, int]:
    """Put `ending` into the record; return it with its new sequence.

    Raises Superseded, StoreFull, and Unavailable when patience is at its end.
    """
    live = record.state
    if live in TERMINAL:  # an owner hands the record as it will be
        live = "placed" if record.node else "queued"
    decided = msgspec.structs.replace(record, state=live, ending=ending)
    entry = Entry(shelf.record, encode(decided), fence_sequence=revision, rollup=True)

    async def resolve() -> int | None:
        stored = await shelf.last(shelf.record)
        if stored is not None and stored.sequence == revision:
            return None
        if stored is not None and stored.payload == entry.payload:
            return stored.sequence
        raise Superseded(stored)

    sequence = await append_surely(shelf.log, entry, resolve, shelf.patience, wait_for_room=False)
    return decided, sequence


async def carry_out(
    shelf: Shelf,
    record: TaskRecord,
    revision: int,
    result: ResultRecord | None = None,
    stands: Stands = lambda result: None,
    alone: bool = False,
) -> ResultRecord:
    """Do what the ending in `record` says; return the result that stands then.

    Several may do so at once. `result` spares decoding it. `alone`: nobody can have settled
    on a result before, which spares looking for it. `stands` is called as soon as
    nothing can change the result, before the rest is done. Raises HeadMoved,
    Superseded, and Unavailable when patience is at its end.
    """
    ending = record.ending
    if ending is None:
        raise ValueError(f"{record.task}: the record has no ending")
    if result is None:
        result = decode(ending.result, ResultRecord)
    if ending.head:
        await _write_head(shelf, record, revision, ending)
    other = await _write_result(shelf, record, revision, ending, alone)
    if other is not None:
        # An attempt had settled on it before this ending was decided.
        result = other
        ending = msgspec.structs.replace(ending, state=other.state, failure=other.failure)
    stands(result)
    await _close(shelf, record, revision, ending, result)
    return result


async def _close(
    shelf: Shelf, record: TaskRecord, revision: int, ending: Ending, result: ResultRecord
) -> None:
    if ending.journaled:
        await _write_journal(shelf, record, revision, ending, result)
    await _write_terminal(shelf, record, revision, ending)


async def _write_head(shelf: Shelf, record: TaskRecord, revision: int, ending: Ending) -> None:
    subject = shelf.layout.head(shelf.shard, record.pool, record.session)
    entry = Entry(subject, ending.head, fence_sequence=ending.head_revision, rollup=True)

    async def resolve() -> int | None:
        head = await shelf.last(subject)
        if head is not None and head.payload == ending.head:
            return head.sequence
        if (head.sequence if head is not None else 0) == ending.head_revision:
            return None
        stored = await shelf.last(shelf.record)
        if stored is None or stored.sequence != revision:
            raise Superseded(stored)
        raise HeadMoved

    await append_surely(shelf.log, entry, resolve, shelf.patience)


async def _write_result(
    shelf: Shelf, record: TaskRecord, revision: int, ending: Ending, alone: bool
) -> ResultRecord | None:
    """Create the result; return the one that stood there before, if it is another.

    Fenced on there being nothing of the task behind the record at `revision`: a process that
    was frozen for long cannot write it into a later life of the same request id. Raises
    Superseded.
    """
    other: ResultRecord | None = None
    entry = Entry(
        shelf.result,
        ending.result,
        fence_sequence=revision,
        fence_subject=shelf.layout.task_or_result(shelf.shard, shelf.task),
        ttl_s=record.result_ttl_s + RESULT_SLACK_S,
    )

    async def resolve() -> int | None:
        nonlocal other
        found = await shelf.last(shelf.result)
        if found is not None:
            if found.payload != ending.result:
                other = decode(found.payload, ResultRecord)
            return found.sequence
        stored = await shelf.last(shelf.record)
        if stored is None or stored.sequence != revision:
            raise Superseded(stored)
        return None

    if not alone and await read_surely(resolve, shelf.patience) is not None:
        return other
    await append_surely(shelf.log, entry, resolve, shelf.patience)
    return other


def _closing(
    shelf: Shelf, record: TaskRecord, revision: int, ending: Ending, result: ResultRecord
) -> Entry:
    finish = JournalEntry(
        task=record.task,
        attempt=result.attempt,
        number=ending.number,
        steps=result.steps,
        finish=True,
    )
    return Entry(
        shelf.journal,
        encode(finish),
        fence_sequence=revision,
        fence_subject=shelf.record,
        rollup=True,
        ttl_s=record.result_ttl_s,
    )


def _terminal(shelf: Shelf, record: TaskRecord, revision: int, ending: Ending) -> Entry:
    terminal = msgspec.structs.replace(
        record, state=ending.state, failure=ending.failure, ending=None, input=""
    )
    return Entry(
        shelf.record,
        encode(terminal),
        fence_sequence=revision,
        rollup=True,
        ttl_s=TERMINAL_TTL_S,
    )


async def _write_journal(
    shelf: Shelf, record: TaskRecord, revision: int, ending: Ending, result: ResultRecord
) -> None:
    entry = _closing(shelf, record, revision, ending, result)

    async def resolve() -> int | None:
        stored = await shelf.last(shelf.record)
        if stored is not None and stored.sequence == revision:
            return None  # whether or not it is there: once more makes no difference
        return 0

    await append_surely(shelf.log, entry, resolve, shelf.patience)


async def _write_terminal(shelf: Shelf, record: TaskRecord, revision: int, ending: Ending) -> None:
    entry = _terminal(shelf, record, revision, ending)

    async def resolve() -> int | None:
        stored = await shelf.last(shelf.record)
        if stored is not None and stored.sequence == revision:
            return None
        # Terminal already, gone, or requeued with the ending still in it: the result
        # stands, and whoever moved the record carries the rest out.
        return 0

    await append_surely(shelf.log, entry, resolve, shelf.patience)


async def _winner(shelf: Shelf, stored: Stored | None) -> ResultRecord:
    """Return the result of whoever ended the task first, carrying its ending out."""
    while True:
        if stored is None:
            return await _standing(shelf)
        record = decode(stored.payload, TaskRecord)
        if record.state in TERMINAL:
            return await _standing(shelf)
        if record.ending is None:
            raise Fenced(f"{shelf.task}: the record moved on to {stored.sequence}")
        try:
            return await carry_out(shelf, record, stored.sequence)
        except HeadMoved:
            raise Fenced(f"{shelf.task}: a void ending stands at {stored.sequence}") from None
        except Superseded as moved:
            stored = moved.stored


async def _standing(shelf: Shelf) -> ResultRecord:
    stored = await read_surely(lambda: shelf.last(shelf.result), shelf.patience)
    if stored is None:
        raise NotFound(f"{shelf.task}: neither a record nor a result is there any more")
    return decode(stored.payload, ResultRecord)
