"""The Unix socket where workers find agentd: greeting, frames, signs of life."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from corefleet.clock import Clock
from corefleet.errors import Unavailable
from corefleet.link import Link, LinkServer, serve
from corefleet.messages.links import (
    LINK_VERSION,
    Frame,
    Ping,
    Stop,
    Welcome,
    WelcomeBack,
    WorkerAlive,
    WorkerHello,
    WorkerToAgentd,
)
from corefleet.messages.wire import Assignment

PING_EVERY_S = 1.0
STUCK_AFTER_S = 20.0
"""A worker whose loop does not answer for so long is killed."""

_log = structlog.get_logger(__name__)


class Crew(Protocol):
    """Who is told of what workers do."""

    def ready(self, worker: str) -> None:
        """The worker has loaded its pool and its loop turns."""

    def came_back(self, worker: str, held: tuple[Assignment, ...]) -> None:
        """A worker of an earlier agentd has found this one; `ready` follows."""

    def said(self, worker: str, message: WorkerToAgentd) -> None:
        """Take a frame that is no greeting and no sign of life."""

    def leaving(self, worker: str) -> None:
        """The worker was asked to end: it takes nothing new."""

    def parted(self, worker: str) -> None:
        """The link has ended: the worker is of no more use."""

    def stuck(self, worker: str, reason: str) -> None:
        """The worker does not answer."""


@dataclass(slots=True)
class _Member:
    welcome: Welcome | WelcomeBack
    link: Link[WorkerToAgentd] | None = None
    pinged: int = 0
    answered: int = 0
    heard_at: float = 0.0


class WorkerLinks:
    """All workers that were started here. A worker is known before it connects."""

    def __init__(self, path: Path, crew: Crew, clock: Clock) -> None:
        self.path = path
        self._crew = crew
        self._clock = clock
        self._members: dict[str, _Member] = {}
        self._changed = asyncio.Event()
        self._server: LinkServer | None = None
        self._alarm: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Listen. Raises Conflict, InvalidInput as `corefleet.link.serve` does."""
        self._server = await serve(self.path, WorkerToAgentd, self._serve)
        self._alarm = asyncio.get_running_loop().call_later(PING_EVERY_S, self._ping)

    async def close(self) -> None:
        """Cut all links. Idempotent."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._server is not None:
            await self._server.close()
            self._server = None

    def expect(self, worker: str, welcome: Welcome) -> None:
        """A worker of this name will connect; `welcome` is what it is told."""
        self._members[worker] = _Member(welcome)

    def expect_back(self, worker: str) -> None:
        """A worker that an earlier agentd started will connect."""
        self._members[worker] = _Member(WelcomeBack())

    async def gathered(self, timeout_s: float) -> tuple[str, ...]:
        """Return when all workers that are expected back are, or after `timeout_s`.

        Returns the names of those that are missing.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._missing():
                    self._changed.clear()
                    await self._changed.wait()
        return self._missing()

    def forget(self, worker: str) -> None:
        """The worker's process has ended."""
        member = self._members.pop(worker, None)
        self._changed.set()
        if member is not None and member.link is not None:
            member.link.cut("its process has ended")

    def send(self, worker: str, frame: Frame) -> bool:
        """Queue `frame`; False when the worker has no link any more.

        Raises InvalidInput for a frame that no link can carry.
        """
        member = self._members.get(worker)
        if member is None or member.link is None:
            return False
        try:
            member.link.send(frame)
        except Unavailable:
            # Whoever reads the link sees its end and says so.
            return False
        return True

    def stop(self, worker: str, reason: str, grace_s: float) -> bool:
        """Ask a worker to finish or give back what runs, and to end."""
        self._crew.leaving(worker)
        return self.send(worker, Stop(reason=reason, grace_s=grace_s))

    async def _serve(self, link: Link[WorkerToAgentd]) -> None:
        first = await link.receive()
        hello = first[0] if first else None
        refusal = self._refusal(hello)
        if refusal or not isinstance(hello, WorkerHello):
            _log.warning("Worker refused", link=link.name, reason=refusal)
            link.send(Stop(reason=refusal, grace_s=0.0))
            await link.close()
            return
        worker = hello.worker
        member = self._members[worker]
        member.link = link
        member.heard_at = self._clock.monotonic()
        try:
            link.send(member.welcome)
            if isinstance(member.welcome, WelcomeBack):
                self._crew.came_back(worker, hello.held)
            self._changed.set()
            self._ping_one(member, link)
            for message in first[1:]:
                self._take(worker, member, message)
            async for batch in link:
                for message in batch:
                    self._take(worker, member, message)
        finally:
            if member.link is link:
                member.link = None
                self._crew.parted(worker)

    def _refusal(self, hello: object) -> str:
        if not isinstance(hello, WorkerHello):
            return f"began with {type(hello).__name__}; expected WorkerHello"
        if hello.version != LINK_VERSION:
            return f"worker speaks version {hello.version} of the link; expected {LINK_VERSION}"
        member = self._members.get(hello.worker)
        if member is None:
            return f"no worker {hello.worker} was started here"
        if member.link is not None:
            return f"worker {hello.worker} is connected already"
        if hello.held and isinstance(member.welcome, Welcome):
            # It lost its link to this agentd, which has given its attempts to others by now.
            return f"worker {hello.worker} was given up"
        return ""

    def _missing(self) -> tuple[str, ...]:
        return tuple(
            worker
            for worker, member in self._members.items()
            if isinstance(member.welcome, WelcomeBack) and member.link is None
        )

    def _take(self, worker: str, member: _Member, message: WorkerToAgentd) -> None:
        if not isinstance(message, WorkerAlive):
            self._crew.said(worker, message)
            return
        first = not member.answered
        member.answered = message.number
        member.heard_at = self._clock.monotonic()
        if first:
            self._crew.ready(worker)

    def _ping(self) -> None:
        """Ask each worker for a sign of life; a first one is due when its pool is loaded."""
        now = self._clock.monotonic()
        for worker, member in list(self._members.items()):
            if member.link is None or not member.answered:
                continue
            silent_s = now - member.heard_at
            if silent_s > STUCK_AFTER_S:
                self._crew.stuck(worker, f"its loop did not turn for {silent_s:.0f} s")
            elif member.answered == member.pinged:
                # The time that counts is that of the unanswered question.
                member.heard_at = now
                self._ping_one(member, member.link)
        self._alarm = asyncio.get_running_loop().call_later(PING_EVERY_S, self._ping)

    def _ping_one(self, member: _Member, link: Link[WorkerToAgentd]) -> None:
        member.pinged += 1
        try:
            link.send(Ping(number=member.pinged))
        except Unavailable:
            # Whoever reads the link sees its end and says so.
            return
