"""The bandwidth program as agentd runs it: the real one, and ones that misbehave."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest

from agentd import sensing
from agentd.bandwidth.pipe import CanarySetup, DomainSetup, Setup, line_of, read_line
from agentd.bandwidth.report import Report, Source
from agentd.sensing import Sensing
from corefleet.background import Background

OURS = tuple(sorted(os.sched_getaffinity(0)))
WAIT_S = 30.0


def setup(*sources: Source) -> Setup:
    return Setup(
        node="n1",
        domains=(DomainSetup(domain=0, cpus=OURS, l3_bytes=2 << 20, peak_bytes_per_s=1e11),),
        interval_s=0.05,
        canary=CanarySetup(every_s=0.1),
        sources=sources,
    )


class Heard:
    """Keeps what is taken, and lets a test wait for it."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self._came = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, report: Report) -> None:
        self.reports.append(report)
        task = asyncio.get_running_loop().create_task(self._tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self) -> None:
        async with self._came:
            self._came.notify_all()

    async def count(self, many: int) -> None:
        async with asyncio.timeout(WAIT_S), self._came:
            await self._came.wait_for(lambda: len(self.reports) >= many)


@pytest.fixture
async def background() -> AsyncIterator[Background]:
    failures: list[BaseException] = []
    made = Background(failures.append)
    yield made
    await made.close()
    assert failures == []


def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let Sensing start a program of ours: a Python that is a script."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\n{text}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


async def test_the_real_program_reports_and_ends_with_its_pipe(background: Background) -> None:
    heard = Heard()
    found = Sensing(setup("canary", "pressure"), heard.take, background)
    assert found.latest() is None
    await found.start()
    await heard.count(8)
    pid = found.pid
    assert psutil.pid_exists(pid)
    assert found.latest() == heard.reports[-1]
    report = next(one for one in heard.reports if one.domains[0].latency_ratio is not None)
    assert report.source == "canary"
    assert report.domains[0].latency_ratio >= 1.0  # type: ignore[operator]
    assert [one.number for one in heard.reports] == list(range(1, len(heard.reports) + 1))
    await found.close()
    await found.close()
    assert found.pid == 0
    assert not psutil.pid_exists(pid)


async def test_the_real_program_measures_a_peak_and_falls_back_to_pressure(
    background: Background,
) -> None:
    heard = Heard()
    asked = msgspec.structs.replace(setup("llc", "pressure"), measure_peak=True)
    found = Sensing(asked, heard.take, background)
    await found.start()
    await heard.count(1)
    await found.close()
    assert heard.reports[0].source == "pressure"
    assert heard.reports[0].why_not == ("llc: domain 0: no control groups to count",)
    assert heard.reports[0].domains[0].peak_bytes_per_s == 1e11


async def test_a_program_that_died_is_started_again(background: Background) -> None:
    heard = Heard()
    found = Sensing(setup("pressure"), heard.take, background)
    await found.start()
    await heard.count(1)
    first = found.pid
    os.kill(first, signal.SIGKILL)
    heard.reports.clear()
    async with asyncio.timeout(WAIT_S):
        while not any(one.number == 1 for one in heard.reports):
            await heard.count(len(heard.reports) + 1)
    assert found.pid not in (0, first)
    await found.close()


async def test_a_program_that_stands_still_is_killed_and_started_again(
    background: Background,
) -> None:
    heard = Heard()
    found = Sensing(setup("pressure"), heard.take, background, silence_s=5.0)
    await found.start()
    await heard.count(1)
    first = found.pid
    os.kill(first, signal.SIGSTOP)
    heard.reports.clear()
    async with asyncio.timeout(WAIT_S):
        while not any(one.number == 1 for one in heard.reports):
            await heard.count(len(heard.reports) + 1)
    assert found.pid not in (0, first)
    assert not psutil.pid_exists(first)
    await found.close()


@pytest.mark.parametrize(
    "nonsense", ["print('{\"number\": 1}', flush=True)", "print('x' * (1 << 21), flush=True)"]
)
async def test_a_program_that_says_nonsense_is_killed(
    background: Background, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nonsense: str
) -> None:
    runs = tmp_path / "runs"
    program(
        tmp_path,
        monkeypatch,
        f"import sys\nopen({str(runs)!r}, 'a').write('x')\n{nonsense}\nsys.stdin.read()\n",
    )
    heard = Heard()
    ended = asyncio.Event()

    def error(event: str, **_: object) -> None:
        if "ended" in event:
            ended.set()

    monkeypatch.setattr(sensing._log, "error", error)
    found = Sensing(setup("pressure"), heard.take, background)
    await found.start()
    async with asyncio.timeout(WAIT_S):
        await ended.wait()
    await found.close()
    assert heard.reports == []
    assert runs.read_text().startswith("x")
    assert found.latest() is None


async def test_a_program_that_does_not_end_by_itself_is_killed(
    background: Background, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = line_of(Report(number=1, interval_s=0.5, source="pressure")).decode()
    program(
        tmp_path,
        monkeypatch,
        f"import signal\nprint({line!r}, flush=True)\nwhile True: signal.pause()\n",
    )
    monkeypatch.setattr(sensing, "_END_S", 0.1)
    heard = Heard()
    found = Sensing(setup("pressure"), heard.take, background)
    await found.start()
    await heard.count(1)
    pid = found.pid
    await found.close()
    assert not psutil.pid_exists(pid)


async def _run(line: bytes) -> tuple[int, bytes, bytes]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "agentd.bandwidth",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(WAIT_S):
        out, err = await process.communicate(line)
    return process.returncode or 0, out, err


async def test_a_pipe_that_ends_at_once_is_no_error() -> None:
    assert await _run(b"") == (0, b"", b"")
    assert (await _run(line_of(setup("pressure"))))[0] == 0


async def test_a_setup_that_is_none_ends_the_program_with_a_reason() -> None:
    code, out, err = await _run(b'{"node": 3}\n')
    assert (code, out) == (1, b"")
    assert b"bandwidth: Setup: " in err
    code, _, err = await _run(line_of(setup("llc")))
    assert code == 1
    assert b"no source of bandwidth figures: llc: domain 0" in err


async def test_a_reader_that_went_away_ends_the_program() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "agentd.bandwidth",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line_of(setup("pressure")))
    async with asyncio.timeout(WAIT_S):
        first = await process.stdout.readline()
        # asyncio offers no other way to close the reading end of a pipe.
        process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
        assert await process.wait() == 0
    process.stdin.close()
    assert read_line(first, Report).number == 1
