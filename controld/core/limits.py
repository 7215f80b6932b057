"""How many attempts may have a place at once: of each pool, and of each tenant in a pool.

A limit holds over the whole cluster. Every shard has an allotment of it, the same
whoever owns the shard, and a controld may use the sum over its shards: no two
controlds need to talk for the limit to be kept. `set_share` replaces that sum by what
controlds agreed on otherwise: a limit smaller than the number of shards leaves some
controlds without a place until they do.

Counted is what keeps its session busy, from the decision to place it until the write
that requeues or ends it is durable; so the records alone give the same counts.
"""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

from corefleet.messages.records import PoolSpec


class Opened(NamedTuple):
    """`shard` may try again; `tenant` is '' when the pool's own limit was in its way."""

    shard: int
    pool: str
    tenant: str


class _Limit:
    """One limit with what counts against it and the shards that stand in line for it."""

    __slots__ = ("count", "granted", "share", "waiting")

    def __init__(self) -> None:
        self.count = 0
        self.share: int | None = None
        """What this controld may use; None when there is no limit."""
        self.waiting: dict[int, None] = {}
        self.granted: set[int] = set()

    @property
    def free(self) -> bool:
        return self.share is None or self.count < self.share

    def may_take(self, shard: int) -> bool:
        """Whether there is room for `shard`, and nobody stands in line before it."""
        if self.share is None:
            return True
        if self.count >= self.share:
            return False
        waiting = self.waiting
        return not waiting or shard in self.granted or next(iter(waiting)) == shard

    def taken_by(self, shard: int) -> None:
        self.count += 1
        if self.waiting or self.granted:
            self.waiting.pop(shard, None)
            self.granted.discard(shard)


class Limits:
    """The limits of all pools, for the shards of one controld out of `shards`."""

    def __init__(self, shards: int = 1) -> None:
        self._shards = shards
        self._owned: set[int] = set()
        self._specs: dict[str, PoolSpec] = {}
        self._limited: set[str] = set()
        self._limits: dict[tuple[str, str], _Limit] = {}
        """By pool and tenant; the pool's own has no tenant."""
        self._given: dict[tuple[str, str], int] = {}
        self._wake: set[tuple[str, str]] = set()

    # What is allowed.

    def set_pools(self, pools: dict[str, PoolSpec]) -> None:
        """Take the limits of all pools, at any time."""
        self._specs = dict(pools)
        self._limited = {
            name
            for name, spec in pools.items()
            if spec.max_in_flight or spec.max_in_flight_per_tenant
        }
        self._share_out()

    def set_share(self, pool: str, limit: int | None, tenant: str = "") -> None:
        """Let this controld use `limit` places of a limit; None: its shards' allotments.

        Whoever calls it answers for the sum over all controlds. Without a limit of
        the pool it has no effect.
        """
        if limit is None:
            self._given.pop((pool, tenant), None)
        else:
            self._given[pool, tenant] = limit
        self._share_out()

    def own(self, shard: int) -> None:
        """The shard is ours: its allotments are too."""
        if shard not in self._owned:
            self._owned.add(shard)
            self._share_out()

    def disown(self, shard: int) -> None:
        """The shard is no longer ours; what it counted was given back by `left`."""
        if shard in self._owned:
            self._owned.discard(shard)
            for limit in self._limits.values():
                limit.waiting.pop(shard, None)
                limit.granted.discard(shard)
            self._share_out()

    # What is in use.

    def took(self, shard: int, pool: str, tenant: str) -> None:
        """Count an attempt of `shard`; never refused, for records may say that it is there."""
        self._limit(pool, "").taken_by(shard)
        if tenant:
            self._limit(pool, tenant).taken_by(shard)

    def left(self, pool: str, tenant: str) -> None:
        """An attempt is over, or goes on under another owner."""
        self._leave(pool, "")
        if tenant:
            self._leave(pool, tenant)

    def in_flight(self) -> dict[str, int]:
        """Return how many attempts of each pool have a place, limited or not."""
        return {
            pool: limit.count
            for (pool, tenant), limit in self._limits.items()
            if limit.count and not tenant
        }

    def held_by(self, shard: int, pool: str, tenant: str) -> str:
        """Return what keeps an attempt of `shard` from a place now: `pool`, `tenant`, or ''.

        If anything, `shard` stands in line for it, and `woken` will name it.
        """
        if pool not in self._limited:
            return ""
        if not self._may_take(shard, pool, ""):
            return "pool"
        if tenant and not self._may_take(shard, pool, tenant):
            return "tenant"
        return ""

    def reason(self, pool: str, tenant: str) -> str:
        """Say which limit leaves no room, '' when there is some."""
        if pool not in self._limited:
            return ""
        spec = self._specs[pool]
        of_pool = self._limit(pool, "")
        if not of_pool.free:
            return (
                f"pool {pool} has max_in_flight {spec.max_in_flight}: {of_pool.count} of this "
                f"controld's share of {of_pool.share} are in flight"
            )
        if tenant:
            of_tenant = self._limits.get((pool, tenant))
            if of_tenant is not None and not of_tenant.free:
                return (
                    f"tenant {tenant} has max_in_flight_per_tenant "
                    f"{spec.max_in_flight_per_tenant} in pool {pool}: {of_tenant.count} of this "
                    f"controld's share of {of_tenant.share} are in flight"
                )
        return ""

    def share(self, pool: str, tenant: str = "") -> int | None:
        """Return how many places this controld may use; None without a limit."""
        return self._share_of(pool, tenant)

    def woken(self) -> list[Opened]:
        """Return whose turn it is, one a limit: each must be told. Ask until empty."""
        opened = []
        for key in tuple(self._wake):
            limit = self._limits.get(key)
            if limit is None or not limit.free or not limit.waiting:
                self._wake.discard(key)
                continue
            shard = next(iter(limit.waiting))
            del limit.waiting[shard]
            limit.granted.add(shard)
            opened.append(Opened(shard, *key))
        return opened

    def counts(self) -> dict[tuple[str, str], int]:
        """Return what is in flight by pool and tenant; the pool's own sum has no tenant."""
        return {key: limit.count for key, limit in self._limits.items() if limit.count}

    # Inside.

    def _may_take(self, shard: int, pool: str, tenant: str) -> bool:
        limit = self._limits.get((pool, tenant))
        if limit is None:
            # Nothing is kept of tenants that have nothing in flight and wait for nothing.
            if self._share_of(pool, tenant) != 0:
                return True
            limit = self._limit(pool, tenant)
        if limit.may_take(shard):
            return True
        limit.waiting.setdefault(shard)
        if limit.free:
            self._wake.add((pool, tenant))
        return False

    def _leave(self, pool: str, tenant: str) -> None:
        limit = self._limit(pool, tenant)
        limit.count -= 1
        if limit.waiting:
            self._wake.add((pool, tenant))
        elif tenant and not limit.count and not limit.granted:
            # Tenants come and go.
            del self._limits[pool, tenant]

    def _limit(self, pool: str, tenant: str) -> _Limit:
        limit = self._limits.get((pool, tenant))
        if limit is None:
            limit = self._limits[pool, tenant] = _Limit()
            limit.share = self._share_of(pool, tenant)
        return limit

    def _share_of(self, pool: str, tenant: str) -> int | None:
        spec = self._specs.get(pool)
        if spec is None:
            return None
        most = spec.max_in_flight_per_tenant if tenant else spec.max_in_flight
        if not most:
            return None
        given = self._given.get((pool, tenant))
        if given is not None:
            return given
        if len(self._owned) >= self._shards:
            return most
        salt = f"{pool}/{tenant}"
        return sum(allotment(most, self._shards, shard, salt) for shard in self._owned)

    def _share_out(self) -> None:
        for key, limit in self._limits.items():
            limit.share = self._share_of(*key)
            if limit.waiting:
                self._wake.add(key)


def allotment(limit: int, shards: int, shard: int, salt: str) -> int:
    """Return the part of `limit` that belongs to `shard`: over all shards the sum is `limit`.

    Any two shards' parts differ by at most 1. `salt` spreads what small limits give over
    the shards.
    """
    place = (shard + crc32(salt.encode())) % shards
    return (place + 1) * limit // shards - place * limit // shards
