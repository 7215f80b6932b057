"""Writes one attempt's ended steps to its journal, through agentd."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import time_ns

from agentd.worker.outbox import Outbox
from agentd.worker.summary import events_of
from corefleet.messages.links import AppendSteps, Frame
from corefleet.messages.records import Step


class Commit:
    """One attempt's way to its journal: group commit, one append in flight."""

    def __init__(self, task: str, attempt: int, send: Callable[[Frame], None]) -> None:
        self.outbox = Outbox()
        self._task = task
        self._attempt = attempt
        self._send = send
        self._ending = False
        self._seen = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def flush_urgent(self) -> None:
        """Append what waits if some of it is urgent; called when the program is at rest."""
        if self.outbox.urgent and not self._ending:
            self._flush()

    def seen(self, count: int) -> None:
        """The program knows of the first `count` steps that were added to the outbox."""
        self._seen = max(self._seen, count)

    async def durable(self) -> None:
        """Wait until all that the program knows is acknowledged: then it may act on it."""
        await self._durable(self._seen)

    async def all_durable(self) -> None:
        """Wait until all steps that have ended are acknowledged."""
        await self._durable(self.outbox.added)

    async def rest(self) -> tuple[Step, ...]:
        """Return the steps that can ride with the end of the task, once no append flies."""
        if self.outbox.must_append:
            await self.all_durable()
        self._ending = True
        while self.outbox.in_flight:
            await self._next_acknowledged(0)
        return self.outbox.take_rest()

    def acknowledged(self) -> None:
        """agentd says that the append in flight is durable."""
        outbox = self.outbox
        outbox.acknowledged()
        if self._waiting:
            reached = [entry for entry in self._waiting if entry[0] <= outbox.durable]
            self._waiting = [entry for entry in self._waiting if entry[0] > outbox.durable]
            for _, future in reached:
                if not future.done():
                    future.set_result(None)
        if self._waiting:
            self._flush()
        else:
            self.flush_urgent()

    async def _durable(self, count: int) -> None:
        if self.outbox.durable < count:
            self._flush()
            await self._next_acknowledged(count)

    async def _next_acknowledged(self, count: int) -> None:
        acknowledged = asyncio.get_running_loop().create_future()
        self._waiting.append((count, acknowledged))
        await acknowledged

    def _flush(self) -> None:
        batch = self.outbox.take()
        if batch is not None:
            ended = events_of(self._task, batch.steps, time_ns() // 1_000_000)
            self._send(
                AppendSteps(
                    task=self._task,
                    attempt=self._attempt,
                    steps=batch.steps,
                    events=(*ended, *batch.events),
                )
            )
