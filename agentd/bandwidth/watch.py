"""Composes the Reports from the chosen source and from what every kernel tells."""

from __future__ import annotations

from collections.abc import Sequence

from agentd.bandwidth.llc import HitRate
from agentd.bandwidth.numastat import RemoteShare
from agentd.bandwidth.peaks import Peaks
from agentd.bandwidth.perf import Counters
from agentd.bandwidth.pipe import DomainSetup, Setup
from agentd.bandwidth.pressure import Steal, pressure_of
from agentd.bandwidth.report import DomainLoad, Report
from agentd.bandwidth.select import choose
from agentd.bandwidth.sensor import Load, Sensor
from agentd.hostfs import HostFs
from corefleet.errors import Unavailable

_NOTHING = Load()


class Watch:
    """One after another, the Reports of a node. Raises Unavailable if no source works."""

    def __init__(
        self, setup: Setup, host: HostFs, counters: Counters, sensors: Sequence[Sensor]
    ) -> None:
        self.peaks = Peaks(setup.domains)
        self._setup = setup
        self._host = host
        self._left = list(sensors)
        self._why_not: tuple[str, ...] = ()
        self._number = 0
        self._before: float | None = None
        self._sensor = self._choose()
        domains = tuple(one.domain for one in setup.domains)
        self._remote = RemoteShare(host, domains)
        self._steal = Steal(host)
        self._hits = HitRate(setup.domains, counters)

    def report(self, now: float) -> Report:
        """Return the report of the time since the last one.

        A source that went away is replaced by the next best. Raises Unavailable if none
        is left.
        """
        loads = self._sample(now)
        hits, remote = self._hits.sample(), self._remote.sample()
        interval_s = now - self._before if self._before is not None else self._setup.interval_s
        self._before = now
        self._number += 1
        return Report(
            number=self._number,
            interval_s=interval_s,
            source=self._sensor.source,
            why_not=self._why_not,
            domains=tuple(
                self._domain(one, loads.get(one.domain, _NOTHING), hits, remote)
                for one in self._setup.domains
            ),
            steal=self._steal.sample(),
            memory_pressure=pressure_of(self._host, "memory"),
            cpu_pressure=pressure_of(self._host, "cpu"),
        )

    def close(self) -> None:
        """Idempotent."""
        self._sensor.close()
        self._hits.close()

    def _choose(self) -> Sensor:
        sensor, why_not = choose(self._left)
        self._why_not += why_not
        del self._left[: self._left.index(sensor) + 1]
        return sensor

    def _sample(self, now: float) -> dict[int, Load]:
        while True:
            try:
                return dict(self._sensor.sample(now))
            except Unavailable as error:
                self._sensor.close()
                self._why_not += (f"{self._sensor.source}: {error}",)
                self._sensor = self._choose()

    def _domain(
        self, one: DomainSetup, load: Load, hits: dict[int, float], remote: dict[int, float]
    ) -> DomainLoad:
        peak = one.peak_bytes_per_s
        utilisation = None
        if load.bytes_per_s is not None:
            self.peaks.see(one.domain, load.bytes_per_s)
            peak = self.peaks.of(one.domain)
            utilisation = load.bytes_per_s / peak
        return DomainLoad(
            domain=one.domain,
            utilisation=utilisation,
            bytes_per_s=load.bytes_per_s,
            peak_bytes_per_s=peak,
            batch_bytes_per_s=load.batch_bytes_per_s,
            latency_ratio=load.latency_ratio,
            llc_hit=hits.get(one.domain),
            remote_share=remote.get(one.domain),
        )
