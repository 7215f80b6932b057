"""All shards that this controld owns, and the one picture of the fleet that they share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack

from controld.assigner import Assigner
from controld.cluster import Cluster
from controld.core.batch_places import BatchPlaces
from controld.core.drains import NodeDrain
from controld.core.fleet import Fleet, FleetDelta
from controld.core.limits import Limits
from controld.core.loss_gate import LossGate
from controld.core.shard import ShardCore
from controld.core.shard_io import (
    AttemptStuck,
    Event,
    FleetChanged,
    LimitOpened,
    NodeDraining,
    NodeGone,
    NodeResumed,
    PoolsSet,
    Tick,
)
from controld.gauges import Gauges
from controld.heard import heard
from controld.registry import Registry
from controld.runner import ShardRunner, Surroundings
from corefleet.background import Background, stop
from corefleet.bus import Incoming
from corefleet.ids import shard_of_task
from corefleet.messages.records import LostNode, NodeRegistration, PoolSpec
from corefleet.messages.wire import RackDigest, Verdict
from corefleet.subjects import DIGESTS, VERDICTS

_TICK_S = 0.05

_BREAKS = 3
_BREAKS_WITHIN_S = 60.0
_BREAK_PAUSE_S = 30.0
"""A shard whose core was wrong so often within that time rests for so long: records that no
core can bear would break the next owner's just the same."""


class Shards:
    """Keeps the fleet current and the owned shards ticking."""

    def __init__(
        self,
        cluster: Cluster,
        background: Background,
        registry: Registry,
        gauges: Gauges,
        fleet: Fleet,
        gate: LossGate,
    ) -> None:
        self._cluster = cluster
        self._background = background
        self._registry = registry
        self._gauges = gauges
        self._fleet = fleet
        self._gate = gate
        self._limits = Limits(cluster.settings.shards)
        self._batch = BatchPlaces()
        self._runners: dict[int, ShardRunner] = {}
        self._breaks: dict[int, list[float]] = {}
        self._assigner = Assigner(cluster, background, gauges)
        self._open = AsyncExitStack()
        self._settling = False
        self._pools_changed = False
        self._drains: Mapping[str, NodeDrain] = {}
        self.may_act: Callable[[], bool] = lambda: True
        self.superseded: Callable[[int, int], None] = lambda shard, epoch: None

    async def start(self) -> None:
        """Begin to hear of nodes and pools."""
        self._registry.pools.listen(self._pool_seen)
        self._registry.nodes.listen(self._node_seen)
        self._registry.lost.listen(self._lost_seen)
        self._set_pools()
        for subject, handler in ((DIGESTS, self._digest), (VERDICTS, self._verdict)):
            subscription = await self._cluster.bus.subscribe(subject, handler)
            self._open.push_async_callback(subscription.close)
        ticking = self._background.spawn(self._tick(), "shard ticks")
        self._open.push_async_callback(stop, ticking)

    async def close(self) -> None:
        """Stop hearing; shards must have been stopped. Idempotent."""
        await self._open.aclose()

    async def start_shard(self, shard: int, epoch: int) -> None:
        """Take a shard into motion."""
        await self._start(shard, epoch, anew=False)

    async def _start(self, shard: int, epoch: int, anew: bool) -> None:
        core = ShardCore(
            shard,
            self._cluster.controld,
            epoch,
            self._fleet,
            self._cluster.chance,
            limits=self._limits,
            batch=self._batch,
        )
        surroundings = Surroundings(
            cluster=self._cluster,
            background=self._background,
            assigner=self._assigner,
            gauges=self._gauges,
            may_act=lambda: self.may_act(),
            handled=self._settle_soon,
            superseded=lambda number, newer: self.superseded(number, newer),
            broken=self._broken,
        )
        runner = ShardRunner(surroundings, core, shard, epoch, anew)
        self._runners[shard] = runner
        runner.handle(PoolsSet(dict(self._registry.pools.records)))
        for node, drain in self._drains.items():
            runner.handle(NodeDraining(node, drain.reason, drain.deadline_ms))
        await runner.start()

    def _broken(self, shard: int) -> None:
        now = self._cluster.clock.monotonic()
        breaks = [at for at in self._breaks.get(shard, []) if now - at < _BREAKS_WITHIN_S]
        self._breaks[shard] = [*breaks, now]
        pause_s = _BREAK_PAUSE_S if len(breaks) + 1 >= _BREAKS else 0.0
        broken = self._runners.get(shard)
        if broken is not None:
            self._background.spawn(self._rebuild(broken, pause_s), f"rebuild shard {shard}")
        self._settle_soon()

    async def _rebuild(self, broken: ShardRunner, pause_s: float) -> None:
        """Begin again from the shard's records, with a fresh core, if the shard is still ours."""
        shard = broken.shard
        await broken.close()
        await asyncio.sleep(pause_s)
        if self._runners.get(shard) is broken:
            await self._start(shard, broken.epoch, anew=True)

    def halt(self, shard: int) -> None:
        """Decide nothing more for a shard."""
        runner = self._runners.get(shard)
        if runner is not None:
            runner.halt()
            self._settle_soon()

    async def stop_shard(self, shard: int) -> None:
        """Return when nothing of the shard moves any more. Idempotent."""
        runner = self._runners.pop(shard, None)
        if runner is not None:
            await runner.close()
            self._settle_soon()

    def backlog(self) -> dict[str, int]:
        """Return how many tasks of each pool are queued in our shards."""
        total: dict[str, int] = {}
        for runner in self._runners.values():
            for pool, queued in runner.core.backlog().items():
                total[pool] = total.get(pool, 0) + queued
        return total

    def in_flight(self) -> dict[str, int]:
        """Return how many tasks of each pool have a place, in our shards."""
        return self._limits.in_flight()

    def live(self) -> int:
        """Return the number of shards that we decide for."""
        return sum(runner.live for runner in self._runners.values())

    def set_share(self, pool: str, limit: int | None, tenant: str = "") -> None:
        """Let our shards use `limit` places of a pool's or a tenant's limit (Limits.set_share)."""
        self._limits.set_share(pool, limit, tenant)
        self._settle_soon()

    def set_drains(self, standing: Mapping[str, NodeDrain]) -> None:
        """Have these nodes emptied, and no others; planned ones are given nothing from now on."""
        before, self._drains = self._drains, standing
        self._apply(self._fleet.set_drains(self._registry.drains.records))
        for node in before.keys() - standing.keys():
            self._feed_all(NodeDraining(node, on=False))
        for node, drain in standing.items():
            if before.get(node) != drain:
                self._feed_all(NodeDraining(node, drain.reason, drain.deadline_ms))

    def _feed_all(self, event: Event) -> None:
        for runner in list(self._runners.values()):
            runner.handle(event)

    def _feed(self, shard: int, event: Event) -> None:
        runner = self._runners.get(shard)
        if runner is not None:
            runner.handle(event)

    def _apply(self, delta: FleetDelta) -> None:
        for gone in delta.gone:
            self._feed_all(NodeGone(gone.node, gone.node_epoch, gone.reason))
        for node in delta.resumed:
            self._feed_all(NodeResumed(node))
        for stuck in delta.stuck:
            runner = self._runners.get(shard_of_task(stuck.task))
            if runner is not None:
                runner.handle(AttemptStuck(stuck.task, stuck.attempt, stuck.age_s))
        if delta.capacity:
            self._feed_all(FleetChanged())
        self._settle_soon()

    def _settle_soon(self) -> None:
        if not self._settling:
            self._settling = True
            asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        """Let those go on that wait for room in the fleet, in the fleet's own order."""
        try:
            while woken := self._fleet.woken():
                for shard in woken:
                    self._feed(shard, FleetChanged())
            while opened := self._limits.woken():
                for shard, pool, tenant in opened:
                    self._feed(shard, LimitOpened(pool, tenant))
        finally:
            self._settling = False

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + _TICK_S
        while True:
            await asyncio.sleep(max(0.0, due - loop.time()))
            late_s = max(0.0, loop.time() - due)
            self._gauges.loop_lag_s().set(late_s)
            self._gauges.timer_late_s().observe(late_s)
            due = loop.time() + _TICK_S
            self._gauges.shards().set(self.live())
            self._apply(self._fleet.tick(self._cluster.clock.monotonic()))
            self._feed_all(Tick())

    def _digest(self, message: Incoming) -> None:
        digest = heard(message, RackDigest, "digest")
        if digest is None:
            return
        self._apply(self._gate.digest(digest, self._cluster.clock.monotonic()))

    def _verdict(self, message: Incoming) -> None:
        verdict = heard(message, Verdict, "verdict")
        if verdict is None:
            return
        self._apply(self._gate.verdict(verdict, self._cluster.clock.monotonic()))

    def _pool_seen(self, name: str, spec: PoolSpec | None, revision: int) -> None:
        if not self._pools_changed:
            self._pools_changed = True
            asyncio.get_running_loop().call_soon(self._set_pools)

    def _set_pools(self) -> None:
        self._pools_changed = False
        pools = dict(self._registry.pools.records)
        delta = self._fleet.set_pools(pools)
        self._limits.set_pools(pools)
        self._feed_all(PoolsSet(pools))
        self._apply(delta)

    def _node_seen(self, name: str, found: NodeRegistration | None, revision: int) -> None:
        now = self._cluster.clock.monotonic()
        if found is None:
            self._apply(self._gate.removed(name, now))
        else:
            self._apply(self._gate.registered(found, now))

    def _lost_seen(self, name: str, found: LostNode | None, revision: int) -> None:
        if found is not None:
            self._apply(self._gate.lost(found, self._cluster.clock.monotonic()))
