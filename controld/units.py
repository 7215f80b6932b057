"""What ownership is of: shards and racks, started and stopped by their unit's name."""

from __future__ import annotations

from controld.cluster import Cluster
from controld.core.liveness import LivenessTimes, RackLiveness
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
        beats_bus: Bus,
        shards: Shards,
        times: LivenessTimes,
    ) -> None:
        self._cluster = cluster
        self._background = background
        self._registry = registry
        self._beats_bus = beats_bus
        self._shards = shards
        self._times = times
        self._racks: dict[str, RackRunner] = {}
        beats_bus.on_connection(self._connection)

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
            name, self._cluster.controld, epoch, self._times, self._beats_bus.connected
        )
        runner = self._racks[name] = RackRunner(
            self._cluster,
            self._background,
            self._registry,
            self._beats_bus,
            core,
            name,
            revision,
            self._times.probe_timeout_s,
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
