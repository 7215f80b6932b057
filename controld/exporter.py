"""Keeps those metrics current that nothing else counts: members, owners, queues, connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog
from prometheus_client import Gauge

from controld.cluster import Cluster
from controld.gauges import Gauges
from controld.registry import Registry
from corefleet.background import Background, stop
from corefleet.bus import Bus
from corefleet.metrics import Family

_log = structlog.get_logger(__name__)

EXPORT_INTERVAL_S = 1.0
OFFSET_ROUND_S = 15.0
"""Over so long the least delay of a node's beats is taken."""
_OFFSET_TOLD_S = 0.1

Own = Callable[[], tuple[int, Mapping[str, int], Mapping[str, int]]]
"""Returns shards that we decide for, tasks queued and in flight by pool."""


class Exporter:
    """Sets gauges each second while this controld serves metrics."""

    def __init__(
        self,
        cluster: Cluster,
        background: Background,
        registry: Registry,
        beats_bus: Bus,
        gauges: Gauges,
    ) -> None:
        self._cluster = cluster
        self._background = background
        self._registry = registry
        self._beats_bus = beats_bus
        self._gauges = gauges
        self._offsets_at = 0.0
        self._work: asyncio.Task[None] | None = None

    def start(self, may_act: Callable[[], bool], own: Own) -> None:
        """Begin. `may_act`: whether our lease lets us decide."""
        self._offsets_at = self._cluster.clock.monotonic()
        self._work = self._background.spawn(self._export(may_act, own), "metrics")

    async def close(self) -> None:
        """Set nothing more. Idempotent."""
        work, self._work = self._work, None
        await stop(work)

    async def _export(self, may_act: Callable[[], bool], own: Own) -> None:
        while True:
            self._gauges.may_act().set(may_act())
            self.show(own)
            await asyncio.sleep(EXPORT_INTERVAL_S)

    def show(self, own: Own) -> None:
        """Set all but `may_act` once."""
        gauges, cluster, registry = self._gauges, self._cluster, self._registry
        gauges.nats_connected("tasks").set(cluster.bus.connected)
        gauges.nats_connected("beats").set(self._beats_bus.connected)
        living = registry.controlds.records.keys()
        gauges.controlds().set(len(living))
        owned = sum(each.controld in living for each in registry.shards.records.values())
        gauges.shards_configured().set(cluster.settings.shards)
        gauges.unowned("shard").set(max(0, cluster.settings.shards - owned))
        owners = {name: each.controld for name, each in registry.racks.records.items()}
        racks = {node.rack for node in registry.nodes.records.values()}
        gauges.unowned("rack").set(sum(owners.get(rack) not in living for rack in racks))
        _, queued, in_flight = own()
        pools = dict.fromkeys(registry.pools.records, 0)
        _show_pools(gauges.queued, {**pools, **queued})
        _show_pools(gauges.in_flight, {**pools, **in_flight})
        now = cluster.clock.monotonic()
        if now - self._offsets_at >= OFFSET_ROUND_S:
            self._offsets_at = now
            self._show_offsets()

    def _show_offsets(self) -> None:
        node, offset_s = self._gauges.beat_meter.worst_offset()
        self._gauges.clock_offset_s().set(abs(offset_s))
        if abs(offset_s) >= _OFFSET_TOLD_S:
            _log.warning("clocks differ", node=node, node_behind_s=round(offset_s, 3))


def _show_pools(gauge: Family[Gauge], counts: Mapping[str, int]) -> None:
    """Set the gauge of each pool, and forget those of pools that are gone."""
    for (pool,) in gauge.known():
        if pool not in counts:
            gauge.forget(pool)
    for pool, count in counts.items():
        gauge(pool).set(count)
