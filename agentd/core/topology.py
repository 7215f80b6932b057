"""The machine as a frozen model keyed by id; `fold` makes it of what the probes found. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal


@dataclass(slots=True, frozen=True)
class HugePages:
    """Pages of one size on one node."""

    total: int
    free: int


@dataclass(slots=True, frozen=True)
class NumaNode:
    """A NUMA node as the kernel shows it, whether or not we may use it."""

    node: int
    listed_cpus: tuple[int, ...]
    """What its file says; may name CPUs that are offline or not there."""
    cpus: tuple[int, ...]
    """Those of them that are online."""
    memory_bytes: int | None
    """None: the machine does not say."""
    distances: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    huge_pages: Mapping[int, HugePages] = field(default_factory=lambda: MappingProxyType({}))
    """By page size in kB."""
    statistics: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """numastat: `numa_hit`, `other_node` and so on, in pages."""
    free_bytes: int | None = None
    listed_by: Literal["cpulist", "cpumap", "cpuN links", ""] = ""
    """Which of the node's files named its CPUs."""
    mapped_cpus: tuple[int, ...] | None = None
    """What its mask says where it disagrees with its list; None: they agree."""
    distance_row: tuple[int, ...] = ()
    """As printed; `distances` is empty when it does not fit the online nodes."""

    @property
    def kind(self) -> str:
        """`cpu+memory`, `cpu only`, `memory only`, `neither`, or `cpu, memory unknown`."""
        if self.memory_bytes is None:
            return "cpu, memory unknown" if self.listed_cpus else "memory unknown"
        if self.listed_cpus:
            return "cpu+memory" if self.memory_bytes else "cpu only"
        return "memory only" if self.memory_bytes else "neither"


@dataclass(slots=True, frozen=True)
class Package:
    """A socket. `label` is the kernel's text: it may be -1, huge, or not unique."""

    cpus: tuple[int, ...]
    label: str = ""


@dataclass(slots=True, frozen=True)
class CacheGroup:
    """CPUs that share a last-level (L3) cache."""

    cpus: tuple[int, ...]
    size_kb: int | None
    cache: int | None
    """The kernel's id, which resctrl uses; None where there is no id file."""


@dataclass(slots=True, frozen=True)
class CoreKind:
    """Online CPUs of one make: capacity 0-1024 relative to the fastest, and ARM's MIDR."""

    name: Literal["performance", "efficiency", "uniform"]
    cpus: tuple[int, ...]
    capacity: int | None = None
    midr: str = ""


@dataclass(slots=True, frozen=True)
class CpuSets:
    """What cpu/* says; None: the file is absent. `offline`: present and not online."""

    possible: tuple[int, ...] | None = None
    present: tuple[int, ...] | None = None
    offline: tuple[int, ...] = ()
    isolated: tuple[int, ...] = ()
    nohz_full: tuple[int, ...] = ()
    allowed: tuple[int, ...] | None = None
    """What our cpuset and affinity leave us."""
    allowed_nodes: tuple[int, ...] | None = None
    """Nodes whose memory our cpuset leaves us."""
    directories: tuple[int, ...] = ()
    """CPUs that have a directory; some of them were never there."""
    without_topology: tuple[int, ...] = ()
    """Those of them that do not say where they sit: offline ones."""
    online_from: str = "cpu/online"
    files: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The files' own words: `present`, `nohz_full`, `kernel_max` and so on."""


@dataclass(slots=True, frozen=True)
class Control:
    """One controllable resource of resctrl, e.g. `MB` or `L3`."""

    resource: str
    closids: int
    min_bandwidth: int | None = None
    granularity: int | None = None
    unit: Literal["percent", "MBps", "eighth_GBps", "mask"] = "mask"


@dataclass(slots=True, frozen=True)
class Resctrl:
    """What resctrl can do here; `mounted` False: the kernel has it, nobody mounted it."""

    mounted: bool
    controls: Mapping[str, Control] = field(default_factory=lambda: MappingProxyType({}))
    monitors: tuple[str, ...] = ()
    """Event names, e.g. `mbm_total_bytes`."""
    rmids: int = 0


@dataclass(slots=True, frozen=True)
class ControlGroups:
    """`version` 1, 2, or 0 for none; a hybrid machine is 1 with `hybrid`."""

    version: int = 0
    hybrid: bool = False
    writable: bool = False
    controllers: tuple[str, ...] = ()
    own: str = ""
    """Our own group's path below the mount."""
    kind: Literal["v1", "v2", "cpuset", ""] = ""
    """Which hierarchy holds our cpuset; `cpuset` is the filesystem older than cgroups."""
    mount: str = ""
    """Where that one is mounted, without the leading slash."""
    limits: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Our cpuset's files that restrict us, e.g. `cpuset.cpus.effective`: `0-5`."""


@dataclass(slots=True, frozen=True)
class Domain:
    """A NUMA node with CPUs that we may use."""

    domain: int
    cpus: tuple[int, ...]
    """Online, allowed, and isolated ones only if asked for."""
    memory_bytes: int
    distances: Mapping[int, int]


@dataclass(slots=True, frozen=True)
class Topology:
    """The machine as agentd may use it (`domains`), and as it is (all else)."""

    domains: Mapping[int, Domain]
    siblings: Mapping[int, tuple[int, ...]]
    """By usable CPU: the CPUs of its core, itself among them."""
    possible: tuple[int, ...]
    online: tuple[int, ...]
    arch: str
    features: tuple[str, ...]
    """Those that every CPU has, normalised per architecture, with x86-64's levels."""
    numa: bool
    warnings: tuple[str, ...]
    sets: CpuSets = CpuSets()
    nodes: Mapping[int, NumaNode] = field(default_factory=lambda: MappingProxyType({}))
    all_cores: tuple[tuple[int, ...], ...] = ()
    """Each physical core's online threads, in order of the first."""
    packages: tuple[Package, ...] = ()
    dies: tuple[tuple[int, ...], ...] = ()
    clusters: tuple[tuple[int, ...], ...] = ()
    caches: tuple[CacheGroup, ...] = ()
    kinds: tuple[CoreKind, ...] = ()
    """One `uniform` kind, or performance cores before efficiency cores."""
    page_bytes: int = 4096
    resctrl: Resctrl | None = None
    """None: the kernel has none."""
    cgroups: ControlGroups = ControlGroups()
    pressure: tuple[str, ...] = ()
    """Which of cpu, memory, io the kernel gives pressure stall information for."""
    systemd: bool = False
    node_files: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The words of node/online, possible, has_cpu and so on."""
    cpu_names: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """cpuinfo's `model name`, `CPU part` and so on, each with its distinct values."""
    cpuinfo_processors: int = 0
    capacities: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """By online CPU: 0 to 1024, relative to the fastest; empty where nobody says."""
    midrs: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    """By online CPU: ARM's main id register, as the kernel writes it."""

    def cores(self, cpus: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return `cpus` grouped by physical core, in order of each core's first CPU."""
        wanted = set(cpus)
        seen: set[int] = set()
        cores = []
        for cpu in sorted(wanted):
            if cpu not in seen:
                core = tuple(c for c in self.siblings.get(cpu, (cpu,)) if c in wanted)
                seen.update(core)
                cores.append(core)
        return tuple(cores)


@dataclass(slots=True, frozen=True)
class Overrides:
    """What the operator said to use instead of everything."""

    cpus: tuple[int, ...] = ()
    domains: tuple[int, ...] = ()
    isolated: bool = False
    """Use CPUs that the kernel keeps free of other work (isolcpus), too."""
