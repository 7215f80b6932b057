"""Child processes of a one-machine fleet: started, read for readiness, and surely ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from corefleet.config import child_environment
from corefleet.errors import LaunchFailed, Timeout

_SERVER_PORTS = range(20_000, 32_000)


class Child:
    """One child process whose output goes to a log file and can be waited on.

    The kernel ends it when this process dies (setpriv's --pdeathsig, where it is
    installed), so that even a kill -9 of the parent leaves nothing behind.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process
        self._lines: list[str] = []
        self._grown = asyncio.Event()
        self._pump = asyncio.create_task(self._copy_output(), name=f"output of {name}")

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], log: Path, env: dict[str, str] | None = None
    ) -> Child:
        """Start `command`; its stdout and stderr are appended to `log`."""
        setpriv = shutil.which("setpriv")
        guarded = [setpriv, "--pdeathsig", "TERM", *command] if setpriv else list(command)
        try:
            process = await asyncio.create_subprocess_exec(
                *guarded,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                limit=2**20,
                env=child_environment(env or {}),
            )
        except OSError as error:
            raise LaunchFailed(f"{name}: {command[0]}: {error}") from error
        return cls(name, process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def wait_line(self, wanted: Callable[[str], bool], timeout_s: float) -> str:
        """Return the first output line that `wanted` accepts.

        Raises LaunchFailed with the last lines when the process ends before, and
        Timeout after `timeout_s`.
        """
        seen = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    while seen < len(self._lines):
                        line = self._lines[seen]
                        seen += 1
                        if wanted(line):
                            return line
                    if self._pump.done():
                        code = await self._process.wait()
                        raise LaunchFailed(f"{self.name} ended with {code}:\n{self.tail()}")
                    self._grown.clear()
                    await self._grown.wait()
        except TimeoutError:
            raise Timeout(
                f"{self.name} was not ready within {timeout_s:g} s; last output "
                f"({self.log}):\n{self.tail()}"
            ) from None

    def tail(self, lines: int = 12) -> str:
        """Return the last lines of output."""
        return "\n".join(f"  {line}" for line in self._lines[-lines:])

    async def wait(self) -> int:
        """Return the exit code once the process has ended and its output is read."""
        await self._pump
        return await self._process.wait()

    async def stop(self, grace_s: float = 8.0) -> None:
        """End the process: SIGTERM, then SIGKILL for it and all below it after `grace_s`."""
        if self.running:
            below = descendants(self.pid)
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
            except TimeoutError:
                self.kill_tree()
            kill_all(below)
        await self._process.wait()
        await self._pump

    def kill_tree(self) -> None:
        """kill -9 the process and all its descendants, as a dying machine would."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGSTOP)
        below = descendants(self.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        kill_all(below)

    async def _copy_output(self) -> None:
        stream = self._process.stdout
        if stream is None:
            raise LaunchFailed(f"{self.name}: its output is not a pipe")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab", buffering=0) as out:
            while line := await stream.readline():
                out.write(line)
                self._lines.append(line.decode("utf-8", "replace").rstrip())
                del self._lines[:-2000]
                self._grown.set()
        self._grown.set()


def descendants(pid: int) -> list[psutil.Process]:
    """Return all processes below `pid`, itself left out."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill_all(processes: Sequence[psutil.Process]) -> None:
    """kill -9 those of `processes` that still run (psutil checks that no pid was reused)."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that was free a moment ago.

    Not one of those that the kernel gives to outgoing connections (ip(7),
    ip_local_port_range): a server that is started again must find its port still free.
    """
    while True:
        port = secrets.choice(_SERVER_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
