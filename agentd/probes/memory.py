"""Memory of the machine and of each node, in bytes."""

from __future__ import annotations

import re

from agentd.core.topology import Facts
from agentd.hostfs import HostFs

_TOTAL = re.compile(r"MemTotal:\s+(\d+) kB")


def probe(host: HostFs, facts: Facts) -> None:
    """Fill `total_memory` and `node_memory`."""
    facts.total_memory = _total(host.read("proc/meminfo"))
    for node in facts.node_cpus:
        size = _total(host.read(f"sys/devices/system/node/node{node}/meminfo"))
        if size:
            facts.node_memory[node] = size


def _total(text: str | None) -> int:
    match = _TOTAL.search(text or "")
    return int(match[1]) * 1024 if match else 0
