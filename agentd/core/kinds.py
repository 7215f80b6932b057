"""Makes of cores: performance and efficiency. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agentd.core.topology import CoreKind

_SAME_KIND_SHARE = 0.8
"""Cores of at least this share of the fastest one's capacity count as its kind."""


def core_kinds(
    online: tuple[int, ...],
    capacities: Mapping[int, int],
    midrs: Mapping[int, str],
    parts: Mapping[int, str],
    efficient: Iterable[int],
) -> tuple[CoreKind, ...]:
    """Return one `uniform` kind, or performance kinds before efficiency kinds.

    A core's make is its MIDR or part, not its capacity: cores of one make clock
    differently. Capacity decides only where nothing else tells cores apart.
    """
    if not any(cpu in midrs or cpu in parts for cpu in online):
        slow = _much_slower(online, capacities)
        makes = {cpu: "slow" if cpu in slow else "fast" for cpu in online}
        lesser = slow
    else:
        makes = {cpu: midrs.get(cpu) or parts.get(cpu, "") for cpu in online}
        lesser = set(efficient)
    groups: dict[str, list[int]] = {}
    for cpu in online:
        groups.setdefault(makes[cpu], []).append(cpu)
    if len(groups) <= 1:
        cpus = next(iter(groups.values()), [])
        return (CoreKind("uniform", tuple(cpus), _most(cpus, capacities), _midr(cpus, midrs)),)
    ordered = sorted(
        groups.values(), key=lambda g: (g[0] in lesser, -(_most(g, capacities) or 0), g[0])
    )
    return tuple(
        CoreKind(
            "efficiency" if number else "performance",
            tuple(cpus),
            _most(cpus, capacities),
            _midr(cpus, midrs),
        )
        for number, cpus in enumerate(ordered)
    )


def _much_slower(online: tuple[int, ...], capacities: Mapping[int, int]) -> set[int]:
    fastest = max((capacities.get(cpu, 0) for cpu in online), default=0)
    return {cpu for cpu in online if 0 < capacities.get(cpu, 0) < _SAME_KIND_SHARE * fastest}


def _most(cpus: Iterable[int], capacities: Mapping[int, int]) -> int | None:
    return max((capacities[cpu] for cpu in cpus if cpu in capacities), default=None)


def _midr(cpus: list[int], midrs: Mapping[int, str]) -> str:
    return midrs.get(cpus[0], "") if cpus else ""
