"""Memory bandwidth from the memory controllers' own counters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agentd.bandwidth.events import (
    DEVICES,
    Device,
    Event,
    bytes_per_count,
    encode,
    read_device,
)
from agentd.bandwidth.perf import Counter, Counters
from agentd.bandwidth.report import Source
from agentd.bandwidth.sensor import Load
from agentd.core.cpulist import parse_list
from agentd.hostfs import HostFs
from corefleet.errors import InvalidInput, Unavailable

_LINE_BYTES = 64.0
_NODES = "sys/devices/system/node"


@dataclass(slots=True, frozen=True)
class Family:
    """Counter units of one make.

    `events`: sets of names, of which the first that the kernel lists whole is counted;
    `terms`: what to count where the kernel lists no names. One count is `count_bytes`,
    unless the kernel gives the event a scale.
    """

    devices: re.Pattern[str]
    count_bytes: float
    events: tuple[tuple[str, ...], ...] = ()
    terms: tuple[str, ...] = ()
    one_node: bool = False
    """The unit serves only the node of the CPU that reads it."""


HISILICON = Family(
    # drivers/perf/hisilicon/hisi_uncore_ddrc_pmu.c names units and events. 32 bytes a count:
    # openEuler's tools/perf/pmu-events/arch/arm64/hisilicon/hip09/sys/uncore-ddrc.json,
    # `flux_wr * 32 / duration_time`. A unit belongs to a super cluster (SCCL), which is a node.
    re.compile(r"hisi_sccl\d+_ddrc\d+(_\d+)?\Z"),
    32.0,
    events=(("flux_rd", "flux_wr"),),
    one_node=True,
)
INTEL = Family(
    # arch/x86/events/intel/uncore_snbep.c: cas_count_*, scale 6.103515625e-5 MiB (one line);
    # uncore_snb.c: data_reads and data_writes of clients.
    re.compile(r"uncore_imc(_\d+)?\Z"),
    _LINE_BYTES,
    events=(
        ("cas_count_read", "cas_count_write"),
        (
            "cas_count_read_sch0",
            "cas_count_read_sch1",
            "cas_count_write_sch0",
            "cas_count_write_sch1",
        ),
        ("data_reads", "data_writes"),
    ),
)
INTEL_FREE_RUNNING = Family(
    # uncore_snb.c (data_*) and uncore_snbep.c (read, write): counters that cannot be stopped.
    re.compile(r"uncore_imc_free_running(_\d+)?\Z"),
    _LINE_BYTES,
    events=(("data_read", "data_write"), ("read", "write"), ("data_total",)),
)
AMD_CONTROLLERS = Family(
    # tools/perf/pmu-events/arch/x86/amdzen4/memory-controller.json: umc_cas_cmd.rd and .wr;
    # recommended.json: 64 bytes a command.
    re.compile(r"amd_umc_\d+\Z"),
    _LINE_BYTES,
    terms=("event=0x0a,rdwrmask=0x1", "event=0x0a,rdwrmask=0x2"),
)
AMD_FABRIC = Family(
    # tools/perf/pmu-events/arch/x86/amdzen3/data-fabric.json, and the same of amdzen1 and 2:
    # dram_channel_data_controller_0 to 7, "Requests with Data (64B)". They share four
    # counters, so each counts half of the time.
    re.compile(r"amd_df\Z"),
    _LINE_BYTES,
    terms=tuple(f"event={0x07 + 0x40 * channel:#x},umask=0x38" for channel in range(8)),
)
FAMILIES = (HISILICON, INTEL, INTEL_FREE_RUNNING, AMD_CONTROLLERS, AMD_FABRIC)


@dataclass(slots=True, frozen=True)
class Part:
    """One event of one unit: what it counts, where it is read, whose bandwidth it is."""

    event: Event
    cpu: int
    count_bytes: float
    nodes: tuple[int, ...]
    """The nodes that share it equally."""


def find_parts(host: HostFs) -> tuple[Part, ...]:
    """Return what to count for all memory traffic of this machine.

    The first family that can be counted is taken, for Intel's two would count everything
    twice. Raises Unavailable with the reason if there is none.
    """
    names = host.names(DEVICES)
    if not names:
        raise Unavailable(f"the kernel has no {DEVICES}")
    nodes = _Nodes(host)
    reasons = []
    for family in FAMILIES:
        found = [name for name in names if family.devices.match(name)]
        if not found:
            continue
        if family is AMD_FABRIC and not _knows_fabric(host):
            reasons.append("amd_df: its events of this CPU generation are not known")
            continue
        try:
            return tuple(part for name in found for part in _parts(host, family, name, nodes))
        except (InvalidInput, Unavailable) as error:
            reasons.append(str(error))
    raise Unavailable("; ".join(reasons) or "no memory controller's counters are listed")


def _parts(host: HostFs, family: Family, name: str, nodes: _Nodes) -> list[Part]:
    device = read_device(host, name)
    if device is None:
        raise Unavailable(f"{name}: its type, cpumask or format is unusable")
    chosen = next((names for names in family.events if set(names) <= set(device.events)), None)
    if chosen is not None:
        counted = [
            (
                encode(device, device.events[event], event),
                bytes_per_count(host, name, event, family.count_bytes),
            )
            for event in chosen
        ]
    elif family.terms:
        counted = [(encode(device, terms, terms), family.count_bytes) for terms in family.terms]
    else:
        raise Unavailable(f"{name}: lists no event of memory traffic")
    return [
        Part(event, cpu, size, nodes.served(device, cpu, family.one_node))
        for cpu in device.cpus
        for event, size in counted
    ]


def _knows_fabric(host: HostFs) -> bool:
    """Whether the CPU is Zen 1 to 3 or Hygon's copy (arch/x86/kernel/cpu/amd.c)."""
    text = host.read("proc/cpuinfo") or ""
    family = re.search(r"^cpu family\s*: (\d+)$", text, re.MULTILINE)
    model = re.search(r"^model\s*: (\d+)$", text, re.MULTILINE)
    if family is None or model is None:
        return False
    zen3 = (*range(0x10), *range(0x20, 0x30), *range(0x40, 0x60))
    return int(family[1]) in (0x17, 0x18) or (int(family[1]) == 0x19 and int(model[1]) in zen3)


class _Nodes:
    """Which nodes a unit serves, from the CPUs that read it.

    The kernel names one reading CPU for each socket (or die) and not the node. Where a socket
    has several nodes (sub-NUMA clusters, NPS) and one reading CPU, they share the figure
    equally; where each node has a reading CPU of its own, it is that node's.
    """

    def __init__(self, host: HostFs) -> None:
        self._host = host
        self._node_of: dict[int, int] = {}
        for name in host.names(_NODES):
            number = name.removeprefix("node")
            if name.startswith("node") and number.isdecimal():
                for cpu in _listed(host, f"{_NODES}/{name}/cpulist"):
                    self._node_of.setdefault(cpu, int(number))

    def served(self, device: Device, cpu: int, one_node: bool) -> tuple[int, ...]:
        own = self._node_of.get(cpu, 0)
        base = f"sys/devices/system/cpu/cpu{cpu}/topology"
        package = set(
            _listed(self._host, f"{base}/package_cpus_list")
            or _listed(self._host, f"{base}/core_siblings_list")
        )
        readers = {self._node_of.get(other, 0) for other in device.cpus if other in package}
        if one_node or len(readers) > 1:
            return (own,)
        return tuple(sorted({self._node_of.get(other, 0) for other in package} | {own}))


def _listed(host: HostFs, path: str) -> tuple[int, ...]:
    try:
        return parse_list(host.read(path) or "", path)
    except InvalidInput:
        return ()


class UncoreSensor:
    """Reads and writes of all memory controllers, by domain."""

    def __init__(self, host: HostFs, domains: Iterable[int], counters: Counters) -> None:
        self._host = host
        self._domains = frozenset(domains)
        self._counters = counters
        self._open: list[tuple[Part, Counter]] = []
        self._before: float | None = None

    @property
    def source(self) -> Source:
        return "uncore"

    def available(self) -> str | None:
        self.close()
        try:
            for part in find_parts(self._host):
                # All of them or none: with a controller missing the sum would be too low.
                if self._domains.intersection(part.nodes):
                    self._open.append((part, Counter(self._counters, part.event, part.cpu)))
        except Unavailable as error:
            self.close()
            return str(error)
        counted = {node for part, _ in self._open for node in part.nodes}
        if missing := sorted(self._domains - counted):
            self.close()
            return f"domain {missing[0]}: no memory controller's counters"
        return None

    def sample(self, now: float) -> Mapping[int, Load]:
        elapsed = now - self._before if self._before is not None else 0.0
        self._before = now
        sums = dict.fromkeys(self._domains, 0.0)
        for part, counter in self._open:
            count = counter.delta()
            for node in part.nodes:
                if count is None:
                    sums.pop(node, None)
                elif node in sums:
                    sums[node] += count * part.count_bytes / len(part.nodes)
        if elapsed <= 0:
            return {}
        return {node: Load(bytes_per_s=total / elapsed) for node, total in sums.items()}

    def close(self) -> None:
        for _, counter in self._open:
            counter.close()
        self._open = []
        self._before = None
