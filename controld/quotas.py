"""This controld's part in the shared quotas: tells and hears reports, measures its own load."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Protocol

import structlog

from controld.cluster import Cluster
from controld.core.admission import Admission
from controld.core.overload import SAMPLE_S
from controld.core.quota_shares import TICK_S
from controld.gauges import Gauges
from controld.heard import heard
from controld.registry import Registry
from corefleet.background import Background, stop
from corefleet.bus import Bus, Incoming
from corefleet.codec import encode
from corefleet.messages.records import ControldRegistration, PoolSpec
from corefleet.messages.wire import QuotaReport
from corefleet.subjects import QUOTAS

_log = structlog.get_logger(__name__)

_IN_FLIGHT = "in_flight/"


class Places(Protocol):
    """The places of pools in this controld's shards."""

    def backlog(self) -> Mapping[str, int]:
        """Return how many tasks of each pool wait for a place."""

    def in_flight(self) -> Mapping[str, int]:
        """Return how many tasks of each pool have one."""

    def set_share(self, pool: str, limit: int | None) -> None:
        """Let the pool use `limit` places here; None: as many as the shards' allotments."""


class Quotas:
    """Keeps `admission` current on pools, members, shares and load.

    `bus` is the connection for beats: a share lapses when its renewal waits behind heavy
    traffic.
    """

    def __init__(
        self,
        cluster: Cluster,
        background: Background,
        registry: Registry,
        bus: Bus,
        gauges: Gauges,
        admission: Admission,
        places: Places,
    ) -> None:
        self._clock = cluster.clock
        self._background = background
        self._registry = registry
        self._bus = bus
        self._gauges = gauges
        self._admission = admission
        self._places = places
        self._given: dict[str, int] = {}
        """Places that our shards may use, of each pool with a limit."""
        self._open = AsyncExitStack()
        self._shown: set[str] = set()

    async def start(self) -> None:
        """Join in. Raises Unavailable."""
        subscription = await self._bus.subscribe(QUOTAS, self._heard)
        self._open.push_async_callback(subscription.close)
        self._registry.pools.listen(self._pool_seen)
        self._open.callback(self._registry.pools.unlisten, self._pool_seen)
        self._registry.controlds.listen(self._member_seen)
        self._open.callback(self._registry.controlds.unlisten, self._member_seen)
        for work, name in ((self._share(), "shared quotas"), (self._watch_load(), "own load")):
            self._open.push_async_callback(stop, self._background.spawn(work, name))
        self._open.callback(self._leave)

    async def close(self) -> None:
        """Spend nothing more, and tell so. Idempotent."""
        await self._open.aclose()

    def _leave(self) -> None:
        self._bus.publish(QUOTAS, encode(self._admission.shares.leave()))

    async def _share(self) -> None:
        shares = self._admission.shares
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock.monotonic()
            limited = self._limited()
            self._want_places(limited, now)
            report = shares.tick(now)
            if report is not None:
                self._bus.publish(QUOTAS, encode(report))
            self._admission.refresh(now)
            self._give_places(limited, now)
            self._show(now)

    def _want_places(self, limited: Sequence[str], now: float) -> None:
        """Ask for as many places of each limited pool as its tasks here would use."""
        if not limited:
            return
        waiting, busy = self._places.backlog(), self._places.in_flight()
        for pool in limited:
            in_use = busy.get(pool, 0)
            self._admission.shares.set_places(
                f"{_IN_FLIGHT}{pool}", waiting.get(pool, 0) + in_use, in_use, now
            )

    def _give_places(self, limited: Sequence[str], now: float) -> None:
        """Let the shards use the places that were agreed on."""
        for pool in self._given.keys() - set(limited):
            del self._given[pool]
            self._places.set_share(pool, None)
        for pool in limited:
            share = int(self._admission.shares.share(f"{_IN_FLIGHT}{pool}", now))
            if share != self._given.get(pool):
                self._given[pool] = share
                self._places.set_share(pool, share)

    def _limited(self) -> list[str]:
        return [name for name, spec in self._registry.pools.records.items() if spec.max_in_flight]

    async def _watch_load(self) -> None:
        overload, loop = self._admission.overload, asyncio.get_running_loop()
        before = _used(loop.time())
        was = overload.state()
        while True:
            due = loop.time() + SAMPLE_S
            await asyncio.sleep(SAMPLE_S)
            lag_s = max(0.0, loop.time() - due)
            used = _used(loop.time())
            overload.sample(_share_of_cpu(before, used), lag_s, self._clock.monotonic())
            before = used
            self._gauges.shed_batch().set(1.0 - overload.batch_share)
            self._gauges.online_limit().set(overload.online_per_s or 0.0)
            state = overload.state()
            if state != was:
                _log.warning("what is let in has changed", state=state, why=overload.why())
                was = state

    def _heard(self, message: Incoming) -> None:
        report = heard(message, QuotaReport, "quota report")
        if report is None:
            return
        now = self._clock.monotonic()
        self._admission.shares.heard(report, now)
        if report.grants:
            self._admission.refresh(now)

    def _pool_seen(self, name: str, spec: PoolSpec | None, revision: int) -> None:
        self._admission.set_pools(dict(self._registry.pools.records), self._clock.monotonic())

    def _member_seen(self, name: str, found: ControldRegistration | None, revision: int) -> None:
        self._admission.shares.set_members(
            self._registry.controlds.records, self._clock.monotonic()
        )

    def _show(self, now: float) -> None:
        """Show the shares of pools; those of tenants would be too many."""
        shares = self._admission.shares
        names = {name for name in shares.names() if name.count("/") == 1}
        shown = {"rate": self._gauges.quota_rate, "in_flight": self._gauges.quota_places}
        for name in self._shown | names:
            kind, _, pool = name.partition("/")
            if kind not in shown:
                continue
            if name in names:
                shown[kind](pool).set(shares.share(name, now))
            else:
                shown[kind].forget(pool)
        self._shown = names


def _used(now: float) -> tuple[float, float, float]:
    """Return (now, CPU seconds of the event loop's thread, CPU seconds of the process)."""
    return now, time.thread_time(), time.process_time()


def _share_of_cpu(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """Return the larger of: the loop's share of its core, the process's of all its cores.

    Decisions run in one thread: when that is at its limit, idle cores do not help.
    """
    wall, loop, process = (late - early for early, late in zip(before, after, strict=True))
    cores = len(os.sched_getaffinity(0))
    return max(loop, process / cores) / max(wall, 1e-3)
