"""Rates and shares from the counts that controlds tell: `Rates.view(reply)` as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from corefleet.rpc import fleet_pb2

HOME = ("hit", "moved", "missed", "new")


class Rates:
    """Turns answers into views: rates are between a controld's answer and the one before."""

    def __init__(self) -> None:
        self._before: dict[str, fleet_pb2.ControldOverview] = {}

    def view(self, reply: fleet_pb2.OverviewReply) -> dict[str, Any]:
        """Return what `agentctl top --json` prints; its help lists the keys.

        Rates count controlds that answered now and before, in the same life; they are
        None while there is none.
        """
        told = [each for each in reply.controlds if each.answered]
        pairs = [
            (self._before[each.controld], each)
            for each in told
            if each.controld in self._before
            and self._before[each.controld].started_ms == each.started_ms
            and self._before[each.controld].at_ms < each.at_ms
        ]
        self._before.update((each.controld, each) for each in told)
        living = {each.controld for each in reply.controlds}
        for gone in self._before.keys() - living:
            del self._before[gone]
        bounds = list(reply.wait_bounds_s)
        spans = [_span_s(before, now) for before, now in pairs]
        pools = _pools(told, pairs, bounds)
        _add_places(pools, reply.nodes.pools)
        return {
            "at_ms": reply.at_ms,
            "answered_by": reply.controld,
            "interval_s": round(sum(spans) / len(spans), 3) if spans else None,
            "nodes": {
                "total": sum(reply.nodes.states.values()),
                "states": dict(sorted(reply.nodes.states.items())),
                "slots_used": reply.nodes.slots_used,
                "slots_total": reply.nodes.slots_total,
                "balance": round(reply.nodes.balance, 4),
            },
            "pools": [pools[name] for name in sorted(pools)],
            "total": _total(pools.values()),
            "controlds": {
                "living": len(living),
                "answered": len(told),
                "list": [_controld(each, pairs) for each in reply.controlds],
            },
        }


def quantile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float | None:
    """Return the value below which `share` of what is counted lies, None when nothing is.

    Linear within a bucket, as Prometheus' histogram_quantile; what is beyond all bounds
    counts as the last one. `counts` has one more bucket than `bounds`.
    """
    total = sum(counts)
    if not total:
        return None
    rank = share * total
    below = 0
    for number, bound in enumerate(bounds):
        here = counts[number]
        if here and below + here >= rank:
            start = bounds[number - 1] if number else 0.0
            return round(start + (bound - start) * (rank - below) / here, 6)
        below += here
    return bounds[-1] if bounds else None


def _span_s(before: fleet_pb2.ControldOverview, now: fleet_pb2.ControldOverview) -> float:
    return (now.at_ms - before.at_ms) / 1000


class _Sums:
    """One pool over controlds: as it stands, since they began, and a second."""

    def __init__(self) -> None:
        self.queued = 0
        self.in_flight = 0
        self.all = _Counts()
        self.lately = _Counts()
        self.rates: dict[str, float] = {}
        self.causes: dict[str, float] = {}


class _Counts:
    def __init__(self) -> None:
        self.plain = dict.fromkeys(("placed", "finished", "not_admitted"), 0)
        self.home: dict[str, int] = {}
        self.requeued: dict[str, int] = {}
        self.waits: list[int] = []

    def add(self, told: fleet_pb2.PoolCounts, sign: int = 1) -> None:
        for name in self.plain:
            self.plain[name] += sign * getattr(told, name)
        _add(self.home, told.home, sign)
        _add(self.requeued, told.requeued, sign)
        self.waits += [0] * (len(told.waits) - len(self.waits))
        for number, count in enumerate(told.waits):
            self.waits[number] += sign * count


def _add(into: dict[str, int], more: Mapping[str, int], sign: int) -> None:
    for name, count in more.items():
        into[name] = into.get(name, 0) + sign * count


def _pools(
    told: Iterable[fleet_pb2.ControldOverview],
    pairs: Sequence[tuple[fleet_pb2.ControldOverview, fleet_pb2.ControldOverview]],
    bounds: Sequence[float],
) -> dict[str, dict[str, Any]]:
    sums: dict[str, _Sums] = {}
    for controld in told:
        for counts in controld.pools:
            pool = sums.setdefault(counts.pool, _Sums())
            pool.queued += counts.queued
            pool.in_flight += counts.in_flight
            pool.all.add(counts)
    for before, now in pairs:
        span_s = _span_s(before, now)
        earlier = {counts.pool: counts for counts in before.pools}
        for counts in now.pools:
            pool, change = sums[counts.pool], _Counts()
            was = earlier.get(counts.pool, fleet_pb2.PoolCounts())
            for into in (change, pool.lately):
                into.add(counts)
                into.add(was, -1)
            _take(pool, change, span_s)
    return {name: _pool(name, pool, bounds, bool(pairs)) for name, pool in sums.items()}


def _take(pool: _Sums, change: _Counts, span_s: float) -> None:
    for name, count in change.plain.items():
        pool.rates[name] = pool.rates.get(name, 0.0) + count / span_s
    for cause, count in change.requeued.items():
        pool.causes[cause] = pool.causes.get(cause, 0.0) + count / span_s


def _pool(name: str, pool: _Sums, bounds: Sequence[float], known: bool) -> dict[str, Any]:
    def rate(what: str) -> float | None:
        return round(pool.rates.get(what, 0.0), 3) if known else None

    causes = {cause: round(each, 3) for cause, each in sorted(pool.causes.items()) if each}
    return {
        "pool": name,
        "queued": pool.queued,
        "in_flight": pool.in_flight,
        "placed_per_s": rate("placed"),
        "finished_per_s": rate("finished"),
        "not_admitted_per_s": rate("not_admitted"),
        "refused_per_s": round(pool.causes.get("refused", 0.0), 3) if known else None,
        "requeued_per_s": causes if known else None,
        "home_share": _home_share(pool.lately.home) if known else None,
        "wait_p50_s": quantile(pool.lately.waits, bounds, 0.5),
        "wait_p99_s": quantile(pool.lately.waits, bounds, 0.99),
        "since_start": {
            **pool.all.plain,
            "home": {home: pool.all.home.get(home, 0) for home in HOME},
            "home_share": _home_share(pool.all.home),
            "requeued": dict(sorted(pool.all.requeued.items())),
            "wait_p50_s": quantile(pool.all.waits, bounds, 0.5),
            "wait_p99_s": quantile(pool.all.waits, bounds, 0.99),
        },
        "nodes": 0,
        "slots_used": 0,
        "slots_total": 0,
        "balance": 0.0,
    }


def _home_share(home: Mapping[str, int]) -> float | None:
    """Return the share of placements at home, of those whose session had one."""
    with_home = sum(home.get(name, 0) for name in ("hit", "moved", "missed"))
    return round(home.get("hit", 0) / with_home, 4) if with_home else None


def _add_places(pools: dict[str, dict[str, Any]], places: Iterable[fleet_pb2.PoolPlaces]) -> None:
    for each in places:
        if each.pool not in pools:
            pools[each.pool] = _pool(each.pool, _Sums(), (), False)
        pools[each.pool].update(
            nodes=each.nodes,
            slots_used=each.slots_used,
            slots_total=each.slots_total,
            balance=round(each.balance, 4),
        )


def _total(pools: Iterable[dict[str, Any]]) -> dict[str, Any]:
    listed = list(pools)
    total: dict[str, Any] = {
        name: sum(pool[name] for pool in listed) for name in ("queued", "in_flight")
    }
    for name in ("placed_per_s", "finished_per_s", "refused_per_s"):
        known = [pool[name] for pool in listed if pool[name] is not None]
        total[name] = round(sum(known), 3) if known else None
    return total


def _controld(
    told: fleet_pb2.ControldOverview,
    pairs: Iterable[tuple[fleet_pb2.ControldOverview, fleet_pb2.ControldOverview]],
) -> dict[str, Any]:
    cpu = None
    for before, now in pairs:
        if now is told or now.controld == told.controld:
            cpu = round((now.cpu_s - before.cpu_s) / _span_s(before, now), 4)
    return {
        "controld": told.controld,
        "answered": told.answered,
        "shards": told.shards,
        "racks": told.racks,
        "loop_lag_ms": round(told.loop_lag_s * 1000, 3),
        "cpu": cpu,
    }
