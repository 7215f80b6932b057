"""What ownership is of: shards and racks, started and stopped by their unit's name."""

from __future__ import annotations

from zlib import crc32

from controld.cluster import Cluster
from controld.core.liveness import LivenessTimes, RackLiveness
from controld.gauges import Gauges
from controld.losses import Losses
from controld.observer import Observer
from controld.rack import RackRunner
from controld.registry import Registry
from controld.shards import Shards
from corefleet.background import Background
from corefleet.bus import Bus


class OwnedUnits:
    """Implements controld.owner.Units."""

    def __init__(
        self,
        cluster: Cluster,
        background: Background,
        registry: Registry,
        gauges: Gauges,
        beats_bus: Bus,
        observer: Observer,
        losses: Losses,
        shards: Shards,
        times: LivenessTimes,
    ) -> None:
        self._cluster = cluster
        self._background = background
        self._registry = registry
        self._gauges = gauges
        self._beats_bus = beats_bus
        self._observer = observer
        self._losses = losses
        self._shards = shards
        self._times = times
        self._racks: dict[str, RackRunner] = {}
        beats_bus.on_connection(self._connection)
        losses.decided = self._loss_decided

    def halt(self, unit: str) -> None:
        kind, _, name = unit.partition("/")
        if kind == "shard":
            self._shards.halt(int(name))
        elif name in self._racks:
            self._racks[name].halt()

    async def start_unit(self, unit: str, epoch: int, revision: int) -> None:
        kind, _, name = unit.partition("/")
        if kind == "shard":
            await self._shards.start_shard(int(name), epoch)
            return
        core = RackLiveness(
            name,
            self._cluster.controld,
            epoch,
            self._times,
            self._beats_bus.connected,
            observer_offset=crc32(unit.encode()),
        )
        runner = self._racks[name] = RackRunner(
            self._cluster,
            self._background,
            self._registry,
            self._gauges,
            self._beats_bus,
            self._observer,
            self._losses,
            core,
            name,
            revision,
        )
        await runner.start()

    async def stop_unit(self, unit: str) -> None:
        kind, _, name = unit.partition("/")
        if kind == "shard":
            await self._shards.stop_shard(int(name))
            return
        runner = self._racks.pop(name, None)
        if runner is not None:
            await runner.close()

    def _connection(self, connected: bool) -> None:
        for runner in list(self._racks.values()):
            runner.connection(connected)

    def _loss_decided(self, node: str, epoch: int, agreed: bool) -> None:
        known = self._registry.nodes.records.get(node)
        runner = self._racks.get(known.rack) if known else None
        if runner is not None:
            runner.loss_decided(node, epoch, agreed)
