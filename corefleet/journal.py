"""The journal: the one way to write a task's steps.

docs/architecture.md, rules 1 to 3. Every append is fenced on the record's revision, the
sequence of the write that placed the attempt, so requeueing a task fences the attempt
before by itself. An append that was repeated may stand twice in the stream; the second
copy is the same bytes, and reading drops it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from corefleet.acceptance import place, submit
from corefleet.bus import Entry, Log, Stored
from corefleet.codec import decode, encode
from corefleet.ending import (
    HeadMoved,
    Stands,
    Superseded,
    carry_out,
    decide,
    end_task,
    ending_of,
    settle,
    settle_soon,
    settled,
    shelf_of,
)
from corefleet.errors import AttemptDropped, CorruptRecord, Fenced, NotFound
from corefleet.messages.records import (
    Ending,
    JournalEntry,
    ResultRecord,
    SessionHead,
    Step,
    TaskRecord,
)
from corefleet.subjects import Layout
from corefleet.sure_append import Patience, append_surely, read_surely

__all__ = ["Journal", "Patience", "end_task", "place", "submit"]

OPEN_STEP = -1
"""Number of the `open` step that a later attempt begins with; it is not replayed."""


class Journal:
    """One attempt's hold on its task's journal.

    `record` is the record that placed the attempt and `revision` its sequence. One
    append may be in flight at a time. Every method raises AttemptDropped when this
    attempt may not go on, and Unavailable when that could not be found out in time; after
    that the attempt may only be given back.
    """

    def __init__(
        self,
        log: Log,
        layout: Layout,
        record: TaskRecord,
        revision: int,
        patience: Patience | None = None,
    ) -> None:
        self._shelf = shelf_of(log, layout, record.task, patience or Patience())
        self._record = record
        self._revision = revision
        self._number = 0
        self._resumed = False
        """Another process of the node may have something on its way."""
        self._outcome: ResultRecord | None = None

    @property
    def outcome(self) -> ResultRecord | None:
        """The result of an earlier attempt's ending, when `open` found and carried it out."""
        return self._outcome

    async def open(self, node: str) -> tuple[Step, ...]:
        """Begin; return the steps that earlier attempts committed, in journal order.

        The first attempt costs nothing: there is nothing to read. Raises CorruptRecord
        when the journal holds a step twice, and AttemptDropped with `outcome` set when an
        earlier attempt had decided how the task ends.
        """
        record = self._record
        if record.ending is not None:
            await self._carry_out_inherited()
        if record.attempt <= 1:
            return ()
        await self._meet_settled()
        opened = Step(step=OPEN_STEP, kind="open", attempt=record.attempt, node=node)
        sequence = await self._append((opened,))
        shelf = self._shelf
        try:
            messages = await read_surely(
                lambda: shelf.log.read(shelf.journal, sequence, shelf.patience.call_s),
                shelf.patience,
            )
        except NotFound:
            raise self._dropped("its journal was ended by somebody else") from None
        return committed_steps(self._of_this_life(messages))

    async def resume(self) -> tuple[Step, ...]:
        """Carry on an attempt that another process of its node began; return its steps so far.

        Nothing is written: the attempt's fence holds. Raises CorruptRecord, and
        AttemptDropped with `outcome` set when the attempt had decided how the task ends.
        """
        shelf, record = self._shelf, self._record
        self._resumed = True
        stored = await read_surely(lambda: shelf.last(shelf.record), shelf.patience)
        if stored is None or stored.sequence != self._revision:
            self._outcome = await self._own_ending(stored)
            raise self._dropped("it had ended the task")
        await self._meet_settled()
        tail = await read_surely(lambda: shelf.last(shelf.journal), shelf.patience)
        if tail is None:
            return ()
        messages = await read_surely(
            lambda: shelf.log.read(shelf.journal, tail.sequence, shelf.patience.call_s),
            shelf.patience,
        )
        messages = self._of_this_life(messages)
        entries = [decode(message.payload, JournalEntry) for message in messages]
        own = [entry.number for entry in entries if entry.attempt == record.attempt]
        self._number = max(own, default=-1) + 1
        return committed_steps(messages)

    async def append(self, steps: tuple[Step, ...]) -> int:
        """Commit `steps`; return the sequence of the message that holds them."""
        return await self._append(steps)

    async def finish(
        self,
        result: ResultRecord,
        head: SessionHead | None = None,
        head_revision: int = 0,
        stands: Stands = lambda result: None,
    ) -> ResultRecord:
        """End the task with `result`; return the result that stands.

        `result.steps` is the task's trace; what the steps returned is left out of it.
        `head` replaces the session head whose sequence is `head_revision` (0: none yet);
        None leaves it as it is. `stands` is called as soon as nothing can change the
        result any more: watchers need not wait for the rest of the end.
        """
        result = _traced(result)
        ending = self._ending(result, head, head_revision)
        shelf = self._shelf
        if head is None:
            try:
                await settle(shelf, self._record, self._revision, result, ending, stands)
            except Superseded as moved:
                return await self._own_result(moved.stored)
            return result
        try:
            record, revision = await decide(shelf, self._record, self._revision, ending)
        except Superseded as moved:
            return await self._own_result(moved.stored)
        try:
            alone = not self._resumed
            return await carry_out(shelf, record, revision, result, stands, alone)
        except Superseded as moved:
            return await self._own_result(moved.stored)
        except HeadMoved:
            await self._take_back(record, revision)
            raise self._dropped("its session's head is another one by now") from None

    def finish_soon(
        self,
        result: ResultRecord,
        stands: Stands,
        done: Callable[[Callable[[], Coroutine[Any, Any, ResultRecord]] | None], None],
    ) -> None:
        """Do as `finish` does for a task that leaves its session's head, with nobody waiting.

        `done` is called once, later: with None when `result` is the task's and all is
        written, else with what goes on as `finish` does and returns or raises the same.
        """
        result = _traced(result)
        ending = self._ending(result)

        def settled(rest: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
            done(None if rest is None else partial(self._settle_rest, rest, result))

        settle_soon(self._shelf, self._record, self._revision, result, ending, stands, settled)

    async def _settle_rest(
        self, rest: Callable[[], Coroutine[Any, Any, None]], result: ResultRecord
    ) -> ResultRecord:
        try:
            await rest()
        except Superseded as moved:
            return await self._own_result(moved.stored)
        return result

    def _ending(
        self, result: ResultRecord, head: SessionHead | None = None, head_revision: int = 0
    ) -> Ending:
        journaled = self._number > 0 or self._record.attempt > 1
        return ending_of(result, head, head_revision, self._number, journaled)

    async def _append(self, steps: tuple[Step, ...]) -> int:
        shelf = self._shelf
        number = self._number
        message = JournalEntry(
            task=self._record.task, attempt=self._record.attempt, number=number, steps=steps
        )
        entry = Entry(
            shelf.journal,
            encode(message),
            fence_sequence=self._revision,
            fence_subject=shelf.record,
        )

        async def resolve() -> int | None:
            tail = await shelf.last(shelf.journal)
            if tail is not None and tail.payload == entry.payload:
                return tail.sequence
            stored = await shelf.last(shelf.record)
            if stored is not None and stored.sequence == self._revision:
                return None
            raise self._dropped(_story(stored))

        sequence = await append_surely(shelf.log, entry, resolve, shelf.patience)
        self._number = number + 1
        return sequence

    def _of_this_life(self, messages: list[Stored]) -> list[Stored]:
        """Leave out what an earlier task of the same request id left, whose result has expired."""
        return [each for each in messages if each.sequence > self._record.create_seq]

    async def _carry_out_inherited(self) -> None:
        """Carry out what an earlier attempt decided; returns only when that is void."""
        try:
            self._outcome = await carry_out(self._shelf, self._record, self._revision)
        except HeadMoved:
            return
        except Superseded as moved:
            raise self._dropped(_story(moved.stored)) from None
        raise self._dropped("an earlier attempt had ended the task")

    async def _meet_settled(self) -> None:
        """Raise AttemptDropped when an earlier attempt had settled on a result."""
        try:
            self._outcome = await settled(self._shelf, self._record, self._revision)
        except Superseded as moved:
            raise self._dropped(_story(moved.stored)) from None
        if self._outcome is not None:
            raise self._dropped("an earlier attempt had ended the task")

    async def _own_ending(self, stored: Stored | None) -> ResultRecord:
        """Return the result that this attempt decided on, carried out now if it was not yet."""
        if stored is not None:
            found = decode(stored.payload, TaskRecord)
            if found.ending is not None and (found.attempt, found.node, found.node_epoch) == (
                self._record.attempt,
                self._record.node,
                self._record.node_epoch,
            ):
                try:
                    return await carry_out(self._shelf, found, stored.sequence)
                except HeadMoved:
                    await self._take_back(found, stored.sequence)
                    raise self._dropped("its session's head is another one by now") from None
                except Superseded as moved:
                    stored = moved.stored
        return await self._own_result(stored)

    async def _own_result(self, stored: Stored | None) -> ResultRecord:
        """Return the standing result if this attempt wrote it."""
        shelf = self._shelf
        found = await read_surely(lambda: shelf.last(shelf.result), shelf.patience)
        if found is not None:
            result = decode(found.payload, ResultRecord)
            if result.attempt == self._record.attempt and result.node == self._record.node:
                return result
        raise self._dropped(_story(stored))

    async def _take_back(self, record: TaskRecord, revision: int) -> None:
        """Remove a void ending from the record, so that the task can go on."""
        cleared = msgspec.structs.replace(record, ending=None)
        try:
            await place(
                self._shelf.log, self._shelf.layout, cleared, revision, self._shelf.patience
            )
        except Fenced:
            return  # somebody else has found it void, too, and moved on

    def _dropped(self, reason: str) -> AttemptDropped:
        return AttemptDropped(f"{self._record.task}: attempt {self._record.attempt}: {reason}")


def _traced(result: ResultRecord) -> ResultRecord:
    """Leave out of a result's trace what the steps returned."""
    if not any(step.result for step in result.steps):
        return result
    trace = tuple(msgspec.structs.replace(step, result=b"") for step in result.steps)
    return msgspec.structs.replace(result, steps=trace)


def committed_steps(messages: list[Stored]) -> tuple[Step, ...]:
    """Return the steps in a journal's messages, in order.

    A step may have an `intent` before its result. Raises CorruptRecord when one is there
    twice.
    """
    seen: dict[tuple[int, int], bytes] = {}
    steps: dict[tuple[int, bool], Step] = {}
    for message in messages:
        entry = decode(message.payload, JournalEntry)
        key = (entry.attempt, entry.number)
        if key in seen:
            if seen[key] != message.payload:
                raise CorruptRecord(
                    f"{message.subject}: attempt {entry.attempt} has two appends {entry.number}"
                )
            continue
        seen[key] = message.payload
        for step in entry.steps:
            if step.kind == "open":
                continue
            number = (step.step, step.kind == "intent")
            if number in steps:
                raise CorruptRecord(
                    f"{message.subject}: step {step.step} by attempt {steps[number].attempt} "
                    f"and again by attempt {step.attempt}"
                )
            steps[number] = step
    return tuple(steps.values())


def _story(stored: Stored | None) -> str:
    if stored is None:
        return "the task has ended and its record is gone"
    record = decode(stored.payload, TaskRecord)
    where = f" on {record.node}" if record.node else ""
    return (
        f"the record is now at {stored.sequence}: {record.state}, attempt {record.attempt}{where}"
    )
