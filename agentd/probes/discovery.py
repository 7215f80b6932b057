"""The order of the probes, and the whole discovery."""

from __future__ import annotations

from collections.abc import Callable

from agentd.core.topology import Facts, Overrides, Topology, fold
from agentd.hostfs import HostFs
from agentd.probes import allowed, cpus, features, memory, nodes, siblings

Probe = Callable[[HostFs, Facts], None]

PROBES: tuple[Probe, ...] = (
    cpus.probe,
    nodes.probe,
    siblings.probe,
    memory.probe,
    features.probe,
    allowed.probe,
)


def discover(host: HostFs, overrides: Overrides) -> Topology:
    """Return the machine under `host`; the operator's overrides have the last word."""
    facts = Facts()
    for probe in PROBES:
        probe(host, facts)
    return fold(facts, overrides)
