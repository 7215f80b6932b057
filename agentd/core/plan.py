"""Topology, pools and models to what runs where. Pure.

The division of a domain's CPUs depends on the machine and on whether the node serves models
at all, never on the pools (plan_cpus); engines divide theirs by models (plan_engines); memory
follows from what is offered (plan_memory). With the plan before it, a plan moves as little as
it can: `moved` says which units it moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from agentd.core.cpulist import format_list
from agentd.core.plan_cpus import CpuOrder, Roles, cpu_order, divide, keep
from agentd.core.plan_engines import share_engines
from agentd.core.plan_homes import Home, has_no_memory, homes_of
from agentd.core.plan_memory import Budget, Running, high_of, share_memory
from agentd.core.plan_parts import (
    CPU_WEIGHTS,
    MIB,
    DomainPlan,
    EngineUnit,
    Plan,
    PlanSettings,
    WorkerUnit,
)
from agentd.core.topology import Topology
from corefleet.messages.records import PoolSpec

__all__ = ["DomainPlan", "EngineUnit", "Plan", "PlanSettings", "WorkerUnit", "make_plan", "moved"]

_NOTHING = Plan(MappingProxyType({}), (), (), ())

Key = tuple[str, str, int]
"""`engine` or `worker`, its model or pool, its domain."""


def make_plan(
    topology: Topology,
    pools: Sequence[PoolSpec],
    models: Mapping[str, int] | Iterable[str],
    labels: Mapping[str, str],
    serves_models: bool,
    settings: PlanSettings | None = None,
    before: Plan | None = None,
) -> Plan:
    """Return what to run: `models` are those whose files are here and right.

    As a mapping, they come with the bytes of their files; where that is unknown, engines have
    no memory limit. `serves_models` says whether the node is configured for models at all. A
    pool whose labels the node lacks is none of its business; one whose model is missing, or
    that does not fit, is left out with a warning. `before` is the plan that runs now: units
    of it keep their CPUs and limits as far as possible, and the warnings say what changes and
    why. It may have no `domains`, when only its processes are known.
    """
    settings = settings or PlanSettings()
    sizes = _sizes(models)
    made = _Making(topology, cpu_order(topology), settings, serves_models, before or _NOTHING)
    offered = made.offered(pools, labels, sizes)
    made.divide()
    for home in homes_of(topology, made.warnings):
        made.fill(home, offered, sizes)
    plan = Plan(
        # In the topology's order, whichever home a domain is in.
        MappingProxyType({domain: made.domains[domain] for domain in topology.domains}),
        tuple(sorted(made.engines, key=lambda unit: made.place(unit.domain, unit.model))),
        tuple(sorted(made.workers, key=lambda unit: made.place(unit.domain, unit.pool.name))),
        (),
    )
    if before is not None:
        made.warnings += _changes(before, plan)
    return Plan(plan.domains, plan.engines, plan.workers, tuple(made.warnings))


def moved(before: Plan, after: Plan) -> tuple[Key, ...]:
    """Return the units that both plans have and whose CPUs differ: they must be restarted.

    Units that are new or no longer wanted are not moves, nor are changed memory limits,
    which take effect on what runs.
    """
    had, have = _cpus_by_unit(before), _cpus_by_unit(after)
    return tuple(sorted(key for key in had.keys() & have.keys() if had[key] != have[key]))


@dataclass(slots=True)
class _Making:
    """A plan as it grows."""

    topology: Topology
    order: CpuOrder
    settings: PlanSettings
    serves: bool
    before: Plan
    roles: dict[int, Roles] = field(default_factory=dict)
    domains: dict[int, DomainPlan] = field(default_factory=dict)
    engines: list[EngineUnit] = field(default_factory=list)
    workers: list[WorkerUnit] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def place(self, domain: int, name: str) -> tuple[int, str]:
        return list(self.topology.domains).index(domain), name

    def offered(
        self, pools: Sequence[PoolSpec], labels: Mapping[str, str], models: Mapping[str, int]
    ) -> list[PoolSpec]:
        """Return the pools that concern this node and have their model, by name."""
        offered = []
        for pool in sorted(pools, key=lambda pool: pool.name):
            if any(labels.get(key) != value for key, value in pool.labels.items()):
                continue
            if pool.model and pool.model not in models:
                self.warnings.append(
                    f"pool {pool.name} is not offered: model {pool.model} is not here"
                )
                continue
            offered.append(pool)
        return offered

    def divide(self) -> None:
        """Give each domain's CPUs their roles."""
        crowded = []
        strangers = set(self.settings.system_cpus)
        for number, domain in enumerate(self.topology.domains.values()):
            serves = self.serves and not has_no_memory(self.topology, domain.domain)
            roles = divide(self.topology, self.order, domain, self.settings, serves, not number)
            old = self.before.domains.get(domain.domain)
            if old is not None:
                roles = keep(self.topology, domain, old, roles, self.settings) or roles
            self.roles[domain.domain] = roles
            strangers -= set(domain.cpus)
            if roles.shared:
                self.warnings.append(
                    f"domain {domain.domain}: {len(domain.cpus)} CPUs are too few to divide: "
                    "engines, workers, sandboxes and the system share them"
                )
                if set(self.settings.system_cpus) >= set(domain.cpus):
                    self.warnings.append(
                        f"domain {domain.domain}: system_cpus leaves it no CPU: ignored there"
                    )
            elif roles.sandboxes == roles.workers and self.settings.sandbox_share > 0:
                crowded.append(domain.domain)
        if crowded:
            which = f"domain{'s' * (len(crowded) > 1)} {format_list(crowded)}"
            self.warnings.append(f"{which}: too few cores: sandboxes run on the workers' CPUs")
        if strangers:
            self.warnings.append(
                f"system_cpus: {format_list(sorted(strangers))}: not CPUs that agentd may use"
            )

    def fill(self, home: Home, pools: list[PoolSpec], models: Mapping[str, int]) -> None:
        """Place units into the domains of a home."""
        usable = [p for p in pools if not p.model or self._can_serve(home.node)]
        left_out = [pool.name for pool in pools if pool not in usable]
        if left_out:
            self.warnings.append(
                f"domain {home.node}: pools {', '.join(left_out)} are not offered: no engines here"
            )
        running = Running(
            frozenset((unit.model, unit.domain) for unit in self.before.engines),
            {(unit.pool.name, unit.domain): unit.memory_max for unit in self.before.workers},
        )
        budget = share_memory(home, usable, models, self.settings, running)
        self.warnings += budget.warnings
        for domain in home.domains:
            names = tuple(budget.engines) if domain == home.node else ()
            self._add_domain(home, domain, budget)
            self._add_engines(domain, sorted(names), budget)
            self.workers += [
                self._worker(pool, domain, budget.workers[pool.name, domain])
                for pool in budget.pools[domain]
            ]

    def _can_serve(self, node: int) -> bool:
        return node not in self.roles or bool(self.roles[node].engines)

    def _add_domain(self, home: Home, domain: int, budget: Budget) -> None:
        roles = self.roles[domain]
        self.domains[domain] = DomainPlan(
            domain=domain,
            cpus=self.topology.domains[domain].cpus,
            system_cpus=roles.system,
            engine_cpus=roles.engines,
            worker_cpus=roles.workers,
            shared=roles.shared,
            slots=MappingProxyType({pool.name: pool.slots for pool in budget.pools[domain]}),
            sandbox_cpus=roles.sandboxes,
            memory_nodes=(home.node,),
            memory_bytes=home.memory_bytes,
            system_memory_bytes=budget.system,
            model_bytes=budget.models if domain == home.node else 0,
            sandbox_memory_max=budget.sandboxes.get(domain, 0),
        )

    def _add_engines(self, domain: int, models: list[str], budget: Budget) -> None:
        cpus = self.roles[domain].engines
        old = {unit.model: unit.cpus for unit in self.before.engines if unit.domain == domain}
        if len(models) > len(cpus):
            self.warnings.append(
                f"domain {domain}: {len(models)} models share {len(cpus)} engine CPUs: "
                "expect all of them slow"
            )
        for model, part in share_engines(self.order, cpus, models, old).items():
            self.engines.append(
                EngineUnit(
                    model,
                    domain,
                    part,
                    len(self.topology.cores(part)),
                    memory_high=high_of(budget.engines[model]),
                    memory_max=budget.engines[model],
                    tasks_max=self.settings.engine_tasks_max,
                )
            )

    def _worker(self, pool: PoolSpec, domain: int, memory: int) -> WorkerUnit:
        return WorkerUnit(
            pool,
            domain,
            self.roles[domain].workers,
            pool.workers,
            pool.spares,
            memory_high=high_of(memory),
            memory_max=memory,
            tasks_max=self.settings.worker_tasks_max,
            cpu_weight=CPU_WEIGHTS[pool.pool_class],
            service_class=pool.pool_class,
            bandwidth_class=pool.pool_class,
        )


def _sizes(models: Mapping[str, int] | Iterable[str]) -> dict[str, int]:
    if isinstance(models, Mapping):
        # Names with anything else than sizes are still names.
        return {name: size if isinstance(size, int) else 0 for name, size in models.items()}
    return dict.fromkeys(models, 0)


def _cpus_by_unit(plan: Plan) -> dict[Key, tuple[int, ...]]:
    return {
        **{("engine", unit.model, unit.domain): unit.cpus for unit in plan.engines},
        **{("worker", unit.pool.name, unit.domain): unit.cpus for unit in plan.workers},
    }


def _changes(before: Plan, after: Plan) -> list[str]:
    """Return a line for each unit that moves and for each worker limit that changes."""
    had, have = _cpus_by_unit(before), _cpus_by_unit(after)
    lines = [
        f"domain {key[2]}: {key[0]} {key[1]} moves from CPUs {format_list(had[key])} to "
        f"{format_list(have[key])}: {_why(key, had, have, after)}"
        for key in moved(before, after)
    ]
    limits = {(unit.pool.name, unit.domain): unit.memory_max for unit in before.workers}
    for unit in after.workers:
        old = limits.get((unit.pool.name, unit.domain), unit.memory_max)
        if old != unit.memory_max and unit.pool.worker_memory_bytes != unit.memory_max:
            why = "others need some" if 0 < unit.memory_max < old else "there is more now"
            lines.append(
                f"domain {unit.domain}: limit of each worker of {unit.pool.name} goes from "
                f"{old // MIB} to {unit.memory_max // MIB} MiB: {why}"
            )
    return lines


def _why(
    key: Key,
    had: Mapping[Key, tuple[int, ...]],
    have: Mapping[Key, tuple[int, ...]],
    after: Plan,
) -> str:
    lost, won = set(had[key]) - set(have[key]), set(have[key]) - set(had[key])
    if gone := lost.difference(after.domains[key[2]].cpus):
        return f"CPUs {format_list(sorted(gone))} are gone"
    engines = [other for other in (*had, *have) if other[0] == key[0] == "engine"]
    for other in engines:
        if other not in had and other[2] == key[2] and lost.intersection(have[other]):
            return f"{other[1]} is new"
    for other in engines:
        if other not in have and other[2] == key[2] and won.intersection(had[other]):
            return f"{other[1]} is gone"
    return "the domain is divided anew"
