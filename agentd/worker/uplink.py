"""A worker's way to agentd, and to the agentd that comes after it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import structlog

from agentd.worker.backlog import Backlog
from corefleet.errors import Unavailable
from corefleet.link import Link, connect
from corefleet.messages.links import (
    LINK_VERSION,
    AgentdToWorker,
    Frame,
    RunResumed,
    Stop,
    WelcomeBack,
    WorkerHello,
)
from corefleet.messages.wire import Assignment

_ANSWER_S = 20.0
_PAUSE_S = 0.2

_log = structlog.get_logger(__name__)


class Uplink:
    """Sends to agentd, and reads what it says, over as many links as that takes.

    `orphan_s`: how long to look for another agentd when the link is lost, 0 for not at all.
    `held` is asked for the attempts that run here.
    """

    def __init__(
        self,
        link: Link[AgentdToWorker],
        path: Path,
        name: str,
        orphan_s: float,
        held: Callable[[], tuple[Assignment, ...]],
    ) -> None:
        self._link = link
        self._path = path
        self._name = name
        self._orphan_s = orphan_s
        self._held = held
        self._backlog = Backlog()
        self._last = False

    def send(self, frame: Frame) -> None:
        """Send `frame`, now or to the next agentd."""
        if self._backlog.sending(frame) and not self._link.closed:
            self._link.send(frame)

    def stop_looking(self) -> None:
        """The present link is the last one."""
        self._last = True

    async def frames(self) -> AsyncIterator[tuple[AgentdToWorker, ...]]:
        """Yield what agentd and its successors say; ends when there is none any more.

        Raises CorruptRecord.
        """
        while True:
            async for batch in self._link:
                for message in batch:
                    self._hear(message)
                yield batch
            if self._last or not self._orphan_s or not await self._find_successor():
                return

    async def close(self) -> None:
        await self._link.close()

    def _hear(self, message: AgentdToWorker) -> None:
        self._backlog.answered(message)
        if isinstance(message, RunResumed):
            for frame in self._backlog.resume((message.task, message.attempt)):
                self._link.send(frame)

    async def _find_successor(self) -> bool:
        """Connect to the next agentd; return whether one knows this worker."""
        held = self._held()
        keys = tuple((item.record.task, item.record.attempt) for item in held)
        submissions = self._backlog.detach(keys)
        await self._link.close()
        _log.warning("agentd is gone: looking for the next one", attempts=len(held))
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._orphan_s
        while not self._last and loop.time() < give_up:
            try:
                if not await self._greet(give_up - loop.time()):
                    return False
            except (Unavailable, TimeoutError) as error:
                # It may have died again, or not be ready: only the time is the limit.
                _log.info("Not taken up yet", reason=str(error) or "no answer")
                await asyncio.sleep(_PAUSE_S)
                continue
            for frame in submissions:
                self._link.send(frame)
            _log.info("Taken up by the next agentd", attempts=len(held))
            return True
        return False

    async def _greet(self, patience_s: float) -> bool:
        """Return False when agentd wants this worker no more. Raises Unavailable, TimeoutError."""
        link: Link[AgentdToWorker] = await connect(self._path, AgentdToWorker, patience_s)
        try:
            hello = WorkerHello(
                version=LINK_VERSION, worker=self._name, pid=os.getpid(), held=self._held()
            )
            link.send(hello)
            async with asyncio.timeout(_ANSWER_S):
                answer, *rest = await link.receive()
        except BaseException:  # whatever ended the greeting, this link is of no use
            await link.close()
            raise
        if isinstance(answer, WelcomeBack):
            self._link = link
            for message in rest:
                self._hear(message)
            return True
        reason = answer.reason if isinstance(answer, Stop) else f"said {type(answer).__name__}"
        _log.warning("Not wanted by the next agentd", reason=reason)
        await link.close()
        return False
