"""A simulated fleet as a child process of a benchmark: told by lines, answered by lines."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from typing import Any

_START_S = 240.0
_ANSWER_S = 60.0


class SimFleetProcess:
    """`python -m tools.fleet` as a child. Use as an async context manager."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self._turn = asyncio.Lock()
        self.ready: dict[str, Any] = {}

    async def __aenter__(self) -> SimFleetProcess:
        setpriv = shutil.which("setpriv")
        guard = [setpriv, "--pdeathsig", "TERM"] if setpriv else []
        self._process = await asyncio.create_subprocess_exec(
            *guard, sys.executable, "-m", "tools.fleet", *self._arguments,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self.ready = await self._line(_START_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None and self._process.stdin is not None:
            self._process.stdin.write(b"quit\n")
        await self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def tell(self, *words: str) -> dict[str, Any]:
        """Give one command; return its answer."""
        if self._process.stdin is None:
            raise RuntimeError("the simulated fleet has no stdin")
        async with self._turn:
            self._process.stdin.write((" ".join(words) + "\n").encode())
            return await self._line(_ANSWER_S)

    async def _line(self, limit_s: float) -> dict[str, Any]:
        if self._process.stdout is None:
            raise RuntimeError("the simulated fleet has no stdout")
        async with asyncio.timeout(limit_s):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the simulated fleet ended with {await self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found
