"""Keeps the heartbeat program running, and tells it how the node stands."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Callable

import structlog

from agentd.heartbeat.pipe import Setup, Status, line_of
from corefleet.background import Background

STATUS_EVERY_S = 0.1
CONNECT_S = 20.0
_MOST_UNREAD_BYTES = 256 * 1024
_RESTART_FIRST_S = 0.05
_RESTART_LIMIT_S = 2.0
_STEADY_S = 5.0
_END_S = 2.0

_log = structlog.get_logger(__name__)


class Beats:
    """The heartbeat program of this node. `status` is asked ten times a second."""

    def __init__(
        self, setup: Setup, status: Callable[[int], Status], background: Background
    ) -> None:
        self._setup = setup
        self._status = status
        self._background = background
        self._process: asyncio.subprocess.Process | None = None
        self._number = 0
        self._alarm: asyncio.TimerHandle | None = None
        self._closing = False
        self._over = asyncio.Event()
        self._connected = asyncio.Event()

    @property
    def pid(self) -> int:
        """The program's process id, 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Start the program; it beats once the status has an epoch."""
        self._background.spawn(self._keep(), "heartbeat")
        self._write()

    async def connected(self) -> None:
        """Return when the program has reached NATS: from then on no beat is late.

        Waits CONNECT_S at most: a node that cannot beat is judged by its owner.
        """
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._connected.wait()
        except TimeoutError:
            _log.warning("The heartbeat program does not reach NATS", waited_s=CONNECT_S)

    async def close(self) -> None:
        """End the program. Idempotent."""
        self._closing = True
        if self._alarm is not None:
            self._alarm.cancel()
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(_END_S):
                await self._over.wait()
        except TimeoutError:
            process.kill()
            await self._over.wait()

    def now(self) -> None:
        """Tell the status at once."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._write()

    def _write(self) -> None:
        self._alarm = None
        if self._closing:
            return
        self._alarm = asyncio.get_running_loop().call_later(STATUS_EVERY_S, self._write)
        process = self._process
        if process is None or process.stdin is None or process.stdin.is_closing():
            return
        if process.stdin.transport.get_write_buffer_size() > _MOST_UNREAD_BYTES:
            _log.warning("Killing the heartbeat program: it does not read", pid=process.pid)
            process.kill()
            return
        self._number += 1
        process.stdin.write(line_of(self._status(self._number)))

    async def _keep(self) -> None:
        """Run the program, again and again."""
        loop = asyncio.get_running_loop()
        pause = _RESTART_FIRST_S
        while True:
            began = loop.time()
            code = await self._run_once()
            if self._closing:
                return
            pause = _RESTART_FIRST_S if loop.time() - began > _STEADY_S else pause
            _log.error("The heartbeat program ended", code=code, again_in_s=pause)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _RESTART_LIMIT_S)

    async def _run_once(self) -> int:
        setpriv = shutil.which("setpriv")
        mortal = (setpriv, "--pdeathsig", "KILL") if setpriv else ()
        process = await asyncio.create_subprocess_exec(
            *mortal, sys.executable, "-m", "agentd.heartbeat",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        self._over.clear()
        self._process = process
        hearing = asyncio.create_task(self._hear(process), name="heartbeat's words")
        try:
            if process.stdin is not None:
                process.stdin.write(line_of(self._setup))
            return await process.wait()
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        finally:
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)
            self._process = None
            self._over.set()

    async def _hear(self, process: asyncio.subprocess.Process) -> None:
        if process.stdout is not None and await process.stdout.readline():
            self._connected.set()
