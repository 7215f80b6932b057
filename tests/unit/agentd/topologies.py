"""Machines as discovery would describe them: built by hand, drawn at random, recorded."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Literal

from hypothesis import strategies as st

from agentd.core.topology import (
    CacheGroup,
    CoreKind,
    CpuSets,
    Domain,
    HugePages,
    NumaNode,
    Topology,
)

GIB = 1 << 30
RECORDED = Path(
    os.environ.get("COREFLEET_MACHINES", str(Path(__file__).parents[4] / "shared" / "machines"))
)

_BESIDE_THE_POINT = re.compile(
    r"/cache/index[0-2]/|/acpi_cppc/(?!nominal_perf)|/cpufreq/|/cpuidle/|/topology/(die|package|core_id|physical_)"
    r"|/hugepages/|/coherency_line_size|/ways_of|/number_of_sets|/resctrl/|/vmstat|/numastat"
)

Numbering = Literal["adjacent", "split", "shuffled"]
"""Siblings side by side; first threads of all before second ones; any order."""


@dataclass(slots=True, frozen=True)
class Node:
    """A node: threads of each core, of which `fast` (the first so many) are performance cores."""

    threads: tuple[int, ...] = (2,) * 8
    fast: int = 0
    memory_bytes: int | None = 64 * GIB
    """None: the machine does not say."""
    cores_per_cache: int = 0
    """0: it shows no L3."""
    cores_per_cluster: int = 0
    isolated_cores: int = 0
    """The last so many."""
    huge_pages: int = 0
    """Of 2 MiB."""


def build(
    nodes: Sequence[Node],
    numbering: Numbering = "adjacent",
    node_step: int = 1,
    cpu_gap: int = 0,
    seed: int = 0,
) -> Topology:
    """Return a machine of `nodes`, every CPU of it online and ours.

    Nodes are numbered 0, `node_step`, ...; with `cpu_gap`, every so many CPU numbers one is
    left out.
    """
    cores = _numbered(nodes, numbering, cpu_gap, seed)
    siblings = {cpu: core for mine in cores for core in mine for cpu in core}
    caches: list[CacheGroup] = []
    clusters: list[tuple[int, ...]] = []
    isolated: list[int] = []
    fast: list[int] = []
    for node, mine in zip(nodes, cores, strict=True):
        caches += [
            CacheGroup(_flat(part), 32768, None) for part in _parts(mine, node.cores_per_cache)
        ]
        clusters += [_flat(part) for part in _parts(mine, node.cores_per_cluster)]
        fast += _flat(mine[: node.fast])
        isolated += _flat(mine[len(mine) - node.isolated_cores :])
    online = tuple(sorted(siblings))
    slow = tuple(cpu for cpu in online if cpu not in fast)
    known = _nodes_of(nodes, [number * node_step for number in range(len(nodes))], cores)
    return Topology(
        domains=MappingProxyType(
            {
                node.node: Domain(node.node, node.cpus, node.memory_bytes or 0, node.distances)
                for node in known.values()
                if node.cpus
            }
        ),
        siblings=MappingProxyType(siblings),
        possible=online,
        online=online,
        arch="x86_64",
        features=(),
        numa=True,
        warnings=(),
        sets=CpuSets(isolated=tuple(sorted(isolated))),
        nodes=MappingProxyType(known),
        caches=tuple(caches),
        clusters=tuple(clusters),
        kinds=(
            (CoreKind("performance", tuple(sorted(fast))), CoreKind("efficiency", slow))
            if fast and slow
            else (CoreKind("uniform", online),)
        ),
    )


def without(topology: Topology, gone: int) -> Topology:
    """Return the machine after a CPU went offline."""

    def left(cpus: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(cpu for cpu in cpus if cpu != gone)

    domains = {
        number: replace(domain, cpus=left(domain.cpus))
        for number, domain in topology.domains.items()
        if left(domain.cpus)
    }
    return replace(
        topology,
        domains=MappingProxyType(domains),
        siblings=MappingProxyType(
            {cpu: left(core) for cpu, core in topology.siblings.items() if cpu != gone}
        ),
        online=left(topology.online),
        nodes=MappingProxyType(
            {n: replace(node, cpus=left(node.cpus)) for n, node in topology.nodes.items()}
        ),
        caches=tuple(replace(g, cpus=left(g.cpus)) for g in topology.caches if left(g.cpus)),
        clusters=tuple(left(cluster) for cluster in topology.clusters if left(cluster)),
        kinds=tuple(replace(kind, cpus=left(kind.cpus)) for kind in topology.kinds),
    )


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    """Draw a machine: up to 16 nodes of up to 64 CPUs."""
    nodes = draw(st.lists(_nodes(), min_size=1, max_size=16))
    if not any(node.threads for node in nodes):
        nodes.append(Node(threads=(1,)))
    return build(
        nodes,
        numbering=draw(st.sampled_from(("adjacent", "split", "shuffled"))),
        node_step=draw(st.sampled_from((1, 1, 4))),
        cpu_gap=draw(st.sampled_from((0, 0, 3))),
        seed=draw(st.integers(0, 999)),
    )


@st.composite
def _nodes(draw: st.DrawFn) -> Node:
    cores = draw(st.sampled_from((0, 1, 2, 3, 4, 6, 7, 8, 12, 16, 24, 32)))
    smt = draw(st.sampled_from(("one", "two", "four", "fast", "mixed")))
    fast = draw(st.integers(0, cores)) if draw(st.booleans()) else 0
    threads: tuple[int, ...]
    if smt == "fast":
        threads = (2,) * fast + (1,) * (cores - fast)
    elif smt == "mixed":
        threads = tuple(1 + number * 7 % 3 % 2 for number in range(cores))
    else:
        each = {"one": 1, "two": 2, "four": 4}[smt]
        cores = min(cores, 64 // each)
        fast = min(fast, cores)
        threads = (each,) * cores
    return Node(
        threads=threads,
        fast=fast,
        memory_bytes=draw(st.sampled_from((None, 0, GIB // 2, 2 * GIB, 8 * GIB, 256 * GIB))),
        cores_per_cache=draw(st.sampled_from((0, 0, 4, 8, 64))),
        cores_per_cluster=draw(st.sampled_from((0, 0, 4))),
        isolated_cores=min(cores, draw(st.sampled_from((0, 0, 0, 2)))),
        huge_pages=draw(st.sampled_from((0, 0, 100))),
    )


def recorded() -> Mapping[str, Path]:
    """Return the archives of recorded machines by name; none without the directory."""
    return {path.name.removesuffix(".tar.gz"): path for path in sorted(RECORDED.glob("*.tar.gz"))}


def unpack(archive: Path, where: Path) -> Path:
    """Unpack what a plan depends on of a recorded machine; return its root.

    Writing thousands of small files is most of the time: inner caches and frequencies are left.
    """
    with tarfile.open(archive) as tar:
        wanted = [member for member in tar if not _BESIDE_THE_POINT.search(member.name)]
        tar.extractall(where, wanted, filter="tar")
    return where / archive.name.removesuffix(".tar.gz")


def _numbered(
    nodes: Sequence[Node], numbering: Numbering, cpu_gap: int, seed: int
) -> list[list[tuple[int, ...]]]:
    slots = [
        (number, core, thread)
        for number, node in enumerate(nodes)
        for core, threads in enumerate(node.threads)
        for thread in range(threads)
    ]
    if numbering == "split":
        slots.sort(key=lambda slot: (slot[2], slot[0], slot[1]))
    elif numbering == "shuffled":
        Random(seed).shuffle(slots)
    cores: list[list[list[int]]] = [[[] for _ in node.threads] for node in nodes]
    for place, (number, core, _) in enumerate(slots):
        cores[number][core].append(place + (place // cpu_gap if cpu_gap else 0))
    return [[tuple(sorted(core)) for core in mine] for mine in cores]


def _nodes_of(
    nodes: Sequence[Node], ids: list[int], cores: list[list[tuple[int, ...]]]
) -> dict[int, NumaNode]:
    return {
        ids[number]: NumaNode(
            node=ids[number],
            listed_cpus=_flat(cores[number]),
            cpus=_flat(cores[number]),
            memory_bytes=node.memory_bytes,
            distances=_distances(ids, number),
            huge_pages=MappingProxyType({2048: HugePages(node.huge_pages, 0)}),
        )
        for number, node in enumerate(nodes)
    }


def _parts(cores: list[tuple[int, ...]], size: int) -> list[list[tuple[int, ...]]]:
    return [cores[at : at + size] for at in range(0, len(cores), size)] if size else []


def _distances(ids: list[int], mine: int) -> Mapping[int, int]:
    return MappingProxyType({node: 10 + 5 * abs(number - mine) for number, node in enumerate(ids)})


def _flat(cores: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(cpu for core in cores for cpu in core))
