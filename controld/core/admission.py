"""Which submissions are let in: size, backlog, stream space, and each pool's rate."""

from __future__ import annotations

from dataclasses import dataclass

from corefleet.messages.records import PoolSpec

_BUSY_RETRY_S = 1.0
_FULL_RETRY_S = 5.0
_DEFAULT_BURST_S = 0.1
"""A pool that names no burst may use so many seconds of its rate at once."""


@dataclass(slots=True, frozen=True)
class Refusal:
    """Why a submission is not taken.

    `permanent`: the same submission is never taken. Else it may be tried again after
    `retry_after_s` seconds.
    """

    reason: str
    retry_after_s: float
    permanent: bool = False


@dataclass(slots=True, frozen=True)
class AdmissionSettings:
    """Limits of one controld."""

    max_input_bytes: int = 262_144
    backlog_limit: int = 100_000
    """Queued tasks of one pool in the shards that this controld owns."""
    stream_limit: float = 0.8
    """Share of a stream's bytes above which only running tasks may write (rule 5)."""


class _Bucket:
    """Tokens of one pool: this controld's share of the pool's rate."""

    __slots__ = ("at", "burst", "rate", "tokens")

    def __init__(self, rate: float, burst: float) -> None:
        self.rate = rate
        self.burst = burst
        self.tokens = burst
        self.at: float | None = None

    def share(self, rate: float, burst: float) -> None:
        """Change the share; tokens above the new burst are lost, none are made up."""
        self.rate, self.burst = rate, burst
        self.tokens = min(self.tokens, burst)

    def take(self, now: float) -> float:
        """Take a token and return 0, or return the seconds until there is one."""
        if self.at is not None:
            self.tokens = min(self.burst, self.tokens + (now - self.at) * self.rate)
        self.at = now
        if self.tokens >= 1.0:
            self.tokens -= 1.0
            return 0.0
        return (1.0 - self.tokens) / self.rate


class Admission:
    """Decides for one controld of several; each spends its share of every pool's rate."""

    def __init__(self, settings: AdmissionSettings | None = None) -> None:
        self._settings = settings or AdmissionSettings()
        self._pools: dict[str, PoolSpec] = {}
        self._buckets: dict[str, _Bucket] = {}
        self._members = 1
        self._usage = 0.0
        self._backlog: dict[str, int] = {}

    def set_pools(self, pools: dict[str, PoolSpec]) -> None:
        """Take all pools of the cluster; a pool that did not change keeps its tokens."""
        self._pools = dict(pools)
        self._share()

    def set_members(self, n: int) -> None:
        """Set how many controlds share the rates; fewer than one counts as one."""
        self._members = max(1, n)
        self._share()

    def set_stream_usage(self, fraction: float) -> None:
        """Set the highest share of max_bytes that any stream uses, from 0 to 1."""
        self._usage = fraction

    def set_backlog(self, pool: str, queued: int) -> None:
        """Set how many tasks of `pool` wait in our shards."""
        self._backlog[pool] = queued

    def admit(self, pool: str, size: int, now: float) -> Refusal | None:
        """Return None and take a token, or why not. `size` is the input's in bytes."""
        settings = self._settings
        if size > settings.max_input_bytes:
            return Refusal(
                f"input: {size} bytes; expected at most {settings.max_input_bytes}",
                0.0,
                permanent=True,
            )
        if self._usage >= settings.stream_limit:
            return Refusal(
                f"the task streams are {self._usage:.0%} full; "
                f"submissions are taken below {settings.stream_limit:.0%}",
                _FULL_RETRY_S,
            )
        queued = self._backlog.get(pool, 0)
        if queued >= settings.backlog_limit:
            return Refusal(
                f"pool {pool}: {queued} tasks wait already; expected fewer than "
                f"{settings.backlog_limit}",
                _BUSY_RETRY_S,
            )
        bucket = self._buckets.get(pool)
        if bucket is None:
            return None
        wait_s = bucket.take(now)
        if wait_s == 0.0:
            return None
        rate = self._pools[pool].rate_per_s
        return Refusal(f"pool {pool}: over its rate of {rate:g} submissions a second", wait_s)

    def _share(self) -> None:
        buckets: dict[str, _Bucket] = {}
        for name, spec in self._pools.items():
            if spec.rate_per_s <= 0.0:
                continue
            rate = spec.rate_per_s / self._members
            burst = (spec.burst or spec.rate_per_s * _DEFAULT_BURST_S) / self._members
            burst = max(1.0, burst)
            bucket = self._buckets.get(name)
            if bucket is None:
                bucket = _Bucket(rate, burst)
            else:
                bucket.share(rate, burst)
            buckets[name] = bucket
        self._buckets = buckets
