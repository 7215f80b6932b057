"""Bandwidth estimated from last-level cache misses of control groups, and the hit rate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agentd.bandwidth.events import Event
from agentd.bandwidth.perf import HARDWARE_CACHE, Counter, Counters
from agentd.bandwidth.pipe import DomainSetup
from agentd.bandwidth.report import Source
from agentd.bandwidth.sensor import Load
from corefleet.errors import Unavailable

LINE_BYTES = 64
_MOST_HIT_CPUS = 16
"""A share needs only a sample of a domain's CPUs."""


def _last_level(operation: int, result: int, name: str) -> Event:
    """Return a generic cache event: id | operation << 8 | result << 16 (linux/perf_event.h).

    Not PERF_COUNT_HW_CACHE_MISSES: that is L1 on ARM (drivers/perf/arm_pmuv3.c) and L2 on
    AMD's Zen (arch/x86/events/amd/core.c).
    """
    return Event(name, HARDWARE_CACHE, 2 | operation << 8 | result << 16)


LOADS = _last_level(0, 0, "LLC-loads")
LOAD_MISSES = _last_level(0, 1, "LLC-load-misses")
STORE_MISSES = _last_level(1, 1, "LLC-store-misses")


class LlcSensor:
    """LLC misses of the classes' control groups times the line size.

    Too low by what hardware prefetch and write-back move, and by what runs outside the
    groups: good for comparing a domain with itself.
    """

    def __init__(self, domains: Iterable[DomainSetup], counters: Counters) -> None:
        self._domains = tuple(domains)
        self._counters = counters
        self._open: dict[int, list[tuple[bool, Counter]]] = {}
        self._before: float | None = None

    @property
    def source(self) -> Source:
        return "llc"

    def available(self) -> str | None:
        self.close()
        try:
            for domain in self._domains:
                if not domain.groups:
                    raise Unavailable(f"domain {domain.domain}: no control groups to count")
                kinds = self._kinds(domain)
                counted = self._open.setdefault(domain.domain, [])
                for group in domain.groups:
                    batch = group == domain.batch_group
                    for cpu in domain.cpus:
                        for kind in kinds:
                            counted.append((batch, Counter(self._counters, kind, cpu, group)))
        except Unavailable as error:
            self.close()
            return str(error)
        return None

    def _kinds(self, domain: DomainSetup) -> tuple[Event, ...]:
        """Return what this CPU counts: loads for certain, stores where it can."""
        cpu, group = domain.cpus[0], domain.groups[0]
        Counter(self._counters, LOAD_MISSES, cpu, group).close()
        try:
            Counter(self._counters, STORE_MISSES, cpu, group).close()
        except Unavailable:
            return (LOAD_MISSES,)  # Usual on ARM: the estimate is then of reads alone.
        return LOAD_MISSES, STORE_MISSES

    def sample(self, now: float) -> Mapping[int, Load]:
        elapsed = now - self._before if self._before is not None else 0.0
        self._before = now
        loads = {}
        for domain, counted in self._open.items():
            total = batch = 0.0
            for is_batch, counter in counted:
                misses = counter.delta() or 0.0
                total += misses
                batch += misses if is_batch else 0.0
            if elapsed > 0:
                loads[domain] = Load(
                    bytes_per_s=total * LINE_BYTES / elapsed,
                    batch_bytes_per_s=batch * LINE_BYTES / elapsed,
                )
        return loads

    def close(self) -> None:
        for counted in self._open.values():
            for _, counter in counted:
                counter.close()
        self._open = {}
        self._before = None


class HitRate:
    """Share of last-level cache loads that hit, of everything on a domain's CPUs."""

    def __init__(self, domains: Iterable[DomainSetup], counters: Counters) -> None:
        self.why_not: str | None = None
        """Why there are no figures, if there are none."""
        self._open: dict[int, list[tuple[Counter, Counter]]] = {}
        for domain in domains:
            step = max(1, -(-len(domain.cpus) // _MOST_HIT_CPUS))
            try:
                for cpu in domain.cpus[::step]:
                    loads = Counter(counters, LOADS, cpu)
                    try:
                        misses = Counter(counters, LOAD_MISSES, cpu)
                    except Unavailable:
                        loads.close()
                        raise
                    self._open.setdefault(domain.domain, []).append((loads, misses))
            except Unavailable as error:
                self._drop(domain.domain, error)

    def sample(self) -> dict[int, float]:
        """Return each domain's share, 0 to 1; one without loads is absent."""
        shares = {}
        for domain, counted in list(self._open.items()):
            try:
                deltas = [(loads.delta(), misses.delta()) for loads, misses in counted]
            except Unavailable as error:
                self._drop(domain, error)
                continue
            loads = sum(one or 0.0 for one, _ in deltas)
            misses = sum(one or 0.0 for _, one in deltas)
            if loads > 0:
                shares[domain] = min(1.0, max(0.0, 1 - misses / loads))
        return shares

    def close(self) -> None:
        """Idempotent."""
        for domain in list(self._open):
            self._drop(domain)

    def _drop(self, domain: int, error: Unavailable | None = None) -> None:
        if error is not None:
            self.why_not = str(error)
        for pair in self._open.pop(domain, ()):
            for counter in pair:
                counter.close()
