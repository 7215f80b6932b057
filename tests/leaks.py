"""What a test may leave behind: nothing. Used by conftest.py.

A baseline is taken when the test's own fixtures begin (servers of wider fixtures are
already there), and compared when the last of them is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import psutil

_PATIENCE_S = 2.0

# Live for the process once they were needed: the poller of grpc.aio, tqdm's monitor and
# the processes of multiprocessing have no end of their own; the threads of a loop's default
# executor end with their loop, which may be a module's.
_LASTING_THREADS = ("_poll_wrapper", "tqdm_monitor", "asyncio_")
_LASTING_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


wider: list[Callable[[], set[int]]] = []
"""Each returns the processes that a fixture wider than a test looks after: it starts them
again in a test and ends them itself."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What was there before a test."""

    threads: frozenset[int]
    processes: frozenset[int]
    descriptors: int


def baseline() -> Baseline:
    return Baseline(
        threads=frozenset(t.ident for t in threading.enumerate() if t.ident is not None),
        processes=frozenset(child.pid for child in children()),
        descriptors=_descriptors(),
    )


def found_since(before: Baseline) -> list[str]:
    """Return one line for each thread, process or socket that outlived its test.

    Waits up to two seconds for those that are just ending. Leaked processes are killed,
    so that the next test does not meet them.
    """
    return [*_processes(before), *_threads(before), *_unclosed(before)]


async def pending_tasks(loop: asyncio.AbstractEventLoop) -> list[str]:
    """Return one line for each task of `loop` that goes on, without the current one.

    Those that are just ending get two seconds: grpc.aio ends a task of its own a moment
    after a stream was cancelled, and offers nothing to wait for.
    """
    others = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}
    if others:
        _, others = await asyncio.wait(others, timeout=_PATIENCE_S)
    return sorted(f"task {task.get_name()} still runs: {task.get_coro()!r}" for task in others)


def children() -> list[psutil.Process]:
    """Return the processes below this one that are not zombies of a finished wait."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any(mark in " ".join(child.cmdline()) for mark in _LASTING_PROCESSES):
                found.append(child)
    return found


def end(processes: list[psutil.Process]) -> list[str]:
    """Kill `processes` and return one line for each."""
    lines = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline()) or process.name()
            lines.append(f"process {process.pid} still runs: {command[:200]}")
            process.kill()
    psutil.wait_procs(processes, timeout=_PATIENCE_S)
    return lines


def _processes(before: Baseline) -> list[str]:
    known = before.processes.union(*(kept() for kept in wider))
    new = [child for child in children() if child.pid not in known]
    if not new:
        return []
    _, alive = psutil.wait_procs(new, timeout=_PATIENCE_S)
    return end(alive)


def _threads(before: Baseline) -> list[str]:
    lines = []
    for thread in threading.enumerate():
        if thread.ident in before.threads or any(m in thread.name for m in _LASTING_THREADS):
            continue
        thread.join(_PATIENCE_S)
        if thread.is_alive():
            lines.append(f"thread {thread.name} still runs")
    return lines


def _unclosed(before: Baseline) -> list[str]:
    if _descriptors() <= before.descriptors:
        return []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        gc.collect()
    return [str(w.message) for w in caught if issubclass(w.category, ResourceWarning)]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
