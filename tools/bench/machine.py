"""What a benchmark ran on, and what every benchmark returns."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Measured:
    """Results with units in their keys; `peer` holds the peer's, under the same keys."""

    results: dict[str, object] = field(default_factory=dict)
    peer: dict[str, object] | None = None


def describe_machine() -> dict[str, object]:
    """Return CPU model, count, memory and versions, as far as they can be read."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "CPU implementer")):
            model = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "arch": platform.machine(),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def commit() -> str:
    """Return the checkout's commit, with `+` when it has changes; '' outside git."""
    head = _git("rev-parse", "--short=12", "HEAD")
    return f"{head}+" if head and _git("status", "--porcelain") else head


def progress(text: str) -> None:
    """Say how far the benchmark is."""
    print(text, file=sys.stderr, flush=True)


def percentile(values: list[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of `values` lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _git(*arguments: str) -> str:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""
