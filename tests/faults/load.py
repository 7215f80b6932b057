"""The plant's client as the test sees it: what it was promised, and how that was kept."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from tests.faults.agents import expected
from tests.faults.submitter import Begin, Line, Ran, Session

SLOW = [Session(f"slow{i}", count=6, pause_ms=150) for i in range(8)]
QUICK = [Session(f"quick{i}", count=1, pause_ms=100) for i in range(2)]


@dataclass(slots=True)
class Promise:
    """One task. Times are wall milliseconds; 0 while it has not come to that."""

    session: str
    number: int
    submitted_ms: int
    accepted_ms: int = 0
    finished_ms: int = 0
    task: str = ""
    end: Line | None = None

    def links(self) -> list[Ran]:
        """Return the steps that made links, in their order."""
        return [step for step in self.end.steps if step.kind == "tool"] if self.end else []


@dataclass(slots=True)
class Load:
    """The submitting process, started in its place by `prefix`."""

    prefix: Sequence[str]
    addresses: Sequence[str]
    sessions: dict[str, Session] = field(
        default_factory=lambda: {each.name: each for each in (*SLOW, *QUICK)}
    )
    promises: dict[tuple[str, int], Promise] = field(default_factory=dict)
    refused: list[Line] = field(default_factory=list)
    troubles: list[Line] = field(default_factory=list)
    _process: asyncio.subprocess.Process | None = None
    _reader: asyncio.Task[None] | None = None
    _grown: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> None:
        """Begin, or go on where a killed one was."""
        self._process = await asyncio.create_subprocess_exec(
            *("setpriv", "--pdeathsig", "KILL", *self.prefix),
            *(sys.executable, "-m", "tests.faults.submitter", *self.addresses),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**22,
        )
        self._reader = asyncio.create_task(self._read(self._process), name="the load's story")
        self._say(msgspec.json.encode(Begin([self._standing(s) for s in self.sessions.values()])))

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None

    async def kill(self) -> None:
        """kill -9; returns when all that it told is read. Idempotent."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        await self._over()

    async def drain(self, timeout_s: float) -> None:
        """Submit no more and return when everything is finished.

        Raises AssertionError naming what is not, after `timeout_s`.
        """
        self._say(b"drain")
        try:
            async with asyncio.timeout(timeout_s):
                assert self._reader is not None
                await asyncio.shield(self._reader)
        except TimeoutError:
            waiting = [p for p in self.promises.values() if p.end is None]
            raise AssertionError(
                f"not finished {timeout_s:g} s after the last submission: {waiting}; "
                f"last troubles: {self.troubles[-3:]}"
            ) from None
        await self._over()

    async def until(self, reached: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Return when `reached`, which is asked after every line of the story."""
        try:
            async with asyncio.timeout(timeout_s):
                while not reached():
                    self._grown.clear()
                    await self._grown.wait()
        except TimeoutError:
            raise AssertionError(
                f"{what}: not within {timeout_s:g} s; last troubles: {self.troubles[-3:]}"
            ) from None

    async def all_before(self, at_ms: int, timeout_s: float) -> None:
        """Return when everything that was submitted before `at_ms` is finished."""
        await self.until(
            lambda: (
                not any(p.end is None and p.submitted_ms <= at_ms for p in self.promises.values())
            ),
            timeout_s,
            "what was submitted before is finished",
        )

    async def moving(self, timeout_s: float = 60.0) -> None:
        """Return when every session has finished one task more than now."""
        marks = {name: self.finished(name) for name in self.sessions}
        await self.until(
            lambda: all(self.finished(name) > mark for name, mark in marks.items()),
            timeout_s,
            "every session goes on",
        )

    def finished(self, session: str) -> int:
        return sum(1 for p in self.promises.values() if p.session == session and p.end is not None)

    def live_at(self, at_ms: int) -> list[Promise]:
        """Return the finished tasks that had been accepted by `at_ms` and ended later."""
        return [
            p
            for p in self.promises.values()
            if p.end is not None and p.accepted_ms and p.accepted_ms <= at_ms < p.finished_ms
        ]

    def wrong(self) -> list[str]:
        """Return one line for everything that no fault may do to what has finished."""
        lines = [f"refused: {line}" for line in self.refused]
        for name, session in self.sessions.items():
            mine = sorted(
                (p for p in self.promises.values() if p.session == name), key=lambda p: p.number
            )
            answers = expected([session.count] * len(mine))
            last_ms = 0
            for promise, answer in zip(mine, answers, strict=True):
                if promise.end is None:
                    continue
                lines += _wrong_end(promise, promise.end, answer, session.count)
                started = [step.started_ms for step in promise.links()]
                if started and started[0] < last_ms:
                    lines.append(f"{name} {promise.number} ran before the one before had ended")
                last_ms = started[-1] if started else last_ms
        return lines

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while text := await process.stdout.readline():
            if text.endswith(b"\n"):
                self._take(msgspec.json.decode(text, type=Line))
                self._grown.set()

    def _take(self, line: Line) -> None:
        key = line.session, line.number
        match line.what:
            case "submitting":
                self.promises.setdefault(key, Promise(*key, line.at_ms))
            case "accepted":
                promise = self.promises[key]
                promise.accepted_ms = promise.accepted_ms or line.at_ms
                if promise.task and promise.task != line.task:
                    self.refused.append(line)
                promise.task = line.task
            case "finished":
                promise = self.promises[key]
                promise.finished_ms, promise.end = line.at_ms, line
            case "trouble":
                self.troubles.append(line)
            case "refused":
                self.refused.append(line)

    def _standing(self, session: Session) -> Session:
        mine = [p for p in self.promises.values() if p.session == session.name]
        accepted = [p for p in mine if p.accepted_ms]
        return msgspec.structs.replace(
            session,
            number=len(accepted),
            unfinished={p.number: p.task for p in accepted if p.end is None},
        )

    def _say(self, text: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(text + b"\n")

    async def _over(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._reader is not None
        await self._reader
        await self._process.wait()
        self._process.stdin.close()
        self._process = None


def _wrong_end(promise: Promise, end: Line, answer: str, count: int) -> list[str]:
    name = f"{promise.session} {promise.number} ({promise.task})"
    if not end.done:
        return [f"{name} ended as {end.error or end}"]
    lines = []
    if end.output != answer:
        lines.append(f"{name} answered {end.output}, expected {answer}")
    steps = [step.step for step in promise.links()]
    if len(steps) != count or steps != sorted(set(steps)):
        lines.append(f"{name} ran the steps {steps}, expected {count} different ones in order")
    return lines


def now_ms() -> int:
    return time.time_ns() // 1_000_000
