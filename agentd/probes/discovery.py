"""The order of the probes, the whole discovery, and the short one that repeats it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

from agentd.core.fold import Facts, domain_memory, fold, renewed_nodes
from agentd.core.topology import Overrides, Topology
from agentd.hostfs import HostFs
from agentd.probes import (
    allowed,
    caches,
    cpus,
    groups,
    kinds,
    memory,
    nodes,
    pressure,
    resctrl,
    siblings,
)

Probe = Callable[[HostFs, Facts], None]

PROBES: tuple[Probe, ...] = (
    cpus.probe,
    nodes.probe,
    siblings.probe,
    groups.probe,
    caches.probe,
    kinds.probe,
    memory.probe,
    pressure.probe,
    resctrl.probe,
    allowed.probe,
)
"""Each may use what those before it found."""


def discover(host: HostFs, overrides: Overrides) -> Topology:
    """Return the machine under `host`; the operator's overrides have the last word.

    Blocking: some thousand small files on a machine of 512 CPUs.
    """
    facts = Facts()
    for probe in PROBES:
        probe(host, facts)
    return fold(facts, overrides)


def refresh(host: HostFs, before: Topology, overrides: Overrides) -> Topology:
    """Return `before` with memory, huge pages and statistics as they are now.

    A full discovery when CPUs or nodes came or went, or when our cpuset changed.
    """
    now = Facts(systemd=before.systemd)
    cpus.probe_sets(host, now)
    allowed.probe(host, now)
    ids = nodes.node_ids(host)
    if _hardware(now) != _hardware_of(before) or ids != list(before.nodes):
        return discover(host, overrides)
    now.node_cpus = {node: before.nodes[node].listed_cpus for node in ids}
    sizes = {size for node in before.nodes.values() for size in node.huge_pages}
    memory.probe_nodes(host, now, tuple(sorted(sizes)))
    with_cpus = sum(bool(node.cpus) for node in before.nodes.values()) or 1
    return replace(
        before,
        nodes=MappingProxyType(renewed_nodes(before.nodes, now)),
        domains=MappingProxyType(
            {
                domain.domain: replace(
                    domain,
                    memory_bytes=domain_memory(
                        now.node_memory.get(domain.domain), now.total_memory, with_cpus
                    ),
                )
                for domain in before.domains.values()
            }
        ),
        cgroups=now.cgroups,
    )


def _hardware(facts: Facts) -> tuple[object, ...]:
    """What must not have changed for a refresh to be enough."""
    return (
        facts.online,
        facts.cpu_directories,
        facts.isolated,
        facts.allowed_cpus,
        facts.allowed_nodes,
    )


def _hardware_of(topology: Topology) -> tuple[object, ...]:
    sets = topology.sets
    return (
        topology.online if sets.online_from != "cpuinfo" else None,
        sets.directories,
        sets.isolated,
        sets.allowed,
        sets.allowed_nodes,
    )
