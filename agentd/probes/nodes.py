"""NUMA nodes: their CPUs, and distances by node id."""

from __future__ import annotations

import re

from agentd.core.fold import Facts
from agentd.hostfs import HostFs
from agentd.probes.lists import list_in, read_list, read_mask

BASE = "sys/devices/system/node"
_NODE = re.compile(r"node(\d+)\Z")
_CPU = re.compile(r"cpu(\d+)\Z")
_FILES = (
    "online", "possible", "has_cpu", "has_memory", "has_normal_memory", "has_generic_initiator",
)  # fmt: skip


def node_ids(host: HostFs) -> list[int]:
    """Return the ids of the nodes that exist, sorted: those with a directory.

    `possible` lists ids that may never come, and has_cpu and has_memory lie in places.
    """
    return sorted(int(m[1]) for name in host.names(BASE) if (m := _NODE.match(name)))


def probe(host: HostFs, facts: Facts) -> None:
    """Fill `numa`, the nodes' CPUs and distances, and the words of the files beside them."""
    ids = node_ids(host)
    facts.numa = bool(ids)
    for name in _FILES:
        text = host.attribute(f"{BASE}/{name}")
        if text is not None:
            facts.node_files[name] = text.strip()
    for node in ids:
        facts.node_cpus[node] = _cpus(host, node, facts)
    online = list_in(facts.node_files.get("online", ""), f"{BASE}/online", facts) or tuple(ids)
    for node in ids:
        distances = _distances(host, node, online, facts)
        if distances:
            facts.node_distances[node] = distances


def _cpus(host: HostFs, node: int, facts: Facts) -> tuple[int, ...]:
    base = f"{BASE}/node{node}"
    listed = read_list(host, f"{base}/cpulist", facts)
    mapped = read_mask(host, f"{base}/cpumap", facts)
    if listed is not None:
        facts.node_listed_by[node] = "cpulist"
        if mapped is not None and mapped != listed:
            facts.node_masks[node] = mapped
            odd = (set(mapped) ^ set(listed)) & set(facts.online or ())
            if odd:
                facts.warnings.append(
                    f"{base}: cpulist and cpumap disagree on CPU {min(odd)}, which is online"
                )
        return listed
    if mapped is not None:
        facts.node_listed_by[node] = "cpumap"
        return mapped
    linked = sorted(int(m[1]) for name in host.names(base) if (m := _CPU.match(name)))
    if linked:
        facts.node_listed_by[node] = "cpuN links"
    return tuple(linked)


def _distances(host: HostFs, node: int, online: tuple[int, ...], facts: Facts) -> dict[int, int]:
    """The kernel lists one distance for each online node, in order of id."""
    text = host.attribute(f"{BASE}/node{node}/distance")
    if text is None:
        return {}
    try:
        row = tuple(map(int, text.split()))
    except ValueError:
        row = ()
    facts.node_rows[node] = row
    if len(row) != len(online):
        facts.warnings.append(
            f"{BASE}/node{node}/distance: {text.strip()[:40]!r} for {len(online)} online nodes"
        )
        return {}
    return dict(zip(online, row, strict=True))
