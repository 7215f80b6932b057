"""How much memory each process of a domain may have. Pure.

Of a node's memory the system keeps a part; then come models with their engines, then
sandboxes, then workers. What runs already comes before what is new, then names decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentd.core.plan_homes import Home
from agentd.core.plan_parts import MIB, PlanSettings
from corefleet.messages.records import PoolSpec

_MOST_SYSTEM_SHARE = 4
"""At most one part in so many goes to the system, that small machines still run."""
_MOST_ROUNDS = 8
"""Each adds something or is the last."""
_ENGINE_BASE_BYTES = 512 * MIB
_ENGINE_MODEL_SHARE = 4
_SANDBOX_TIGHT_SHARE = 4
"""Where little is left after the engines, sandboxes get one part in so many of it."""
_STARVED_SHARE = 2
"""A kept limit is raised when it is less than one part in so many of the fair one."""
_HIGH_SHARE = 16
"""Throttling begins one part in so many below the limit."""
Place = tuple[str, int]
"""A pool or model, and a domain."""


@dataclass(slots=True, frozen=True)
class Running:
    """What the plan before had: `workers` are limits of one process, 0 for none."""

    engines: frozenset[Place] = frozenset()
    workers: Mapping[Place, int] = field(default_factory=dict)


@dataclass(slots=True)
class Budget:
    """What fits into one home. Limits in bytes, 0 is none."""

    system: int = 0
    engines: dict[str, int] = field(default_factory=dict)
    """By model: `memory_max` of its engine. They are in the home's own domain."""
    models: int = 0
    pools: dict[int, list[PoolSpec]] = field(default_factory=dict)
    """By domain: those that are offered."""
    workers: dict[Place, int] = field(default_factory=dict)
    """`memory_max` of one process."""
    sandboxes: dict[int, int] = field(default_factory=dict)
    """By domain."""
    refused: dict[Place, str] = field(default_factory=dict)
    """Pools that do not fit into a domain, and why."""
    warnings: list[str] = field(default_factory=list)


def engine_memory(model_bytes: int, settings: PlanSettings) -> int:
    """Return what an engine needs beside its model: 512 MiB and a quarter of the model.

    A rule of thumb that covers models with grouped-query attention at 16k cells: their KV cache
    grows with depth and width as weights do, their compute buffers with batch and vocabulary.
    """
    return settings.engine_memory_bytes or (_ENGINE_BASE_BYTES + model_bytes // _ENGINE_MODEL_SHARE)


def high_of(memory_max: int) -> int:
    """Return the `memory_high` that goes with a `memory_max`."""
    return memory_max - memory_max // _HIGH_SHARE


def share_memory(
    home: Home,
    pools: Sequence[PoolSpec],
    models: Mapping[str, int],
    settings: PlanSettings,
    running: Running,
) -> Budget:
    """Return what of `pools` and their models fits into a home; `models` are sizes, 0 unknown."""
    budget = _fit(home, pools, models, settings, running)
    for _ in range(_MOST_ROUNDS):
        # What gave way to a model that then did not fit either may have room now.
        settled = Running(frozenset((model, home.node) for model in budget.engines), budget.workers)
        again = _fit(home, pools, models, settings, settled)
        if (again.engines, again.workers) == (budget.engines, budget.workers):
            break
        budget = again
    return budget


def _fit(
    home: Home,
    pools: Sequence[PoolSpec],
    models: Mapping[str, int],
    settings: PlanSettings,
    running: Running,
) -> Budget:
    """Share memory without engines whose pools do not fit."""
    refused: dict[Place, str] = {}
    while True:
        budget = _share(home, pools, models, settings, running)
        used = {pool.model for pool in budget.pools.get(home.node, ())}
        idle = [model for model in budget.engines if model not in used]
        if not idle:
            break
        # No engine whose pools do not fit; without it, others may have room.
        out = max(idle, key=lambda model: ((model, home.node) not in running.engines, model))
        refused |= {
            place: why
            for place, why in budget.refused.items()
            if any(pool.name == place[0] and pool.model == out for pool in pools)
        }
        pools = [pool for pool in pools if pool.model != out]
    budget.refused = {**refused, **budget.refused}
    budget.warnings += [
        f"pool {name} is not offered in domain {domain}: {why}"
        for (name, domain), why in sorted(budget.refused.items())
    ]
    budget.models = sum(models.get(name, 0) for name in budget.engines)
    return budget


def _share(
    home: Home,
    pools: Sequence[PoolSpec],
    models: Mapping[str, int],
    settings: PlanSettings,
    running: Running,
) -> Budget:
    budget = Budget(pools={domain: [] for domain in home.domains})
    if not home.memory_bytes:
        for domain in home.domains:
            budget.pools[domain] = [p for p in pools if not p.model or domain == home.node]
            budget.workers.update(
                {(pool.name, domain): pool.worker_memory_bytes for pool in budget.pools[domain]}
            )
        needed = {pool.model for pool in pools if pool.model} if home.node in home.domains else ()
        budget.engines = dict.fromkeys(sorted(needed), 0)
        return budget
    wanted = max(
        settings.system_memory_floor_bytes, int(home.memory_bytes * settings.system_memory_share)
    )
    budget.system = min(wanted, home.memory_bytes // _MOST_SYSTEM_SHARE)
    left = _engines(home, pools, models, settings, running, budget)
    sandboxes = min(
        int((home.memory_bytes - budget.system) * settings.sandbox_memory_share),
        left // _SANDBOX_TIGHT_SHARE,
    )
    each = _whole(sandboxes // len(home.domains))
    budget.sandboxes = dict.fromkeys(home.domains, each)
    left -= each * len(home.domains)
    _workers(
        home, left, _admit(home, left, pools, settings, running, budget), settings, running, budget
    )
    return budget


def _engines(
    home: Home,
    pools: Sequence[PoolSpec],
    models: Mapping[str, int],
    settings: PlanSettings,
    running: Running,
    budget: Budget,
) -> int:
    """Admit models that fit beside a worker and all that run; return the bytes left."""
    left = home.memory_bytes - budget.system
    if home.node not in home.domains:
        return left
    floor = settings.worker_memory_floor_bytes
    at_work = sum(
        _processes(pool) * (pool.worker_memory_bytes or floor)
        for pool in pools
        for domain in home.domains
        if (pool.name, domain) in running.workers
    )
    needed = {pool.model for pool in pools if pool.model}
    for model in sorted(needed, key=lambda name: ((name, home.node) not in running.engines, name)):
        size = models.get(model, 0)
        allowance = engine_memory(size, settings)
        then_left = left - size - allowance
        least = floor if (model, home.node) in running.engines else floor + at_work
        if then_left - then_left // _SANDBOX_TIGHT_SHARE < least:
            budget.warnings.append(
                f"domain {home.node}: model {model} is not served here: it needs "
                f"{_mib(size + allowance)} with its engine, {_mib(left)} are left"
            )
            continue
        left = then_left
        if size:
            budget.engines[model] = allowance if settings.model_replicas else size + allowance
        else:
            budget.engines[model] = 0
            budget.warnings.append(
                f"domain {home.node}: the size of model {model} is not known: "
                "its engine has no memory limit"
            )
    return left


def _admit(
    home: Home,
    left: int,
    pools: Sequence[PoolSpec],
    settings: PlanSettings,
    running: Running,
    budget: Budget,
) -> list[tuple[PoolSpec, int]]:
    """Return the pools that fit, each with its domain, in the order of their names."""
    floor = settings.worker_memory_floor_bytes
    admitted = []
    claims = [(pool, domain) for pool in pools for domain in home.domains]
    claims.sort(key=lambda c: ((c[0].name, c[1]) not in running.workers, c[0].name, c[1]))
    for pool, domain in claims:
        if pool.model and (domain != home.node or pool.model not in budget.engines):
            budget.refused[pool.name, domain] = (
                "no engine can be there"
                if domain != home.node
                else f"model {pool.model} is not served there"
            )
            continue
        need = _processes(pool) * (pool.worker_memory_bytes or floor)
        if need > left:
            budget.refused[pool.name, domain] = (
                f"its {_processes(pool)} workers need {_mib(need)} at least, {_mib(left)} are left"
            )
            continue
        left -= need
        admitted.append((pool, domain))
    return sorted(admitted, key=lambda claim: (claim[0].name, claim[1]))


def _workers(
    home: Home,
    left: int,
    admitted: list[tuple[PoolSpec, int]],
    settings: PlanSettings,
    running: Running,
    budget: Budget,
) -> None:
    """Give workers what their pool says, else equal shares; kept limits stay if they fit."""
    open_claims = []
    for pool, domain in admitted:
        budget.pools[domain].append(pool)
        budget.workers[pool.name, domain] = pool.worker_memory_bytes
        if pool.worker_memory_bytes:
            left -= pool.worker_memory_bytes * _processes(pool)
        else:
            open_claims.append((pool, domain))
    if not open_claims:
        return
    count = sum(_processes(pool) for pool, _ in open_claims)
    fair = min(settings.worker_memory_bytes, left // count)
    # Floors need not be whole, so rounding down must not go below one.
    fair = max(_whole(fair), min(fair, settings.worker_memory_floor_bytes))
    limits = {}
    for pool, domain in open_claims:
        had = running.workers.get((pool.name, domain), 0)
        limits[pool.name, domain] = had if had * _STARVED_SHARE >= fair else fair
    total = sum(limits[pool.name, domain] * _processes(pool) for pool, domain in open_claims)
    if total > left:
        limits = {place: min(limit, fair) for place, limit in limits.items()}
    budget.workers.update(limits)


def _processes(pool: PoolSpec) -> int:
    return pool.workers + pool.spares


def _whole(size: int) -> int:
    return size // MIB * MIB


def _mib(size: int) -> str:
    return f"{size // MIB} MiB"
