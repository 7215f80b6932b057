"""Engines from agentd's side: when they can work, and whether their decode thread turns."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

import structlog

from corefleet.background import Background
from corefleet.clock import Clock
from corefleet.errors import CorefleetError
from corefleet.link import Link, connect
from corefleet.messages.links import EngineAlive, EnginePing, EngineToWorker

PING_EVERY_S = 1.0
_LOAD_S = 600.0

_log = structlog.get_logger(__name__)


def engine_socket(directory: Path, model: str, domain: int) -> Path:
    """Return where the engine of `model` in `domain` listens; short, whatever the name."""
    digest = hashlib.blake2b(model.encode(), digest_size=4).hexdigest()
    return directory / f"e{digest}-{domain}.sock"


class EngineWatch:
    """Pings running engines. `ready` and `stuck` are told by instance."""

    def __init__(
        self,
        stuck_after_s: float,
        ready: Callable[[str], None],
        stuck: Callable[[str, str], None],
        clock: Clock,
        background: Background,
    ) -> None:
        self._stuck_after_s = stuck_after_s
        self._ready = ready
        self._stuck = stuck
        self._clock = clock
        self._background = background
        self._watched: dict[str, asyncio.Event] = {}

    def watch(self, instance: str, socket: Path) -> None:
        """Watch an engine that was just started."""
        over = self._watched[instance] = asyncio.Event()
        self._background.spawn(self._follow(instance, socket, over), f"watch {instance}")

    def forget(self, instance: str) -> None:
        """The engine's process has ended."""
        over = self._watched.pop(instance, None)
        if over is not None:
            over.set()

    async def _follow(self, instance: str, socket: Path, over: asyncio.Event) -> None:
        watching = asyncio.create_task(self._watch(instance, socket))
        ended = asyncio.create_task(over.wait())
        try:
            await asyncio.wait((watching, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            ended.cancel()
            results = await asyncio.gather(watching, ended, return_exceptions=True)
        failure = results[0]
        if isinstance(failure, CorefleetError) and not over.is_set():
            self._stuck(instance, str(failure))
        elif isinstance(failure, Exception):
            raise failure

    async def _watch(self, instance: str, socket: Path) -> None:
        """Raises CorefleetError when the engine does not answer or closes the link."""
        link: Link[EngineToWorker] = await connect(socket, EngineToWorker, _LOAD_S)
        try:
            number = 0
            while True:
                number += 1
                link.send(EnginePing(number=number))
                await self._answer(link, number)
                if number == 1:
                    self._ready(instance)
                await asyncio.sleep(PING_EVERY_S)
        except TimeoutError:
            reason = f"its decode thread did not turn for {self._stuck_after_s:.0f} s"
            self._stuck(instance, reason)
        finally:
            await link.close()

    async def _answer(self, link: Link[EngineToWorker], number: int) -> None:
        async with asyncio.timeout(self._stuck_after_s):
            while True:
                for message in await link.receive():
                    if isinstance(message, EngineAlive) and message.number >= number:
                        return
