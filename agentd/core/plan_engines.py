"""Which of a domain's engine CPUs each engine has. Pure.

Without a past, equal runs that end at the edges of caches where those are near. With one, an
engine keeps what it has: a new model takes what is free, else half of the largest engine's;
what a removed model leaves goes to the smallest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from agentd.core.plan_cpus import CpuOrder

_SLACK = 4
"""A run may be shorter or longer by one part in so many to end at the edge of a cache."""


def share_engines(
    order: CpuOrder,
    cpus: Iterable[int],
    models: Sequence[str],
    old: Mapping[str, tuple[int, ...]],
) -> dict[str, tuple[int, ...]]:
    """Return each model's CPUs; all of them for each when there are fewer than models.

    `old` is what engines have now, those of models that are no longer wanted too.
    """
    run = sorted(cpus, key=order.key)
    if not models or not run:
        return {}
    if len(run) < len(models):
        return dict.fromkeys(models, tuple(sorted(run)))
    usable = set(run)
    kept = {name: [cpu for cpu in run if cpu in old.get(name, ())] for name in models}
    kept = {name: mine for name, mine in kept.items() if mine}
    left = {name: usable.intersection(had) for name, had in old.items()}
    overlap = sum(map(len, left.values())) != len(set().union(*left.values()))
    if not kept or overlap:
        return _sorted(_fresh(order, run, models))
    return _sorted(_redivide(order, run, models, kept, old))


def _fresh(order: CpuOrder, run: list[int], models: Sequence[str]) -> dict[str, list[int]]:
    size = len(run) // len(models)
    ends = [
        order.snap(run, len(run) * number // len(models), size // _SLACK)
        for number in range(1, len(models))
    ]
    return {
        name: run[start:end]
        for name, start, end in zip(models, [0, *ends], [*ends, len(run)], strict=True)
    }


def _redivide(
    order: CpuOrder,
    run: list[int],
    models: Sequence[str],
    kept: dict[str, list[int]],
    old: Mapping[str, tuple[int, ...]],
) -> dict[str, list[int]]:
    usable = set(run)
    owned = {cpu for had in old.values() for cpu in had}
    strays = [cpu for cpu in run if cpu not in owned]
    # First back to who lost some: a thread of the same core may have come in its place.
    for name, mine in kept.items():
        lost = sum(cpu not in usable for cpu in old[name])
        mine += strays[:lost]
        strays = strays[lost:]
    free = [[cpu for cpu in run if cpu in had] for name, had in old.items() if name not in kept]
    free = sorted((block for block in (*free, strays) if block), key=lambda b: (len(b), b))
    for name in models:
        if name in kept:
            continue
        largest = min(kept, key=lambda other: (-len(kept[other]), other))
        fair = len(run) // len(models)
        if free and (2 * len(free[-1]) >= fair or len(kept[largest]) < 2):
            kept[name] = free.pop()
        else:
            mine = sorted(kept[largest], key=order.key)
            half = order.snap(mine, len(mine) - len(mine) // 2, len(mine) // (2 * _SLACK))
            kept[largest], kept[name] = mine[:half], mine[half:]
    for block in free:
        smallest = min(kept, key=lambda name: (len(kept[name]), _apart(order, kept[name], block)))
        kept[smallest] += block
    return {name: kept[name] for name in models}


def _apart(order: CpuOrder, mine: list[int], block: list[int]) -> tuple[bool, list[int]]:
    """Put those first that have a cache in common with `block`."""
    groups = {order.caches.get(cpu, -1) for cpu in mine}
    return groups.isdisjoint(order.caches.get(cpu, -1) for cpu in block), mine


def _sorted(shares: Mapping[str, Iterable[int]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(sorted(cpus)) for name, cpus in shares.items()}
