"""Topology, pools and models to what runs where. Pure.

A domain's CPUs are split by physical core: one for the system in the first domain, then
engines, then workers. The split depends on the machine and on whether the node serves
models at all, never on the pools: a new pool moves nobody. Domains too small for a split
share their CPUs, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from agentd.core.topology import Domain, Topology
from corefleet.messages.records import PoolSpec

_SHARED_CORES = 2
"""Domains of so many cores or fewer are not split."""
_SYSTEM_FROM_CORES = 8
"""Domains of so many cores or more leave one to the system and agentd."""
_WORKER_SHARE = 4
"""Of so many cores, one goes to the workers when there are engines."""


@dataclass(slots=True, frozen=True)
class EngineUnit:
    """One engine process: a model in a domain. `threads` are physical cores."""

    model: str
    domain: int
    cpus: tuple[int, ...]
    threads: int


@dataclass(slots=True, frozen=True)
class WorkerUnit:
    """The worker processes of a pool in a domain: `workers` at work, `spares` waiting."""

    pool: PoolSpec
    domain: int
    cpus: tuple[int, ...]
    workers: int
    spares: int


@dataclass(slots=True, frozen=True)
class DomainPlan:
    """How one domain is used."""

    domain: int
    cpus: tuple[int, ...]
    system_cpus: tuple[int, ...]
    engine_cpus: tuple[int, ...]
    worker_cpus: tuple[int, ...]
    shared: bool
    """Engines and workers run on the same CPUs."""
    slots: Mapping[str, int]


@dataclass(slots=True, frozen=True)
class Plan:
    """What runs on this node."""

    domains: Mapping[int, DomainPlan]
    engines: tuple[EngineUnit, ...]
    workers: tuple[WorkerUnit, ...]
    warnings: tuple[str, ...]


def make_plan(
    topology: Topology,
    pools: Sequence[PoolSpec],
    models: Iterable[str],
    labels: Mapping[str, str],
    serves_models: bool,
) -> Plan:
    """Return what to run: `models` are those whose files are here and right.

    `serves_models` says whether the node is configured for models at all. A pool whose
    labels the node lacks is none of its business; one whose model is missing is left out
    with a warning.
    """
    known = set(models)
    warnings: list[str] = []
    offered = []
    for pool in sorted(pools, key=lambda pool: pool.name):
        if any(labels.get(key) != value for key, value in pool.labels.items()):
            continue
        if pool.model and pool.model not in known:
            warnings.append(f"pool {pool.name} is not offered: model {pool.model} is not here")
            continue
        offered.append(pool)
    engines: list[EngineUnit] = []
    workers: list[WorkerUnit] = []
    domains: dict[int, DomainPlan] = {}
    needed = sorted({pool.model for pool in offered if pool.model})
    for domain in topology.domains.values():
        split = _split(topology, domain, serves_models, first=not domains)
        if split.shared:
            warnings.append(
                f"domain {domain.domain}: {len(domain.cpus)} CPUs are too few to divide: "
                "engines, workers and the system share them"
            )
        domains[domain.domain] = DomainPlan(
            domain=domain.domain,
            cpus=domain.cpus,
            system_cpus=split.system,
            engine_cpus=split.engines,
            worker_cpus=split.workers,
            shared=split.shared,
            slots=MappingProxyType({pool.name: pool.slots for pool in offered}),
        )
        engines += _engines(topology, domain.domain, split.engines, needed, warnings)
        workers += [
            WorkerUnit(pool, domain.domain, split.workers, pool.workers, pool.spares)
            for pool in offered
        ]
    return Plan(MappingProxyType(domains), tuple(engines), tuple(workers), tuple(warnings))


@dataclass(slots=True, frozen=True)
class _Split:
    system: tuple[int, ...]
    engines: tuple[int, ...]
    workers: tuple[int, ...]
    shared: bool


def _split(topology: Topology, domain: Domain, serves_models: bool, first: bool) -> _Split:
    cores = topology.cores(domain.cpus)
    if len(cores) <= _SHARED_CORES:
        return _Split(domain.cpus, _first_threads(cores), domain.cpus, shared=True)
    system_cores = 1 if first and len(cores) >= _SYSTEM_FROM_CORES else 0
    rest = cores[system_cores:]
    worker_cores = max(1, len(rest) // _WORKER_SHARE) if serves_models else len(rest)
    workers = _flat(rest[:worker_cores])
    return _Split(
        system=_flat(cores[:system_cores]) or workers,
        engines=_first_threads(rest[worker_cores:]),
        workers=workers,
        shared=False,
    )


def _engines(
    topology: Topology,
    domain: int,
    cpus: tuple[int, ...],
    models: list[str],
    warnings: list[str],
) -> list[EngineUnit]:
    """Give each model an equal run of the engine CPUs, or all of them when too few."""
    if not models or not cpus:
        return []
    if len(cpus) < len(models):
        warnings.append(
            f"domain {domain}: {len(models)} models share {len(cpus)} engine CPUs: expect both slow"
        )
        return [EngineUnit(model, domain, cpus, len(topology.cores(cpus))) for model in models]
    units = []
    for number, model in enumerate(models):
        start, end = (len(cpus) * n // len(models) for n in (number, number + 1))
        part = cpus[start:end]
        units.append(EngineUnit(model, domain, part, len(topology.cores(part))))
    return units


def _first_threads(cores: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """One CPU a core: its siblings stay idle, for they would only slow it down."""
    return tuple(core[0] for core in cores)


def _flat(cores: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(cpu for core in cores for cpu in core))
