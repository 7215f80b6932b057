"""The peak bandwidth of each domain: configured, or the highest seen. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from agentd.bandwidth.pipe import DomainSetup

FLOOR_BYTES_PER_S = 8e9
FLOOR_PER_CPU_BYTES_PER_S = 2e9
"""Servers have 3 GB/s a core or more (64 cores, 8 channels of DDR4-3200: 204.8 GB/s); less
counts as the peak only if it is configured, or else an idle machine's first trickle would."""


class Peaks:
    """What was configured stays; else a peak only grows."""

    def __init__(self, domains: Iterable[DomainSetup]) -> None:
        domains = tuple(domains)
        self._configured = {
            one.domain: one.peak_bytes_per_s
            for one in domains
            if one.peak_bytes_per_s is not None and one.peak_bytes_per_s > 0
        }
        self._seen = {
            one.domain: max(FLOOR_BYTES_PER_S, FLOOR_PER_CPU_BYTES_PER_S * len(one.cpus))
            for one in domains
        }

    def see(self, domain: int, bytes_per_s: float) -> None:
        """Take in what a domain was seen to do."""
        self._seen[domain] = max(self._seen.get(domain, FLOOR_BYTES_PER_S), bytes_per_s)

    def of(self, domain: int) -> float:
        """Return the domain's peak in bytes per second."""
        return self._configured.get(domain) or self._seen.get(domain, FLOOR_BYTES_PER_S)
