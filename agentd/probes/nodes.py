"""NUMA nodes: their CPUs, and distances by node id."""

from __future__ import annotations

import re

from agentd.core.topology import Facts
from agentd.hostfs import HostFs
from agentd.probes.lists import list_in, read_list

_BASE = "sys/devices/system/node"
_NODE = re.compile(r"node(\d+)\Z")


def probe(host: HostFs, facts: Facts) -> None:
    """Fill `numa`, `node_cpus` and `node_distances`."""
    ids = sorted(int(m[1]) for name in host.names(_BASE) if (m := _NODE.match(name)))
    facts.numa = bool(ids)
    for node in ids:
        facts.node_cpus[node] = _cpus(host, node, facts)
    online = read_list(host, f"{_BASE}/online", facts) or tuple(ids)
    for node in ids:
        distances = _distances(host, node, online, facts)
        if distances:
            facts.node_distances[node] = distances


def _cpus(host: HostFs, node: int, facts: Facts) -> tuple[int, ...]:
    path = f"{_BASE}/node{node}/cpulist"
    text = host.read(path)
    if text is not None:
        return list_in(text, path, facts) or ()
    mask = (host.read(f"{_BASE}/node{node}/cpumap") or "").strip().replace(",", "")
    try:
        bits = int(mask or "0", 16)
    except ValueError:
        facts.warnings.append(f"{_BASE}/node{node}/cpumap: {mask[:40]!r} is no mask")
        return ()
    return tuple(cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1)


def _distances(host: HostFs, node: int, online: tuple[int, ...], facts: Facts) -> dict[int, int]:
    """The kernel lists one distance for each online node, in order of id."""
    text = host.read(f"{_BASE}/node{node}/distance")
    if text is None:
        return {}
    values = text.split()
    if len(values) != len(online) or not all(value.isdecimal() for value in values):
        facts.warnings.append(
            f"{_BASE}/node{node}/distance: {text.strip()[:40]!r} for {len(online)} online nodes"
        )
        return {}
    return dict(zip(online, map(int, values), strict=True))
