"""Which NUMA domains of ours lie below a domain id of resctrl. Pure.

resctrl numbers MB and monitoring by L3 cache id, openEuler's MPAM by NUMA node; the two id
spaces differ, and neither follows the order of CPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agentd.core.topology import Topology
from corefleet.errors import Incompatible


def covered_domains(
    topology: Topology, ids: Iterable[int], *, by_node: bool
) -> Mapping[int, tuple[int, ...]]:
    """Return the usable domains below each of `ids`, none for ids that are not ours.

    `by_node`: the kernel is known to number by NUMA node. Raises Incompatible if the ids are
    neither L3 caches nor nodes of this machine.
    """
    wanted = tuple(sorted(set(ids)))
    caches = _below_caches(topology)
    if not by_node and wanted and caches.keys() >= set(wanted):
        return {key: caches[key] for key in wanted}
    # Elsewhere the ids are always caches: with sub-NUMA clusters, those of nodes fit by chance.
    nodes = {*topology.nodes, *topology.domains}
    if nodes >= set(wanted) and (by_node or topology.arch.startswith(("aarch64", "arm"))):
        return {key: (key,) if key in topology.domains else () for key in wanted}
    if len(wanted) == 1:
        return {wanted[0]: tuple(sorted(topology.domains))}
    raise Incompatible(
        f"resctrl: the domain ids {', '.join(map(str, wanted)) or '(none)'} are neither L3 caches "
        f"({', '.join(map(str, sorted(caches))) or 'no ids'}) nor NUMA nodes of this machine"
    )


def _below_caches(topology: Topology) -> dict[int, tuple[int, ...]]:
    owner = {cpu: key for key, domain in topology.domains.items() for cpu in domain.cpus}
    found: dict[int, set[int]] = {}
    for group in topology.caches:
        if group.cache is not None:
            domains = {owner[cpu] for cpu in group.cpus if cpu in owner}
            found.setdefault(group.cache, set()).update(domains)
    return {key: tuple(sorted(domains)) for key, domains in found.items()}
