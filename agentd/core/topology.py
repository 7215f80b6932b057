"""The machine: facts as probes found them, folded into a frozen model keyed by id. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal


@dataclass(slots=True)
class Facts:
    """What the probes found so far. None: the machine does not say."""

    arch: str = ""
    features: tuple[str, ...] = ()
    possible: tuple[int, ...] | None = None
    online: tuple[int, ...] | None = None
    allowed_cpus: tuple[int, ...] | None = None
    """CPUs that our own cpuset and affinity leave us."""
    allowed_nodes: tuple[int, ...] | None = None
    """Nodes whose memory our own cpuset leaves us."""
    node_cpus: dict[int, tuple[int, ...]] = field(default_factory=dict)
    node_memory: dict[int, int] = field(default_factory=dict)
    node_distances: dict[int, dict[int, int]] = field(default_factory=dict)
    total_memory: int = 0
    siblings: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By CPU: the CPUs of its core, itself among them."""
    numa: bool = False
    """Whether the kernel has NUMA nodes."""
    warnings: list[str] = field(default_factory=list)


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


def fold(facts: Facts, overrides: Overrides) -> Topology:
    """Return the model of the machine; nonsense is reported in `warnings` and survived.

    A machine that names no NUMA nodes is one domain 0.
    """
    warnings = list(facts.warnings)
    online = facts.online or facts.possible or tuple(sorted(facts.siblings)) or (0,)
    usable = set(online)
    for what, given in (("our cpuset", facts.allowed_cpus), ("`cpus`", overrides.cpus or None)):
        if given is None:
            continue
        if usable.isdisjoint(given):
            warnings.append(f"{what} names no CPU that is online and allowed: ignored")
        else:
            usable &= set(given)
    node_cpus = _each_cpu_once(facts, online, warnings)
    domains = {}
    for node, cpus in sorted(node_cpus.items()):
        mine = tuple(cpu for cpu in cpus if cpu in usable)
        if not mine or (overrides.domains and node not in overrides.domains):
            continue
        if facts.numa and facts.allowed_nodes is not None and node not in facts.allowed_nodes:
            warnings.append(f"domain {node}: our cpuset does not allow its memory; not used")
            continue
        domains[node] = Domain(
            domain=node,
            cpus=mine,
            memory_bytes=facts.node_memory.get(node, 0)
            or (facts.total_memory if len(node_cpus) == 1 else 0),
            distances=MappingProxyType(dict(facts.node_distances.get(node, {}))),
        )
    warnings.extend(
        f"domain {node}: not on this machine, or without a CPU that may be used"
        for node in overrides.domains
        if node not in domains
    )
    kept = {cpu for domain in domains.values() for cpu in domain.cpus}
    return Topology(
        domains=MappingProxyType(domains),
        siblings=MappingProxyType(_consistent_siblings(facts, kept, node_cpus, warnings)),
        possible=facts.possible or online,
        online=online,
        arch=facts.arch,
        features=facts.features,
        numa=facts.numa,
        warnings=tuple(warnings),
    )


def _each_cpu_once(
    facts: Facts, online: tuple[int, ...], warnings: list[str]
) -> dict[int, tuple[int, ...]]:
    """Give each online CPU to one node: to the first that lists it, or to the lowest."""
    owner: dict[int, int] = {}
    for node, cpus in sorted(facts.node_cpus.items()):
        twice = [cpu for cpu in cpus if cpu in owner]
        if twice:
            warnings.append(f"domain {node}: CPU {twice[0]} is also in domain {owner[twice[0]]}")
        for cpu in cpus:
            owner.setdefault(cpu, node)
    strays = [cpu for cpu in online if cpu not in owner]
    if strays and owner:
        warnings.append(f"CPU {strays[0]} is online and in no domain: put into the lowest one")
    lowest = min(owner.values(), default=0)
    found: dict[int, list[int]] = {}
    for cpu in online:
        found.setdefault(owner.get(cpu, lowest), []).append(cpu)
    return {node: tuple(cpus) for node, cpus in found.items()}


def _consistent_siblings(
    facts: Facts, kept: set[int], node_cpus: dict[int, tuple[int, ...]], warnings: list[str]
) -> dict[int, tuple[int, ...]]:
    """Return siblings that name each other and share a node; others count as own cores."""
    node_of = {cpu: node for node, cpus in node_cpus.items() for cpu in cpus}
    result = {}
    odd = []
    for cpu in sorted(kept):
        core = tuple(c for c in facts.siblings.get(cpu, (cpu,)) if c in node_of)
        agree = cpu in core and all(
            cpu in facts.siblings.get(other, ()) and node_of[other] == node_of[cpu]
            for other in core
            if other != cpu
        )
        if not agree:
            odd.append(cpu)
        result[cpu] = core if agree else (cpu,)
    if odd:
        # A core must be seen the same from each of its threads.
        result = {c: (c,) if any(o in odd for o in core) else core for c, core in result.items()}
        warnings.append(f"CPU {odd[0]}: its siblings do not name it: counted as a core of its own")
    return result
