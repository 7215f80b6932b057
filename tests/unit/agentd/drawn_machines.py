"""Machines built by hand as Topology objects, for the drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentd.core.topology import CacheGroup, Domain, HugePages, NumaNode, Package, Topology

GIB = 1 << 30


def machine(
    nodes: Mapping[int, Sequence[int]],
    *,
    cores: Sequence[Sequence[int]],
    packages: Sequence[tuple[str, Sequence[int]]] = (),
    caches: Sequence[tuple[int, Sequence[int]]] = (),
    memory: Mapping[int, int] | None = None,
    offline: Mapping[int, Sequence[int]] | None = None,
    huge: Mapping[int, HugePages] | None = None,
    distances: Mapping[int, Mapping[int, int]] | None = None,
) -> Topology:
    """Return a machine all of whose online CPUs we may use.

    `nodes`: online CPUs by node; `caches`: (size in kB, CPUs); `memory`: bytes by node,
    4 GiB where not said; `offline`: CPUs that a node's file also lists.
    """
    sizes = dict.fromkeys(nodes, 4 * GIB) | dict(memory or {})
    rows = distances or {a: {b: 10 if a == b else 20 for b in nodes} for a in nodes}
    online = tuple(sorted(cpu for cpus in nodes.values() for cpu in cpus))
    away = {node: tuple(cpus) for node, cpus in (offline or {}).items()}
    return Topology(
        domains={
            node: Domain(node, tuple(cpus), sizes[node], rows[node])
            for node, cpus in nodes.items()
            if cpus
        },
        siblings={cpu: tuple(core) for core in cores for cpu in core},
        possible=tuple(sorted({*online, *(cpu for cpus in away.values() for cpu in cpus)})),
        online=online,
        arch="x86_64",
        features=(),
        numa=True,
        warnings=(),
        nodes={
            node: NumaNode(
                node=node,
                listed_cpus=tuple(sorted({*cpus, *away.get(node, ())})),
                cpus=tuple(cpus),
                memory_bytes=sizes[node],
                distances=rows[node],
                huge_pages=huge or {},
            )
            for node, cpus in nodes.items()
        },
        all_cores=tuple(tuple(core) for core in cores),
        packages=tuple(Package(tuple(cpus), label) for label, cpus in packages),
        caches=tuple(CacheGroup(tuple(cpus), size, i) for i, (size, cpus) in enumerate(caches)),
    )


def laptop() -> Topology:
    """One package, one node, four cores of two threads, one L3."""
    return machine(
        {0: range(8)},
        cores=[(c, c + 4) for c in range(4)],
        packages=[("0", range(8))],
        caches=[(8192, range(8))],
    )


def big(nodes: int = 128, cpus_of_node: int = 4) -> Topology:
    """A package of two threads a core for each node."""
    each = {n: range(n * cpus_of_node, (n + 1) * cpus_of_node) for n in range(nodes)}
    return machine(
        each,
        cores=[(c, c + 1) for c in range(0, nodes * cpus_of_node, 2)],
        packages=[(str(n), cpus) for n, cpus in each.items()],
        caches=[(6144, cpus) for cpus in each.values()],
        memory={n: 4 * GIB - n % 3 * (GIB // 4) for n in each},
    )
