"""Where the CPU of running processes goes: py-spy beside them, its stacks added up."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

SAMPLES_PER_S = 200
_GRACE_S = 20.0
_LOOP = "Runner.run"


async def sample(processes: dict[str, int], seconds: int) -> dict[str, Counter[str]]:
    """Sample each process (name -> pid) for `seconds`; return stacks with their counts.

    A stack is `outermost;...;innermost`. Raises FileNotFoundError without py-spy.
    """
    found = Path(sys.executable).with_name("py-spy")
    spy = str(found) if found.exists() else shutil.which("py-spy")
    if spy is None:
        raise FileNotFoundError("py-spy: not installed; expected it from `make setup-bench`")
    with tempfile.TemporaryDirectory(prefix="corefleet-profile-") as scratch:
        files = {name: Path(scratch) / f"{number}" for number, name in enumerate(processes)}
        spies = [
            await asyncio.create_subprocess_exec(
                spy, "record", "--pid", str(pid), "--duration", str(seconds),
                "--rate", str(SAMPLES_PER_S), "--format", "raw", "--output", str(files[name]),
                "--function",
                stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            )
            for name, pid in processes.items()
        ]  # fmt: skip
        async with asyncio.timeout(seconds + _GRACE_S):
            for spy_process in spies:
                await spy_process.wait()
        return {name: _stacks(file) for name, file in files.items() if file.exists()}


def top_lines(stacks: Counter[str], count: int) -> list[str]:
    """Return the functions with most time of their own, and those with most below them.

    Only what the event loop runs counts: threads that wait look busy to py-spy.
    """
    stacks = Counter(
        {stack.partition(_LOOP)[2]: n for stack, n in stacks.items() if _LOOP in stack}
    )
    total = sum(stacks.values()) or 1
    own: Counter[str] = Counter()
    below: Counter[str] = Counter()
    for stack, samples in stacks.items():
        frames = stack.partition(";")[2].split(";")
        own[frames[-1]] += samples
        for frame in set(frames):
            below[frame] += samples
    lines = [f"own   {n / total:6.1%}  {name}" for name, n in own.most_common(count)]
    return lines + [f"below {n / total:6.1%}  {name}" for name, n in below.most_common(count)]


def _stacks(file: Path) -> Counter[str]:
    stacks: Counter[str] = Counter()
    for line in file.read_text().splitlines():
        stack, _, samples = line.rpartition(" ")
        stacks[stack] += int(samples)
    return stacks
