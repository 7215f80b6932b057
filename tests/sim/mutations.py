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
from corefleet.messages.records import Step, TaskRecord
from corefleet.subjects import Layout
from corefleet.sure_append import append_surely
from tests.sim.plan import BUSY_CONTROLD, Fault, Plan, draw_plan

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

    def rewrite(layout: Layout, record: TaskRecord, revision: int) -> Entry:
        subject = layout.task(shard_of_task(record.task), record.task)
        return Entry(subject, encode(record), rollup=True)

    async def place(
        log: Log, layout: Layout, record: TaskRecord, revision: int, *_: Any, **__: Any
    ) -> int:
        while True:
            try:
                return await log.append(rewrite(layout, record, revision), 2.0)
            except Unavailable:
                await asyncio.sleep(0.05)

    patch.setattr(runner_module, "rewrite", rewrite)
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
    """Rule 4 ignored: a repeated submission creates its task again."""

    def creation(layout: Layout, record: TaskRecord) -> Entry:
        subject = layout.task(shard_of_task(record.task), record.task)
        return Entry(subject, encode(record), rollup=True)

    patch.setattr("controld.intake.creation", creation)
    patch.setattr("corefleet.acceptance.creation", creation)


@dataclass(frozen=True, slots=True)
class Mutation:
    """A defect, and the properties of which one must show it."""

    make: Callable[[Patch], None]
    shows: frozenset[str]
    faults: tuple[Fault, ...] = ()
    """Beside those of the seed's plan: what the rule is there for."""

    def plan(self, seed: int) -> Plan:
        """Return the plan of a seed with the faults that the defect needs."""
        plan = draw_plan(seed)
        return msgspec.structs.replace(plan, faults=(*plan.faults, *self.faults))

    @property
    def name(self) -> str:
        return self.make.__name__


_CUT_OFF = tuple(Fault(at, "etcd_cut", BUSY_CONTROLD, 5.0, 2.0) for at in (5.0, 11.0))
_NEEDS: dict[Callable[[Patch], None], tuple[Fault, ...]] = {lease_for_ever: _CUT_OFF}

MUTATIONS = tuple(
    Mutation(make, frozenset(shows.split()), _NEEDS.get(make, ()))
    for make, shows in (
        (no_barrier, "order model owner defect writer"),
        (lease_for_ever, "owner"),
        (no_journal_fence, "writer twice"),
        (no_record_fence, "writer twice order model lost ends"),
        (no_session_order, "order"),
        (no_replay, "twice"),
        (no_request_id, "request writer twice model order defect"),
    )
)
