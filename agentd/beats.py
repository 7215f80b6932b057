"""Keeps the heartbeat program running or connected, and tells it how the node stands."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import structlog

from agentd.heartbeat.pipe import Setup, Status, Word, line_of, read_line
from agentd.launch.mortal import die_with_parent
from corefleet.background import Background
from corefleet.errors import CorruptRecord

STATUS_EVERY_S = 0.1
CONNECT_S = 20.0
_MOST_UNREAD_BYTES = 256 * 1024
_RESTART_FIRST_S = 0.05
_RESTART_LIMIT_S = 2.0
_STEADY_S = 5.0
_END_S = 2.0

_log = structlog.get_logger(__name__)


class Beats:
    """The heartbeat program of this node. `status` is asked ten times a second.

    Without `socket` the program is a child and ends with agentd; with it, it is a unit of its
    own that listens there and beats on when agentd is gone.
    """

    def __init__(
        self,
        setup: Setup,
        status: Callable[[int], Status],
        background: Background,
        socket: Path | None = None,
    ) -> None:
        self._setup = setup
        self._status = status
        self._background = background
        self._socket = socket
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._number = 0
        self._sent = 0
        self._alarm: asyncio.TimerHandle | None = None
        self._closing = False
        self._connected = asyncio.Event()

    @property
    def pid(self) -> int:
        """The child's process id, 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    @property
    def sent(self) -> int:
        """How many beats the program says it has sent over a standing connection."""
        return self._sent

    async def start(self) -> None:
        """Start or find the program; it beats once the status has an epoch."""
        self._keeping = self._background.spawn(self._keep(), "heartbeat")
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
        """End the child, or let go of the unit. Idempotent."""
        self._closing = True
        if self._alarm is not None:
            self._alarm.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._keeping is None:
            return
        _, late = await asyncio.wait({self._keeping}, timeout=_END_S)
        if late:
            if self._process is not None:
                self._process.kill()
            self._keeping.cancel()
            await asyncio.wait({self._keeping})

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
        writer = self._writer
        if writer is None or writer.is_closing():
            return
        if writer.transport.get_write_buffer_size() > _MOST_UNREAD_BYTES:
            _log.warning("The heartbeat program does not read", pid=self.pid)
            writer.transport.abort()
            if self._process is not None:
                self._process.kill()
            return
        self._number += 1
        writer.write(line_of(self._status(self._number)))

    async def _keep(self) -> None:
        """Run the program, or connect to it, again and again."""
        loop = asyncio.get_running_loop()
        pause = _RESTART_FIRST_S
        while True:
            began = loop.time()
            why = await (self._run_child() if self._socket is None else self._meet(self._socket))
            if self._closing:
                return
            pause = _RESTART_FIRST_S if loop.time() - began > _STEADY_S else pause
            _log.error("The heartbeat program is gone", reason=why, again_in_s=pause)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _RESTART_LIMIT_S)

    async def _run_child(self) -> str:
        process = await asyncio.create_subprocess_exec(
            *die_with_parent(), sys.executable, "-m", "agentd.heartbeat",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        self._process = process
        talking = asyncio.create_task(self._talk(process.stdout, process.stdin), name="beats")
        try:
            return f"exit code {await process.wait()}"
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        finally:
            talking.cancel()
            await asyncio.gather(talking, return_exceptions=True)
            self._process = None

    async def _meet(self, socket: Path) -> str:
        try:
            reader, writer = await asyncio.open_unix_connection(socket)
        except OSError as error:
            return f"{socket}: {error.strerror or error}"
        try:
            await self._talk(reader, writer)
        finally:
            writer.close()
        return f"{socket}: it closed the connection"

    async def _talk(
        self, reader: asyncio.StreamReader | None, writer: asyncio.StreamWriter | None
    ) -> None:
        """Tell the program what it must know, and hear its words until it is gone."""
        if reader is None or writer is None:
            raise AssertionError("the heartbeat program was started without pipes")
        self._writer = writer
        try:
            writer.write(line_of(self._setup))
            while line := await reader.readline():
                word = read_line(line, Word)
                self._sent += word.sent
                self._connected.set()
        except (OSError, CorruptRecord) as error:
            _log.warning("The heartbeat program is not understood", reason=str(error))
        finally:
            self._writer = None
