"""Defects put into the code on purpose: a simulation that does not find them finds nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from controld import runner as runner_module
from controld.core.ready_queue import ReadyQueue, Session
from controld.core.shard_io import CaughtUp
from controld.membership import Membership
from controld.runner import ShardRunner
from corefleet import journal
from corefleet.bus import Entry, Log
from corefleet.codec import encode
from corefleet.errors import Unavailable
from corefleet.ids import shard_of_task
from corefleet.messages.records import RequestRecord, Step, TaskRecord
from corefleet.subjects import Layout
from corefleet.sure_append import append_surely

Patch = pytest.MonkeyPatch


def no_barrier(patch: Patch) -> None:
    """Rule 7 ignored: a new owner decides before it has seen its own mark."""
    start = ShardRunner.start

    async def hasty(self: ShardRunner) -> None:
        self.handle(CaughtUp())
        await start(self)

    patch.setattr(ShardRunner, "start", hasty)


def lease_for_ever(patch: Patch) -> None:
    """Rule 7 ignored: an owner goes on deciding when its lease is over."""
    patch.setattr(Membership, "valid_until", lambda self: float("inf"))


def no_journal_fence(patch: Patch) -> None:
    """Rule 1 ignored: appends to journals expect nothing."""

    async def unfenced(log: Log, entry: Entry, *more: Any, **named: Any) -> int:
        free = msgspec.structs.replace(entry, fence_sequence=None, fence_subject="")
        return await append_surely(log, free, *more, **named)

    patch.setattr(journal, "append_surely", unfenced)


def no_record_fence(patch: Patch) -> None:
    """Rules 7 and 9 ignored: an owner's placing and requeueing overwrite what stands there."""

    async def place(
        log: Log, layout: Layout, record: TaskRecord, revision: int, patience: Any = None
    ) -> int:
        subject = layout.task(shard_of_task(record.task), record.task)
        while True:
            try:
                return await log.append(Entry(subject, encode(record), rollup=True), 2.0)
            except Unavailable:
                await asyncio.sleep(0.05)

    patch.setattr(runner_module, "place", place)


def no_session_order(patch: Patch) -> None:
    """Rule 6 ignored: a task waits for nobody of its session."""
    refresh = ReadyQueue._refresh

    def all_ready(self: ReadyQueue, session: Session) -> None:
        whole, busy = session.order, session.busy
        for task in whole:
            session.order, session.busy = [task], 0
            refresh(self, session)
        session.order, session.busy = whole, busy

    patch.setattr(ReadyQueue, "_refresh", all_ready)


def no_replay(patch: Patch) -> None:
    """Rule 2 ignored: a later attempt does not read what earlier ones journaled."""
    opened = journal.Journal.open

    async def forgetful(self: journal.Journal, node: str) -> tuple[Step, ...]:
        await opened(self, node)
        return ()

    patch.setattr(journal.Journal, "open", forgetful)


def no_request_id(patch: Patch) -> None:
    """Rule 4 ignored: each submission makes a task of its own."""

    async def submit(
        log: Log, layout: Layout, request: RequestRecord, record: TaskRecord, patience: Any = None
    ) -> tuple[str, bool]:
        subject = layout.task(shard_of_task(record.task), record.task)
        await log.append(Entry(subject, encode(record), fence_sequence=0), 2.0)
        return record.task, False

    patch.setattr("controld.intake.submit", submit)


@dataclass(frozen=True, slots=True)
class Mutation:
    """A defect, and the properties of which one must show it."""

    make: Callable[[Patch], None]
    shows: frozenset[str]

    @property
    def name(self) -> str:
        return self.make.__name__


MUTATIONS = tuple(
    Mutation(make, frozenset(shows.split()))
    for make, shows in (
        (no_barrier, "order model owner defect writer"),
        (lease_for_ever, "owner"),
        (no_journal_fence, "writer twice"),
        (no_record_fence, "writer twice order model lost ends"),
        (no_session_order, "order"),
        (no_replay, "twice"),
        (no_request_id, "request"),
    )
)
