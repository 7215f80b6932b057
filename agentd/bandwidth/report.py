"""What the bandwidth program tells agentd: one JSON line each interval. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

Source = Literal["resctrl", "uncore", "llc", "canary", "pressure"]
"""Best first: resctrl's monitoring, the memory controllers' counters, LLC misses of cgroups, the
canary's slow-down, pressure stall information (which senses no bandwidth)."""


class DomainLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One domain over the last interval. None: this machine does not say."""

    domain: int
    utilisation: float | None = None
    """Share of the domain's peak memory bandwidth in use, 0 to 1 or a little more."""
    bytes_per_s: float | None = None
    peak_bytes_per_s: float | None = None
    batch_bytes_per_s: float | None = None
    """Part of it that the batch class uses."""
    latency_ratio: float | None = None
    """The canary's pointer chase against its idle baseline; 1.0 is idle."""
    llc_hit: float | None = None
    remote_share: float | None = None
    """Share of page allocations that went to another node (numastat)."""


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the bandwidth program."""

    number: int
    interval_s: float
    source: Source
    why_not: tuple[str, ...] = ()
    """One line for each better source: why it is not used here."""
    domains: tuple[DomainLoad, ...] = ()
    steal: float = 0.0
    """Share of the node's CPU time that the hypervisor took."""
    memory_pressure: float | None = None
    """PSI `some avg10` of memory as a share, None without PSI."""
    cpu_pressure: float | None = None
