"""Which CPUs of a domain are for the system, engines, workers and sandboxes. Pure.

A domain is divided by physical core, in an order that puts what houses the system first:
efficiency cores before performance cores, and cores that share a cache side by side. The
division depends on the machine and the settings, never on pools and models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentd.core.plan_parts import DomainPlan, PlanSettings
from agentd.core.topology import Domain, Topology

Core = tuple[int, ...]

_SHARED_CORES = 2
"""Domains of so many cores or fewer are not split."""
_SMALL_CORES = 8
"""Domains of fewer cores leave none to the system, and none to sandboxes alone."""
_WORKER_SHARE = 4
"""Of so many cores, one goes to workers and sandboxes when there are engines."""
_MOST_SYSTEM_SHARE = 4
"""Of so many cores, at most one goes to the system."""
_FEW_FAST_CORES = 2
"""With fewer performance cores, or fewer than one in _FAST_SHARE, kinds are not told apart:
an engine on the others would be faster than one on these alone."""
_FAST_SHARE = 4


@dataclass(slots=True, frozen=True)
class Roles:
    """Disjoint, unless `shared`; `workers` stand for what has no CPUs of its own."""

    system: tuple[int, ...]
    engines: tuple[int, ...]
    workers: tuple[int, ...]
    sandboxes: tuple[int, ...]
    shared: bool = False


@dataclass(slots=True, frozen=True)
class CpuOrder:
    """What decides which core comes before which."""

    performance: frozenset[int]
    """Empty on machines of one kind of core."""
    isolated: frozenset[int]
    caches: Mapping[int, int]
    """By CPU: the first CPU of its last-level cache group."""
    clusters: Mapping[int, int]

    def key(self, cpu: int) -> tuple[bool, bool, int, int, int]:
        """Isolated CPUs come late: what is not pinned thread by thread piles up on one."""
        return (
            cpu in self.performance,
            cpu in self.isolated,
            self.caches.get(cpu, -1),
            self.clusters.get(cpu, -1),
            cpu,
        )

    def edges(self, cpus: Sequence[int]) -> list[int]:
        """Return where `cpus`, in order, go from one cache group (or cluster) to the next."""
        groups = [self.caches.get(cpu, -1) for cpu in cpus]
        if len(set(groups)) == 1:
            groups = [self.clusters.get(cpu, -1) for cpu in cpus]
        return [at for at in range(1, len(cpus)) if groups[at] != groups[at - 1]]

    def snap(self, cpus: Sequence[int], at: int, slack: int) -> int:
        """Return the edge nearest to `at` and at most `slack` off it; without one, `at`."""
        near = [edge for edge in self.edges(cpus) if abs(edge - at) <= slack]
        return min(near, key=lambda edge: (abs(edge - at), edge), default=at)


def cpu_order(topology: Topology) -> CpuOrder:
    """Return the order for a machine."""
    fast = {c for kind in topology.kinds if kind.name == "performance" for c in kind.cpus}
    slow = {c for kind in topology.kinds if kind.name == "efficiency" for c in kind.cpus}
    return CpuOrder(
        performance=frozenset(fast if slow else ()),
        isolated=frozenset(topology.sets.isolated),
        caches={c: min(group.cpus) for group in topology.caches for c in group.cpus},
        clusters={c: min(cluster) for cluster in topology.clusters for c in cluster},
    )


def divide(
    topology: Topology,
    order: CpuOrder,
    domain: Domain,
    settings: PlanSettings,
    serves: bool,
    first: bool,
) -> Roles:
    """Divide a domain as if nothing ran; `serves`: engines may come to it."""
    cores = sorted(topology.cores(domain.cpus), key=lambda core: order.key(core[0]))
    named = [core for core in cores if not set(core).isdisjoint(settings.system_cpus)]
    rest = [core for core in cores if core not in named]
    if not rest:
        named, rest = [], cores
    if len(rest) <= _SHARED_CORES:
        everything = _flat(rest)
        return Roles(
            system=_flat(named) or everything,
            engines=_first_threads(rest) if serves else (),
            workers=everything,
            sandboxes=everything,
            shared=True,
        )
    if not settings.system_cpus:
        count = _system_cores(len(cores), settings, first)
        named, rest = rest[:count], rest[count:]
    many = _worker_cores(order, rest) if serves else len(rest)
    workers, engines = rest[:many], rest[many:]
    alone = _sandbox_cores(len(cores), len(workers), settings)
    workers, sandboxes = workers[: many - alone], workers[many - alone :]
    return Roles(
        system=_flat(named) or _flat(workers),
        engines=_first_threads(engines),
        workers=_flat(workers),
        sandboxes=_flat(sandboxes) or _flat(workers),
    )


def keep(
    topology: Topology, domain: Domain, old: DomainPlan, fresh: Roles, settings: PlanSettings
) -> Roles | None:
    """Return the roles of `old` less the CPUs that are gone, or None if that cannot be.

    A CPU that is new joins its core, and a whole new core goes where `fresh` has it.
    """
    if old.shared or bool(old.engine_cpus) != bool(fresh.engines):
        return None
    given = _old_roles(old, set(domain.cpus))
    for core in topology.cores(domain.cpus):
        roles = {given[cpu] for cpu in core if cpu in given}
        taken = [cpu for cpu in core if given.get(cpu) == "engines"]
        if len(roles) > 1 or len(taken) > 1:
            return None
        if taken:
            continue
        role = roles.pop() if roles else _role_of_new(core, old, fresh)
        given.update((cpu, role) for cpu in (core[:1] if role == "engines" else core))
    system, engines, workers, sandboxes = (
        tuple(sorted(cpu for cpu, has in given.items() if has == role))
        for role in ("system", "engines", "workers", "sandboxes")
    )
    if not workers or bool(engines) != bool(fresh.engines):
        return None
    if settings.system_cpus and fresh.system not in (fresh.workers, system):
        return None
    return Roles(system or workers, engines, workers, sandboxes or workers)


def _old_roles(old: DomainPlan, usable: set[int]) -> dict[int, str]:
    roles = {
        "system": old.system_cpus,
        "sandboxes": old.sandbox_cpus,
        "workers": old.worker_cpus,
        "engines": old.engine_cpus,
    }
    # What has none of its own has those of the workers, which come later here and win.
    return {cpu: role for role, cpus in roles.items() for cpu in cpus if cpu in usable}


def _role_of_new(core: Core, old: DomainPlan, fresh: Roles) -> str:
    """Say whose a core is of which no thread had a role."""
    if old.engine_cpus and not set(core).isdisjoint(old.cpus):
        return "engines"  # Its idle threads are left after the one at work is gone.
    if core[0] in fresh.engines:
        return "engines"
    own_sandboxes = old.sandbox_cpus != old.worker_cpus
    if core[0] in fresh.sandboxes and core[0] not in fresh.workers and own_sandboxes:
        return "sandboxes"
    own_system = old.system_cpus != old.worker_cpus
    if core[0] in fresh.system and core[0] not in fresh.workers and own_system:
        return "system"
    return "workers"


def _system_cores(cores: int, settings: PlanSettings, first: bool) -> int:
    if cores < _SMALL_CORES:
        return 0
    wanted = max(settings.system_cores_per_domain, settings.system_cores_per_node if first else 0)
    return min(wanted, cores // _MOST_SYSTEM_SHARE)


def _worker_cores(order: CpuOrder, cores: list[Core]) -> int:
    """Return how many of `cores`, from the first, engines leave to workers and sandboxes.

    An engine waits for its slowest thread, so with enough performance cores it has no others.
    """
    fast = sum(core[0] in order.performance for core in cores)
    slow = len(cores) - fast
    if slow and fast >= max(_FEW_FAST_CORES, len(cores) / _FAST_SHARE):
        return slow
    wanted = max(1, len(cores) // _WORKER_SHARE)
    return order.snap([core[0] for core in cores], wanted, wanted // 2)


def _sandbox_cores(cores: int, workers: int, settings: PlanSettings) -> int:
    if cores < _SMALL_CORES or workers < 2 or settings.sandbox_share <= 0:
        return 0
    return min(workers - 1, max(1, int(workers * settings.sandbox_share)))


def _first_threads(cores: Sequence[Core]) -> tuple[int, ...]:
    """One CPU a core: its siblings stay idle, for they would only slow it down."""
    return tuple(sorted(core[0] for core in cores))


def _flat(cores: Sequence[Core]) -> tuple[int, ...]:
    return tuple(sorted(cpu for core in cores for cpu in core))
