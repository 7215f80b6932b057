"""Memory traffic by domain from resctrl's monitoring. Blocking calls."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from agentd.bandwidth.resctrl_counters import CounterWidth, advance, reading
from agentd.bandwidth.resctrl_files import NOT_MOUNTED, PREFIX, ROOT, ResctrlFiles
from agentd.bandwidth.resctrl_layout import covered_domains
from agentd.core.topology import Topology
from agentd.hostfs import HostFs
from corefleet.errors import Incompatible

BATCH: Final = f"{PREFIX}batch"

_FOLDER = re.compile(r"mon_(L3|MB)_(\d+)\Z")
_PART = re.compile(r"mon_sub_L3_(\d+)\Z")
_TOTAL = "mbm_total_bytes"
# openEuler's MPAM gives a rate in MB/s; its manual does not say which M.
_RATE_BYTES = 1_000_000


class Traffic(NamedTuple):
    """Of one domain. `batch_bytes_per_s` is None without a group of the batch class."""

    bytes_per_s: float
    batch_bytes_per_s: float | None


@dataclass(slots=True, frozen=True)
class GroupUse:
    """Of one group in one domain. None: the kernel does not say."""

    bytes_per_s: float | None = None
    local_bytes_per_s: float | None = None
    llc_bytes: float | None = None


@dataclass(slots=True, frozen=True)
class _Meter:
    """A directory below mon_data and the domains whose traffic it counts."""

    folder: str
    domains: tuple[int, ...]
    rate: bool
    """The files hold MB/s and not a counter of bytes."""


class ResctrlMonitor:
    """Reads the counters of all groups: others' traffic loads the memory as ours does."""

    def __init__(self, files: ResctrlFiles, topology: Topology) -> None:
        """Use `open`, which finds out whether there is anything to read."""
        self._files = files
        self._topology = topology
        self._before: dict[tuple[str, str], tuple[float, int | None]] = {}
        self._width = CounterWidth()
        self._samples = 0
        self.uses: Mapping[tuple[int, str], GroupUse] = {}
        """At the last sample, by domain and group; '' is the root group."""

    @classmethod
    def open(cls, host: HostFs, topology: Topology) -> ResctrlMonitor | str:
        """Return a monitor, or one line that says why there is none."""
        files = ResctrlFiles(host)
        if not files.in_kernel:
            return "resctrl monitoring: the kernel or the CPU has no resctrl"
        if not files.mounted:
            return f"resctrl monitoring: {NOT_MOUNTED}"
        monitor = cls(files, topology)
        try:
            meters = monitor._meters()
        except Incompatible as error:
            return str(error)
        if not meters:
            return f"resctrl monitoring: no {_TOTAL} here"
        return monitor

    def sample(self, now: float) -> dict[int, Traffic] | None:
        """Return the traffic of each domain since the last sample; `now` in seconds.

        None at the first sample of counters. A domain is left out for one sample if the
        kernel did not count a part of its traffic; a group that is new counts from its second
        sample on.
        """
        self._samples += 1
        try:
            meters = self._meters()
        except Incompatible:
            # The machine changed while it ran, e.g. a CPU went offline: say nothing for now.
            return None
        groups = ("", *self._files.groups())
        total = {domain: 0.0 for meter in meters for domain in meter.domains}
        batch = dict.fromkeys(total, 0.0)
        blind: set[int] = set()
        uses: dict[tuple[int, str], GroupUse] = {}
        kept = self._before
        self._before = {}
        for meter in meters:
            for group in groups:
                use = self._use(group, meter, now, kept)
                for domain in meter.domains:
                    uses[domain, group] = _sum(uses.get((domain, group)), use)
                    if use.bytes_per_s is None:
                        blind.add(domain)
                        continue
                    total[domain] += use.bytes_per_s
                    if group == BATCH:
                        batch[domain] += use.bytes_per_s
        self.uses = uses
        if self._samples == 1 and not all(meter.rate for meter in meters):
            return None
        return {
            domain: Traffic(total[domain], batch[domain] if BATCH in groups else None)
            for domain in sorted(total)
            if domain not in blind
        }

    def _use(
        self,
        group: str,
        meter: _Meter,
        now: float,
        kept: Mapping[tuple[str, str], tuple[float, int | None]],
    ) -> GroupUse:
        """Return what one group did below one meter, for each of the meter's domains."""
        folder = self._files.path(group, f"mon_data/{meter.folder}")
        rates = {}
        for event in (_TOTAL, "mbm_local_bytes"):
            path = f"{folder}/{event}"
            value = reading(self._files.host.read(path))
            if meter.rate:
                rates[event] = None if value is None else float(value * _RATE_BYTES)
            else:
                rates[event] = self._speed((group, path), value, now, kept)
        held = reading(self._files.host.read(f"{folder}/llc_occupancy"))
        many = len(meter.domains)
        return GroupUse(*(None if x is None else x / many for x in (*rates.values(), held)))

    def _speed(
        self,
        key: tuple[str, str],
        value: int | None,
        now: float,
        kept: Mapping[tuple[str, str], tuple[float, int | None]],
    ) -> float | None:
        """Return bytes/s of a counter; 0 when it is seen for the first time."""
        self._before[key] = (now, value)
        if value is None:
            return None
        self._width.learn(value)
        if key not in kept:
            return 0.0
        then, old = kept[key]
        moved = None if old is None else advance(old, value, now - then, self._width.ends())
        return None if moved is None else moved / (now - then)

    def _meters(self) -> list[_Meter]:
        """Return what to read; raises Incompatible for ids that are not this machine's."""
        found = list(self._folders())
        rates = [one for one in found if one.rate]
        return [one for one in rates or found if one.domains]

    def _folders(self) -> Iterator[_Meter]:
        data = f"{ROOT}/mon_data"
        matches = [m for name in self._files.host.names(data) if (m := _FOLDER.match(name))]
        for kind in ("L3", "MB"):
            mine = {}
            for match in matches:
                inside = self._files.host.names(f"{data}/{match[0]}")
                if match[1] == kind and _TOTAL in inside:
                    mine[match[0]] = (int(match[2]), [p for n in inside if (p := _PART.match(n))])
            if not mine:
                continue
            below = covered_domains(
                self._topology, (key for key, _ in mine.values()), by_node=kind == "MB"
            )
            for folder, (key, parts) in mine.items():
                if not parts:
                    yield _Meter(folder, below[key], rate=kind == "MB")
                # With sub-NUMA clusters the kernel has one below for each node.
                for part in parts:
                    node = int(part[1])
                    domains = (node,) if node in self._topology.domains else ()
                    yield _Meter(f"{folder}/{part[0]}", domains, rate=False)


def _sum(one: GroupUse | None, other: GroupUse) -> GroupUse:
    """Return both together; what one does not know, the sum does not know."""
    if one is None:
        return other

    def add(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a + b

    return GroupUse(
        add(one.bytes_per_s, other.bytes_per_s),
        add(one.local_bytes_per_s, other.local_bytes_per_s),
        add(one.llc_bytes, other.llc_bytes),
    )
