"""On which node's memory each domain lives. Pure.

A domain without memory of its own lives on the nearest node that has some, and shares it with
the domain that is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agentd.core.plan_parts import MIB
from agentd.core.topology import Topology

_BELIEVABLE_BYTES = 16 * MIB
"""A node with less holds none of our processes: taken as a machine that does not say."""
_UNKNOWN_DISTANCE = 20
"""What the kernel says of nodes whose distance firmware does not give (REMOTE_DISTANCE)."""


@dataclass(slots=True, frozen=True)
class Home:
    """A node with memory, and the domains whose processes bind to it."""

    node: int
    domains: tuple[int, ...]
    memory_bytes: int
    """Less huge pages; 0: unknown."""


def homes_of(topology: Topology, warnings: list[str]) -> list[Home]:
    """Return where each domain's memory is; a domain that has none is told of in `warnings`."""
    tenants: dict[int, list[int]] = {}
    for domain in topology.domains:
        node = _nearest_memory(topology, domain) if has_no_memory(topology, domain) else domain
        tenants.setdefault(node, []).append(domain)
        if node != domain:
            warnings.append(
                f"domain {domain}: has no memory: no engines; workers use that of node {node}"
            )
    homes = []
    for node, domains in sorted(tenants.items()):
        memory = _memory_of(topology, node)
        if 0 < memory < _BELIEVABLE_BYTES:
            warnings.append(
                f"domain {node}: {memory} bytes of memory would hold no process: "
                "taken as unknown, nothing is limited"
            )
            memory = 0
        homes.append(Home(node, tuple(domains), memory))
    return homes


def has_no_memory(topology: Topology, domain: int) -> bool:
    """Whether a domain is known to have CPUs only, while others have memory."""
    if topology.domains[domain].memory_bytes > 0 or not _nodes_with_memory(topology):
        return False
    node = topology.nodes.get(domain)
    return node is None or node.memory_bytes == 0


def _nodes_with_memory(topology: Topology) -> list[int]:
    nodes: Iterable[int] = {*topology.domains, *topology.nodes}
    return sorted(node for node in nodes if _memory_of(topology, node) > 0)


def _memory_of(topology: Topology, node: int) -> int:
    domain = topology.domains.get(node)
    known = topology.nodes.get(node)
    memory = domain.memory_bytes if domain is not None else 0
    if not memory and known is not None:
        memory = known.memory_bytes or 0
    if known is not None:
        huge = sum(pages.total * kb * 1024 for kb, pages in known.huge_pages.items())
        # More huge pages than memory is nonsense, and says nothing.
        memory -= huge if huge < memory else 0
    return memory


def _nearest_memory(topology: Topology, domain: int) -> int:
    mine = topology.domains[domain].distances
    allowed = topology.sets.allowed_nodes

    def distance(node: int) -> int:
        back = topology.nodes[node].distances if node in topology.nodes else {}
        return mine.get(node, back.get(domain, _UNKNOWN_DISTANCE))

    return min(
        _nodes_with_memory(topology),
        key=lambda node: (
            allowed is not None and node not in allowed,
            distance(node),
            node not in topology.domains,
            node,
        ),
    )
