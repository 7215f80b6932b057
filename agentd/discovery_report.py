"""What discovery found, for people and for programs."""

from __future__ import annotations

import msgspec

from agentd.core.cpulist import format_list
from agentd.core.topology import Topology


def as_json(topology: Topology) -> str:
    """Return one JSON object; CPUs are lists of numbers, keys of objects are ids."""
    report = {
        "arch": topology.arch,
        "numa": topology.numa,
        "possible": topology.possible,
        "online": topology.online,
        "domains": {
            str(domain.domain): {
                "cpus": domain.cpus,
                "cores": topology.cores(domain.cpus),
                "memory_bytes": domain.memory_bytes,
                "distances": {str(node): value for node, value in domain.distances.items()},
            }
            for domain in topology.domains.values()
        },
        "features": topology.features,
        "warnings": topology.warnings,
    }
    return msgspec.json.format(msgspec.json.encode(report)).decode()


def as_text(topology: Topology) -> str:
    """Return a few lines: one for the machine, one for each domain and each warning."""
    arch = topology.arch or "unknown architecture"
    online = format_list(topology.online)
    lines = [f"{arch}, {len(topology.online)} CPUs online ({online})"]
    if not topology.numa:
        lines.append("no NUMA nodes: the whole machine is domain 0")
    for domain in topology.domains.values():
        cores = topology.cores(domain.cpus)
        widest = max(map(len, cores))
        threads = f"{widest} threads each" if widest > 1 else "one thread each"
        lines.append(
            f"domain {domain.domain}: CPUs {format_list(domain.cpus)}, {len(cores)} cores of "
            f"{threads}, {domain.memory_bytes / 2**30:.1f} GiB"
        )
        if len(domain.distances) > 1:
            far = ", ".join(f"{node}: {value}" for node, value in domain.distances.items())
            lines.append(f"  distance to domain {far}")
    levels = [name for name in topology.features if name.startswith("x86-64-v")]
    if levels:
        lines.append(f"instruction set: {levels[-1]}")
    lines += [f"warning: {warning}" for warning in topology.warnings]
    return "\n".join(lines)
