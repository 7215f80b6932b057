"""From what the probes found to the model of the machine. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeVar

from agentd.core.kinds import core_kinds
from agentd.core.topology import (
    CacheGroup,
    ControlGroups,
    CpuSets,
    Domain,
    HugePages,
    NumaNode,
    Overrides,
    Package,
    Resctrl,
    Topology,
)

_DEFAULT_PAGE_BYTES = 4096

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(slots=True)
class Facts:
    """What the probes found so far. None: the machine does not say."""

    arch: str = ""
    features: tuple[str, ...] = ()
    cpu_names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    cpuinfo_cpus: tuple[int, ...] = ()
    cpu_files: dict[str, str] = field(default_factory=dict)
    cpu_directories: tuple[int, ...] = ()
    without_topology: tuple[int, ...] = ()
    possible: tuple[int, ...] | None = None
    present: tuple[int, ...] | None = None
    online: tuple[int, ...] | None = None
    online_from: str = "cpu/online"
    isolated: tuple[int, ...] = ()
    nohz_full: tuple[int, ...] = ()
    allowed_cpus: tuple[int, ...] | None = None
    """CPUs that our own cpuset and affinity leave us."""
    allowed_nodes: tuple[int, ...] | None = None
    """Nodes whose memory our own cpuset leaves us."""
    node_files: dict[str, str] = field(default_factory=dict)
    node_cpus: dict[int, tuple[int, ...]] = field(default_factory=dict)
    node_listed_by: dict[int, Literal["cpulist", "cpumap", "cpuN links", ""]] = field(
        default_factory=dict
    )
    node_masks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Masks that disagree with the lists."""
    node_memory: dict[int, int] = field(default_factory=dict)
    node_free: dict[int, int] = field(default_factory=dict)
    node_distances: dict[int, dict[int, int]] = field(default_factory=dict)
    node_rows: dict[int, tuple[int, ...]] = field(default_factory=dict)
    node_huge_pages: dict[int, dict[int, HugePages]] = field(default_factory=dict)
    node_statistics: dict[int, dict[str, int]] = field(default_factory=dict)
    total_memory: int = 0
    siblings: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By CPU: the CPUs of its core, itself among them."""
    packages: list[Package] = field(default_factory=list)
    dies: list[tuple[int, ...]] = field(default_factory=list)
    clusters: list[tuple[int, ...]] = field(default_factory=list)
    caches: list[CacheGroup] = field(default_factory=list)
    capacities: dict[int, int] = field(default_factory=dict)
    midrs: dict[int, str] = field(default_factory=dict)
    parts: dict[int, str] = field(default_factory=dict)
    """What else tells makes of cores apart: x86's core type, or cpuinfo's part number."""
    efficient: tuple[int, ...] = ()
    """CPUs that the kernel calls efficiency cores (x86 hybrid)."""
    numa: bool = False
    """Whether the kernel has NUMA nodes."""
    page_bytes: int = _DEFAULT_PAGE_BYTES
    resctrl: Resctrl | None = None
    cgroups: ControlGroups = field(default_factory=ControlGroups)
    pressure: tuple[str, ...] = ()
    systemd: bool = False
    warnings: list[str] = field(default_factory=list)


def fold(facts: Facts, overrides: Overrides) -> Topology:
    """Return the model of the machine; nonsense is reported in `warnings` and survived.

    A machine that names no NUMA nodes is one domain 0.
    """
    warnings = list(facts.warnings)
    online = facts.online or facts.possible or tuple(sorted(facts.siblings)) or (0,)
    usable = _usable(facts, online, overrides, warnings)
    node_cpus = _each_cpu_once(facts, online, warnings)
    domains = _domains(facts, overrides, node_cpus, usable, warnings)
    kept = {cpu for domain in domains.values() for cpu in domain.cpus}
    live = set(online)
    siblings = _consistent_siblings(facts, kept, node_cpus, warnings)
    return Topology(
        domains=MappingProxyType(domains),
        siblings=MappingProxyType(siblings),
        possible=facts.possible or online,
        online=online,
        arch=facts.arch,
        features=facts.features,
        numa=facts.numa,
        warnings=tuple(warnings),
        sets=_sets(facts, live),
        nodes=MappingProxyType(_nodes(facts, live)),
        all_cores=_all_cores(facts, online),
        packages=tuple(facts.packages),
        dies=tuple(facts.dies),
        clusters=tuple(facts.clusters),
        caches=tuple(facts.caches),
        kinds=core_kinds(online, facts.capacities, facts.midrs, facts.parts, facts.efficient),
        page_bytes=facts.page_bytes,
        resctrl=facts.resctrl,
        cgroups=facts.cgroups,
        pressure=facts.pressure,
        systemd=facts.systemd,
        node_files=_frozen(facts.node_files),
        cpu_names=_frozen(facts.cpu_names),
        cpuinfo_processors=len(facts.cpuinfo_cpus),
        capacities=_frozen(facts.capacities),
        midrs=_frozen(facts.midrs),
    )


def _nodes(facts: Facts, online: Iterable[int]) -> dict[int, NumaNode]:
    """Return each node as the kernel shows it, its CPUs cut with `online`."""
    live = set(online)
    return {
        node: NumaNode(
            node=node,
            listed_cpus=cpus,
            cpus=tuple(cpu for cpu in cpus if cpu in live),
            memory_bytes=facts.node_memory.get(node),
            distances=_frozen(facts.node_distances.get(node, {})),
            huge_pages=_frozen(facts.node_huge_pages.get(node, {})),
            statistics=_frozen(facts.node_statistics.get(node, {})),
            free_bytes=facts.node_free.get(node),
            listed_by=facts.node_listed_by.get(node, ""),
            mapped_cpus=facts.node_masks.get(node),
            distance_row=facts.node_rows.get(node, ()),
        )
        for node, cpus in sorted(facts.node_cpus.items())
    }


def renewed_nodes(before: Mapping[int, NumaNode], facts: Facts) -> dict[int, NumaNode]:
    """Return the nodes of `before` with the memory, huge pages and statistics of `facts`."""
    return {
        node: NumaNode(
            node=node,
            listed_cpus=was.listed_cpus,
            cpus=was.cpus,
            memory_bytes=facts.node_memory.get(node),
            distances=was.distances,
            huge_pages=MappingProxyType(facts.node_huge_pages.get(node, {})),
            statistics=MappingProxyType(facts.node_statistics.get(node, {})),
            free_bytes=facts.node_free.get(node),
            listed_by=was.listed_by,
            mapped_cpus=was.mapped_cpus,
            distance_row=was.distance_row,
        )
        for node, was in before.items()
    }


def _frozen(values: Mapping[_Key, _Value]) -> Mapping[_Key, _Value]:
    return MappingProxyType(dict(values))


def _usable(
    facts: Facts, online: tuple[int, ...], overrides: Overrides, warnings: list[str]
) -> set[int]:
    """Online CPUs that our cpuset, the kernel's isolation and the operator leave us."""
    usable = set(online)
    if facts.allowed_cpus is not None:
        if usable.isdisjoint(facts.allowed_cpus):
            warnings.append("our cpuset names no CPU that is online and allowed: ignored")
        else:
            usable &= set(facts.allowed_cpus)
    isolated = set() if overrides.isolated else usable & set(facts.isolated)
    if isolated and isolated == usable:
        warnings.append("every CPU that may be used is isolated (isolcpus): used all the same")
    else:
        usable -= isolated
        asked = sorted(isolated & set(overrides.cpus))
        if asked:
            warnings.append(
                f"`cpus` names CPU {asked[0]}, which is isolated (isolcpus): "
                "not used unless isolated ones are asked for"
            )
    if overrides.cpus:
        if usable.isdisjoint(overrides.cpus):
            warnings.append("`cpus` names no CPU that is online and allowed: ignored")
        else:
            usable &= set(overrides.cpus)
    return usable


def _domains(
    facts: Facts,
    overrides: Overrides,
    node_cpus: Mapping[int, tuple[int, ...]],
    usable: set[int],
    warnings: list[str],
) -> dict[int, Domain]:
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
            memory_bytes=domain_memory(
                facts.node_memory.get(node), facts.total_memory, len(node_cpus)
            ),
            distances=_frozen(facts.node_distances.get(node, {})),
        )
    warnings.extend(
        f"domain {node}: not on this machine, or without a CPU that may be used"
        for node in overrides.domains
        if node not in domains
    )
    return domains


def domain_memory(of_node: int | None, of_machine: int, domains: int) -> int:
    """Return a domain's bytes of memory; the machine's where it is the only domain."""
    return of_node or (of_machine if domains == 1 else 0)


def _sets(facts: Facts, online: set[int]) -> CpuSets:
    present = facts.present if facts.present is not None else facts.cpu_directories or None
    return CpuSets(
        possible=facts.possible,
        present=present,
        offline=tuple(cpu for cpu in present or () if cpu not in online),
        isolated=facts.isolated,
        nohz_full=facts.nohz_full,
        allowed=facts.allowed_cpus,
        allowed_nodes=facts.allowed_nodes,
        directories=facts.cpu_directories,
        without_topology=facts.without_topology,
        online_from=facts.online_from,
        files=_frozen(facts.cpu_files),
    )


def _all_cores(facts: Facts, online: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    live = set(online)
    seen: set[int] = set()
    cores = []
    for cpu in online:
        if cpu not in seen:
            core = tuple(c for c in facts.siblings.get(cpu, (cpu,)) if c in live and c not in seen)
            seen.update(core)
            cores.append(core or (cpu,))
    return tuple(cores)


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
    live = set(online)
    lowest = min((node for cpu, node in owner.items() if cpu in live), default=0)
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
