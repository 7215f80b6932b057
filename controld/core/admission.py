"""Which submissions are let in: size, backlog, stream space, load, and the shared rates."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from controld.core.overload import Overload
from controld.core.quota_division import Quota
from controld.core.quota_shares import QuotaShares
from corefleet.messages.records import PoolSpec

_BUSY_RETRY_S = 1.0
_FULL_RETRY_S = 5.0
_SHARE_RETRY_S = 0.4
"""A share that was asked for is there after so long: two reports there and back."""
_DEFAULT_BURST_S = 0.1
"""A rate that names no burst may use so many seconds of itself at once."""
_LEAST_DEPTH = 2.0
"""Most tokens that a small part of a quota may save beyond its part of the burst. With one,
a token that comes while one lies ready is lost, a quarter of them at even demand."""
_BATCH_BACKLOG = 0.8
"""Share of a backlog limit above which batch is refused, before online is."""
_WHOLE = 1.0 - 1e-6
"""A token, but for what sums of floats lose: a wait for the rest would be no wait at all."""


@dataclass(slots=True, frozen=True)
class Refusal:
    """Why a submission is not taken.

    `permanent`: the same submission is never taken. Else it may be tried again after
    `retry_after_s` seconds. `cause` is one word of: input, streams, backlog, overload,
    rate, tenant_rate.
    """

    reason: str
    retry_after_s: float
    permanent: bool = False
    cause: str = "rate"
    coming: bool = False
    """This controld has just asked for its share: it may well have it by then."""


@dataclass(slots=True, frozen=True)
class AdmissionSettings:
    """Limits of one controld."""

    max_input_bytes: int = 262_144
    backlog_limit: int = 100_000
    """Queued tasks of one pool in the shards that this controld owns."""
    stream_limit: float = 0.8
    """Share of a stream's bytes above which only running tasks may write (rule 5)."""


class _Bucket:
    """Tokens of one quota: what this controld has saved of its share."""

    __slots__ = ("at", "fresh", "rate", "tokens")

    def __init__(self, now: float, rate: float, tokens: float) -> None:
        self.at = now
        self.fresh = True
        """It gave nothing yet."""
        self.rate = rate
        self.tokens = tokens

    def take(self) -> None:
        """Take one of the tokens there are."""
        self.tokens -= 1.0
        self.fresh = False

    def fill(self, now: float, rate: float, quota: Quota) -> None:
        """Add what came since the last time.

        Tokens above what the share may hold are lost. A new share makes up none: it counts
        from now on, and only the lower one of the two for the time before.
        """
        depth = _LEAST_DEPTH if rate < quota.amount else 1.0
        depth = max(depth, quota.burst * rate / quota.amount) if rate > 0.0 else 0.0
        gained = (now - self.at) * min(rate, self.rate)
        self.tokens = min(depth, self.tokens + max(0.0, gained))
        self.at, self.rate = now, rate

    def wait_s(self) -> float:
        """Return 0 when there is a token, else the seconds until there is one."""
        if self.tokens >= _WHOLE:
            return 0.0
        return (1.0 - self.tokens) / self.rate if self.rate > 0.0 else _SHARE_RETRY_S


class Admission:
    """Decides for one controld of several; each spends its share of every shared rate."""

    def __init__(
        self,
        settings: AdmissionSettings | None = None,
        shares: QuotaShares | None = None,
        overload: Overload | None = None,
    ) -> None:
        self._settings = settings or AdmissionSettings()
        self.overload = overload or Overload()
        self._pools: dict[str, PoolSpec] = {}
        self._buckets: dict[str, _Bucket] = {}
        self._usage = 0.0
        self._backlog: dict[str, int] = {}
        self.shares = shares or QuotaShares("", 0.0)
        self.shares.resolve = self.quota

    def set_pools(self, pools: dict[str, PoolSpec], now: float) -> None:
        """Take all pools of the cluster; a pool that did not change keeps its tokens."""
        self._pools = dict(pools)
        rated = (pool.name for pool in pools.values() if pool.rate_per_s > 0.0)
        self.shares.set_quotas([f"rate/{name}" for name in rated], now)
        self.refresh(now)

    def set_stream_usage(self, fraction: float) -> None:
        """Set the highest share of max_bytes that any stream uses, from 0 to 1."""
        self._usage = fraction

    def set_backlog(self, pool: str, queued: int) -> None:
        """Set how many tasks of `pool` wait in our shards."""
        self._backlog[pool] = queued
        limited = (name for name, spec in self._pools.items() if spec.backlog_limit)
        self.shares.set_backlog({n: self._backlog[n] for n in limited if self._backlog.get(n)})

    def quota(self, name: str) -> Quota | None:
        """Return the quota that the pools give to `name`, None when they give none."""
        kind, _, rest = name.partition("/")
        pool, _, tenant = rest.partition("/")
        spec = self._pools.get(pool)
        if spec is None:
            return None
        if kind == "in_flight":
            limit = spec.max_in_flight
            return Quota(limit, whole=True) if limit and not tenant else None
        rate = spec.tenant_rate_per_s if tenant else spec.rate_per_s
        if kind != "rate" or rate <= 0.0:
            return None
        burst = 0.0 if tenant else float(spec.burst)
        return Quota(rate, max(1.0, burst or rate * _DEFAULT_BURST_S))

    def refresh(self, now: float) -> None:
        """Let all buckets fill with the shares that there are now; call it with each tick."""
        for name in self.shares.names():
            self._bucket(name, now)
        for name in self._buckets.keys() - self.shares.names():
            del self._buckets[name]

    def admit(self, pool: str, size: int, now: float, tenant: str = "") -> Refusal | None:
        """Return None and take a token, or why not. `size` is the input's in bytes.

        The first limit that is passed is the one that is told; a refusal costs no token.
        """
        settings = self._settings
        if size > settings.max_input_bytes:
            return Refusal(
                f"input: {size} bytes; expected at most {settings.max_input_bytes}",
                0.0,
                permanent=True,
                cause="input",
            )
        if self._usage >= settings.stream_limit:
            return Refusal(
                f"the task streams are {self._usage:.0%} full; "
                f"submissions are taken below {settings.stream_limit:.0%}",
                _FULL_RETRY_S,
                cause="streams",
            )
        spec = self._pools.get(pool)
        batch = spec is not None and spec.pool_class == "batch"
        refusal = self._long_backlog(pool, spec, batch)
        if refusal is not None:
            return refusal
        wanted = self._wanted(spec, tenant, now)
        for name, bucket in wanted:
            wait_s = bucket.wait_s()
            if wait_s > 0.0:
                return self._over(name, wait_s, bucket.fresh)
        why = self.overload.admit(batch, now)
        if why is not None:
            return Refusal(why.reason, why.retry_after_s, cause="overload")
        for _, bucket in wanted:
            bucket.take()
        return None

    def _long_backlog(self, pool: str, spec: PoolSpec | None, batch: bool) -> Refusal | None:
        part = _BATCH_BACKLOG if batch else 1.0
        queued = self._backlog.get(pool, 0)
        where, limit = "", self._settings.backlog_limit
        if queued < part * limit:
            if spec is None or not spec.backlog_limit:
                return None
            queued += self.shares.backlog(pool)
            where, limit = " in the cluster", spec.backlog_limit
            if queued < part * limit:
                return None
        whose = " of a batch pool" if batch else ""
        return Refusal(
            f"pool {pool}: {queued} tasks{whose} wait already{where}; "
            f"expected fewer than {part * limit:g}",
            _BUSY_RETRY_S,
            cause="backlog",
        )

    def _wanted(
        self, spec: PoolSpec | None, tenant: str, now: float
    ) -> tuple[tuple[str, _Bucket], ...]:
        """Count the demand, and return the buckets that must give a token each."""
        if spec is None:
            return ()
        names = []
        if spec.rate_per_s > 0.0:
            names.append(f"rate/{spec.name}")
        if tenant and spec.tenant_rate_per_s > 0.0:
            names.append(f"rate/{spec.name}/{tenant}")
        for name in names:
            self.shares.want(name, now)
        return tuple((name, self._bucket(name, now)) for name in names)

    def _bucket(self, name: str, now: float) -> _Bucket:
        quota = self.quota(name) or Quota(1.0)
        rate = self.shares.share(name, now)
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = _Bucket(now, rate, self._first_tokens(name, quota, rate))
        bucket.fill(now, rate, quota)
        return bucket

    def _first_tokens(self, name: str, quota: Quota, rate: float) -> float:
        """A controld that is alone begins full, the others empty.

        Shares of less than a token's worth begin below: else all controlds, which got them
        together, would have their tokens together, too.
        """
        if self.shares.alone():
            return quota.burst
        if rate >= quota.least:
            return 0.0
        drawn = hashlib.blake2b(f"{self.shares.me}\n{name}".encode(), digest_size=4).digest()
        return -int.from_bytes(drawn, "big") / 2**32

    def _over(self, name: str, wait_s: float, coming: bool) -> Refusal:
        _, pool, *tenants = name.split("/")
        quota = self.quota(name)
        rate = quota.amount if quota else 0.0
        if rate > 0.0:
            # A share may be small because nobody asked here: it follows this very demand.
            wait_s = min(wait_s, max(_SHARE_RETRY_S, 1.0 / rate))
        if tenants:
            return Refusal(
                f"pool {pool}: tenant {tenants[0]} is over its rate of {rate:g} "
                "submissions a second",
                wait_s,
                cause="tenant_rate",
                coming=coming,
            )
        reason = f"pool {pool}: over its rate of {rate:g} submissions a second"
        return Refusal(reason, wait_s, coming=coming)
