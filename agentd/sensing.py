"""Keeps the bandwidth program running, and hands on what it reports."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable

import structlog

from agentd.bandwidth.pipe import MOST_LINE_BYTES, Setup, line_of, read_line
from agentd.bandwidth.report import Report
from agentd.launch.mortal import die_with_parent
from corefleet.background import Background
from corefleet.errors import CorruptRecord

SILENT_INTERVALS = 20
LEAST_SILENCE_S = 10.0
"""A program that says nothing for SILENT_INTERVALS, and this long at least, is killed."""
_RESTART_FIRST_S = 0.1
_RESTART_LIMIT_S = 30.0
_STEADY_S = 60.0
_END_S = 2.0

_log = structlog.get_logger(__name__)


class Sensing:
    """The bandwidth program of this node; `take` gets every Report, on the loop."""

    def __init__(
        self,
        setup: Setup,
        take: Callable[[Report], None],
        background: Background,
        silence_s: float | None = None,
    ) -> None:
        self._setup = setup
        self._take = take
        self._background = background
        self._silence_s = silence_s or max(LEAST_SILENCE_S, SILENT_INTERVALS * setup.interval_s)
        self._process: asyncio.subprocess.Process | None = None
        self._latest: Report | None = None
        self._source = ""
        self._closing = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The program's process id, 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    def latest(self) -> Report | None:
        """Return the newest report; None before the first, and while there is no program."""
        return self._latest

    async def start(self) -> None:
        """Start the program."""
        self._keeper = self._background.spawn(self._keep(), "bandwidth")

    async def close(self) -> None:
        """End the program. Idempotent."""
        self._closing.set()
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()
        done, _ = await asyncio.wait((keeper,), timeout=_END_S)
        if not done:
            keeper.cancel()
            await asyncio.wait((keeper,))

    async def _keep(self) -> None:
        """Run the program, again and again."""
        loop = asyncio.get_running_loop()
        pause = _RESTART_FIRST_S
        while not self._closing.is_set():
            began = loop.time()
            code = await self._run_once()
            self._latest = None
            if self._closing.is_set():
                return
            pause = _RESTART_FIRST_S if loop.time() - began > _STEADY_S else pause
            _log.error("The bandwidth program ended", code=code, again_in_s=pause)
            try:
                async with asyncio.timeout(pause):
                    await self._closing.wait()
            except TimeoutError:
                pause = min(pause * 2, _RESTART_LIMIT_S)

    async def _run_once(self) -> int:
        process = await asyncio.create_subprocess_exec(
            *die_with_parent(), sys.executable, "-m", "agentd.bandwidth",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            limit=MOST_LINE_BYTES,
        )  # fmt: skip
        self._process = process
        try:
            if process.stdin is not None:
                process.stdin.write(line_of(self._setup))
                if self._closing.is_set():
                    process.stdin.close()
            await self._hear(process)
            return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            self._process = None

    async def _hear(self, process: asyncio.subprocess.Process) -> None:
        """Take what the program says until it ends; end it if it says nothing, or nonsense."""
        if process.stdout is None:
            return
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    line = await process.stdout.readline()
                if not line:
                    return
                self._heard(read_line(line, Report))
        except TimeoutError:
            _log.error(
                "Killing the bandwidth program: it is silent",
                pid=process.pid,
                silent_s=self._silence_s,
            )
        except (CorruptRecord, ValueError) as error:
            # ValueError: a line without an end within the limit.
            _log.error("Killing the bandwidth program", pid=process.pid, reason=str(error))
        if process.returncode is None:
            process.kill()

    def _heard(self, report: Report) -> None:
        if report.source != self._source:
            self._source = report.source
            _log.info("Memory bandwidth", source=report.source, why_not=list(report.why_not))
        self._latest = report
        self._take(report)
