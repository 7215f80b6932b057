"""What agentd writes to its bandwidth program, one line, a Setup; Reports come back. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

import msgspec

from agentd.bandwidth.report import Report, Source
from agentd.core.topology import Topology
from corefleet.config import LogConfig
from corefleet.errors import CorruptRecord

MOST_LINE_BYTES = 1024 * 1024

SOURCES: tuple[Source, ...] = ("resctrl", "uncore", "llc", "canary", "pressure")
"""All of them, best first."""

L = TypeVar("L")


class CanarySetup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How often and how far the canary walks."""

    every_s: float = 2.0
    """A domain's turn comes this often, if `most_core_share` lets it."""
    steps: int = 6400
    most_core_share: float = 0.004
    """CPU time of all walks together, as a share of one core."""
    most_buffer_bytes: int = 64 << 20
    """For each domain. An L3 that is larger than this hides the memory from the canary."""
    baseline_window_s: float = 2 * 3600.0


class DomainSetup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One domain to report on."""

    domain: int
    cpus: tuple[int, ...]
    canary_cpus: tuple[int, ...] = ()
    """Where the canary may run, e.g. the system's CPUs; none: any of `cpus`."""
    l3_bytes: int = 0
    """Of the largest last-level cache; 0: the machine does not say."""
    peak_bytes_per_s: float | None = None
    """As configured. None: the highest that was seen, not below a floor."""
    groups: tuple[str, ...] = ()
    """Control groups of all classes, e.g. `sys/fs/cgroup/corefleet.slice/...`, for LLC misses."""
    batch_group: str | None = None
    """The one of them that holds the batch class."""


class Setup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first line."""

    node: str
    log: LogConfig = LogConfig()
    domains: tuple[DomainSetup, ...]
    interval_s: float = 0.5
    canary: CanarySetup = CanarySetup()
    measure_peak: bool = False
    """Let the canary also read a burst. What one core reads is a lower bound of the peak."""
    sources: tuple[Source, ...] = SOURCES
    """What may be tried; the order is fixed."""
    root: str = "/"
    """Of the kernel's files; anything but `/` is a recorded machine."""


_NONE: Mapping[int, tuple[str, ...]] = MappingProxyType({})


def domain_setups(
    topology: Topology,
    canary_cpus: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
    peaks: Mapping[int, float] = MappingProxyType({}),
    groups: Mapping[int, tuple[str, ...]] = _NONE,
    batch_groups: Mapping[int, str] = MappingProxyType({}),
) -> tuple[DomainSetup, ...]:
    """Return what to report on: the domains of this machine, and what is known of each by id."""
    return tuple(
        DomainSetup(
            domain=domain,
            cpus=found.cpus,
            canary_cpus=canary_cpus.get(domain, ()),
            l3_bytes=1024
            * max(
                (
                    cache.size_kb or 0
                    for cache in topology.caches
                    if not set(found.cpus).isdisjoint(cache.cpus)
                ),
                default=0,
            ),
            peak_bytes_per_s=peaks.get(domain),
            groups=groups.get(domain, ()),
            batch_group=batch_groups.get(domain),
        )
        for domain, found in sorted(topology.domains.items())
    )


def line_of(message: Setup | Report) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def read_line(line: bytes, kind: type[L]) -> L:
    """Return what a line holds; raises CorruptRecord."""
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:
        raise CorruptRecord(f"{kind.__name__}: {error} in a line of {len(line)} bytes") from error
