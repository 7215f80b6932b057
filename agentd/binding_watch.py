"""Looks at the binding of every process every ten seconds, and puts it right."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

from agentd.core.binding import VERIFY_EVERY_S, Action, Bindings, Drain, Rebind, Repaired
from agentd.launch.protocol import Process
from corefleet.background import Background, stop
from corefleet.errors import LaunchFailed

_log = structlog.get_logger(__name__)


class Keeper(Protocol):
    """Who runs the processes."""

    def processes(self) -> tuple[Process, ...]:
        """Return all that run."""

    def drain(self, process: Process, reason: str) -> None:
        """End it politely, and start another in its place."""


class BindingWatch:
    """Carries out what Bindings decides. `also` runs before each round, e.g. to look for CPUs."""

    def __init__(
        self,
        keeper: Keeper,
        also: Callable[[], Awaitable[None]],
        background: Background,
        every_s: float = VERIFY_EVERY_S,
    ) -> None:
        self.bindings = Bindings()
        self._keeper = keeper
        self._also = also
        self._background = background
        self._every_s = every_s
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._watching = self._background.spawn(self._watch(), "binding")

    async def close(self) -> None:
        """Look no more. Idempotent."""
        watching, self._watching = self._watching, None
        if watching is not None:
            await stop(watching)

    async def verify(self) -> None:
        """Look at every process once, and mend what has drifted."""
        processes = self._keeper.processes()
        self.bindings.keep([process.name for process in processes])
        for process in processes:
            for action in self.bindings.seen(process.name, await process.drift()):
                await self._do(process, action)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self._also()
            await self.verify()

    async def _do(self, process: Process, action: Action) -> None:
        match action:
            case Rebind(drift=drift):
                _log.warning("Binding has drifted", process=process.name, drift=drift)
                left: str | None
                try:
                    await process.rebind()
                    left = await process.drift()
                except LaunchFailed as error:
                    left = str(error)
                for after in self.bindings.seen(process.name, left):
                    await self._do(process, after)
            case Repaired(drift=drift):
                _log.warning("Bound again", process=process.name, drift=drift)
            case Drain(drift=drift):
                _log.error("Cannot be bound: draining", process=process.name, drift=drift)
                self._keeper.drain(process, f"not bound: {drift}")
