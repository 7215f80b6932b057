"""The canary: times a short pointer chase in each domain against the best seen there.

Memory that others keep busy answers late, so the time of one dependent load tells of
contention where nothing counts bytes. The chase is one `ndarray.take` whose indices are its
own output, one place behind: numpy (mode `wrap` does not buffer) then loads each index from
the value that it just stored. That costs 3 to 4 ns a step beside the load of 100 ns and
more; the same chase in pure Python costs 65 to 85 ns a step.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from agentd.bandwidth.pipe import CanarySetup, DomainSetup
from agentd.bandwidth.report import Source
from agentd.bandwidth.sensor import Load
from agentd.core.cpulist import format_list

_LINE_BYTES = 64
_WORD_BYTES = 8
_LINE_WORDS = _LINE_BYTES // _WORD_BYTES
_LEAST_BUFFER_BYTES = 8 << 20
_UNKNOWN_L3_BYTES = 16 << 20
_L3_TIMES = 4
_CHUNKS = 8
"""The median of so many parts of a walk is its time: being interrupted in one does not count."""
_BUCKETS = 12
_STALE_TURNS = 3
_BURSTS = 3


class Walk(Protocol):
    """Memory of one domain to walk through."""

    def step_ns(self, steps: int) -> float:
        """Walk on by about `steps` loads; return the nanoseconds of one."""
        ...

    def close(self) -> None: ...


class Baseline:
    """The least value of a long and moving window, by buckets. Pure.

    The least and not the first: the machine may be busy when the canary starts.
    """

    def __init__(self, window_s: float) -> None:
        self._bucket_s = window_s / _BUCKETS
        self._buckets: deque[tuple[float, float]] = deque(maxlen=_BUCKETS)
        """When each began, and the least of it."""

    def ratio(self, now: float, value: float) -> float:
        """Take `value` in; return it as a multiple of the least, 1.0 or more."""
        if self._buckets and now - self._buckets[-1][0] < self._bucket_s:
            began, least = self._buckets.pop()
            self._buckets.append((began, min(least, value)))
        else:
            self._buckets.append((now, value))
        window_s = self._bucket_s * _BUCKETS
        while now - self._buckets[0][0] >= window_s + self._bucket_s:
            self._buckets.popleft()
        return value / min(least for _, least in self._buckets)


class CanarySensor:
    """Takes one domain after the other, a walk at a time, within its share of a core."""

    def __init__(
        self,
        setup: CanarySetup,
        domains: Iterable[DomainSetup],
        make: Callable[[DomainSetup, int], Walk] | None = None,
        cpu_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self._setup = setup
        self._domains = tuple(domains)
        self._make = make or ArrayWalk
        self._check = make is None
        self._cpu_s = cpu_s
        self._walks: dict[int, Walk] = {}
        self._baselines = {one.domain: Baseline(setup.baseline_window_s) for one in self._domains}
        self._ratios: dict[int, tuple[float, float]] = {}
        """By domain: when, and the ratio."""
        self._turn = 0
        self._due = 0.0
        self._gap_s = 0.0

    @property
    def source(self) -> Source:
        return "canary"

    def available(self) -> str | None:
        if not self._domains:
            return "there is no domain"
        return why_no_walk(self._domains) if self._check else None

    def sample(self, now: float) -> Mapping[int, Load]:
        if now >= self._due:
            self._probe(now)
        stale_s = _STALE_TURNS * max(self._setup.every_s, self._gap_s * len(self._domains))
        return {
            domain: Load(latency_ratio=ratio)
            for domain, (when, ratio) in self._ratios.items()
            if now - when <= stale_s
        }

    def close(self) -> None:
        for walk in self._walks.values():
            walk.close()
        self._walks = {}
        self._ratios = {}
        self._turn = 0
        self._due = 0.0

    def _probe(self, now: float) -> None:
        """Give the next domain its turn; the first one only makes its buffer."""
        domain = self._domains[self._turn % len(self._domains)]
        self._turn += 1
        before = self._cpu_s()
        with on_cpus(domain.canary_cpus or domain.cpus) as there:
            walk = self._walks.get(domain.domain)
            if there and walk is None:
                size = buffer_bytes(domain, self._setup.most_buffer_bytes)
                self._walks[domain.domain] = self._make(domain, size)
                return
            step_ns = walk.step_ns(self._setup.steps) if there and walk is not None else None
        if step_ns is None:
            self._ratios.pop(domain.domain, None)
        else:
            ratio = self._baselines[domain.domain].ratio(now, step_ns)
            self._ratios[domain.domain] = now, ratio
        # Changing CPUs costs as well: the whole turn counts.
        cost_s = self._cpu_s() - before
        self._gap_s = max(
            self._setup.every_s / len(self._domains), cost_s / self._setup.most_core_share
        )
        self._due = now + self._gap_s


@contextmanager
def on_cpus(cpus: tuple[int, ...]) -> Iterator[bool]:
    """Run this thread on `cpus`; yields False, and stays, where none of them is ours."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, ValueError):
        # Offline now, not in our cpuset, or no CPU number at all.
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setaffinity(0, before)


def buffer_bytes(domain: DomainSetup, most: int) -> int:
    """Return how much memory hides from the domain's caches, in whole pages."""
    wanted = _L3_TIMES * (domain.l3_bytes or _UNKNOWN_L3_BYTES)
    size = max(_LEAST_BUFFER_BYTES, min(most, wanted))
    return size - size % mmap.PAGESIZE


def why_no_walk(domains: Iterable[DomainSetup]) -> str | None:
    """Return why the canary cannot walk here, None if it can."""
    for domain in domains:
        cpus = domain.canary_cpus or domain.cpus
        with on_cpus(cpus) as there:
            if not there:
                return f"domain {domain.domain}: none of the CPUs {format_list(cpus)} is ours"
    probe = ArrayWalk(domain, _LEAST_BUFFER_BYTES)
    try:
        return None if probe.chases() else "this numpy copies the indices of take"
    finally:
        probe.close()


class ArrayWalk:
    """A cycle through every line of a buffer, in random order; first touched where it is made.

    It goes on where it left off, so that a line is not met again before all others were.
    """

    def __init__(self, domain: DomainSetup, size: int) -> None:
        # numpy's BLAS starts a thread for each CPU unless told so before the import.
        os.putenv("OPENBLAS_NUM_THREADS", "1")
        import numpy

        self._memory = _huge_paged(size)
        words = numpy.frombuffer(self._memory, dtype=numpy.intp)
        order = numpy.random.default_rng(domain.domain).permutation(size // _LINE_BYTES)
        words[order * _LINE_WORDS] = numpy.roll(order, -1) * _LINE_WORDS
        self._words = words
        self._path = words[:0].copy()
        self._at = 0

    def step_ns(self, steps: int) -> float:
        chunk = max(1, steps // _CHUNKS)
        if len(self._path) != chunk + 1:
            self._path = self._words[: chunk + 1].copy()
        path = self._path
        times = []
        for _ in range(_CHUNKS):
            path[0] = self._at
            began = time.perf_counter_ns()
            self._words.take(path[:-1], out=path[1:], mode="wrap")
            times.append(time.perf_counter_ns() - began)
            self._at = int(path[-1])
        return statistics.median(times) / chunk

    def chases(self) -> bool:
        """Whether a walk goes where the words say: numpy promises no order of a take."""
        at = start = self._at
        self.step_ns(_CHUNKS * 4)
        for _ in range(_CHUNKS * 4):
            at = int(self._words[at])
        return at == self._at != start

    def close(self) -> None:
        del self._words
        self._memory.close()


def burst_bytes_per_s(domain: DomainSetup, most_bytes: int) -> float | None:
    """Return what one core of the domain reads in a burst, None if we may not run there.

    A lower bound of the domain's peak: one core alone fills no memory controller.
    """
    os.putenv("OPENBLAS_NUM_THREADS", "1")
    import numpy

    with on_cpus(domain.canary_cpus or domain.cpus) as there:
        if not there:
            return None
        size = buffer_bytes(domain, most_bytes)
        words = numpy.ones(size // _WORD_BYTES, dtype=numpy.int64)
        times = []
        for _ in range(_BURSTS):
            began = time.perf_counter()
            words.max()
            times.append(time.perf_counter() - began)
    return size / min(times)


def _huge_paged(size: int) -> mmap.mmap:
    """Return fresh memory, in huge pages if the kernel has some: fewer TLB misses to time."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return memory  # A kernel without them: small pages do.
    return memory
