"""A simulated controld: the production parts on simulated adapters, without gRPC."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import cast

from controld.api.server import ApiServer
from controld.calls import OwnerCalls
from controld.cluster import Cluster
from controld.intake import Intake
from controld.parts import Parts
from controld.peers import PeerReach
from controld.registry import Registry
from controld.settings import cluster_settings
from corefleet.background import Background
from corefleet.config import ControldConfig
from corefleet.errors import CorefleetError, IllegalTransition
from corefleet.messages.records import ClusterSettings
from corefleet.subjects import Layout
from tests.sim.etcd import SimStore
from tests.sim.loop import Process, SimClock
from tests.sim.nats import SimBus
from tests.sim.streams import SimLog
from tests.sim.surroundings import Surroundings

_LOOK_S = 0.25
"""How soon a peer's end is noticed."""


class _NoServer:
    """Stands where the gRPC server is."""

    def __init__(self, address: str) -> None:
        self._address = address

    def bind(self) -> str:
        return self._address

    async def start(self) -> None:
        """Nobody calls."""

    async def close(self, grace_s: float) -> None:
        """Nobody calls."""


class SimReach:
    """Implements controld.peers.PeerReach: peers are known by the host in their address."""

    def __init__(self, fleet: Surroundings, process: Process) -> None:
        self._fleet = fleet
        self._process = process

    async def until_gone(self, address: str) -> None:
        while self._found(address) is not None:  # noqa: ASYNC110 - a connection's end is no event here
            await asyncio.sleep(_LOOK_S)

    async def refused(self, address: str) -> bool:
        """A machine that is there refuses; across a cut nothing answers."""
        await asyncio.sleep(self._fleet.wires.delay_s())
        name = address.partition(":")[0]
        passes = self._fleet.wires.passes(self._process.name, name)
        return passes and self._found(address) is None

    def _found(self, address: str) -> Process | None:
        return self._fleet.living(address.partition(":")[0])


class SimParts(Parts):
    """The parts as production wires them, without gRPC."""

    reach: SimReach

    def _server(self) -> ApiServer:
        return cast(ApiServer, _NoServer(f"{self._cluster.controld}:7070"))

    def _reach(self) -> PeerReach:
        return cast(PeerReach, self.reach)

    @property
    def intake(self) -> Intake:
        return self._intake

    @property
    def calls(self) -> OwnerCalls:
        return self._calls


class SimControld:
    """One controld's process, from its start to its end."""

    def __init__(self, fleet: Surroundings, name: str) -> None:
        self.name = name
        self.process = Process(fleet, name, "controld")
        self.parts: SimParts | None = None
        """None while it does not serve."""
        self._fleet = fleet
        self._stop = asyncio.Event()
        self.buses = [
            SimBus(fleet.nats, self.process, which, self._bus_trouble) for which in ("bus", "beats")
        ]
        self.store = SimStore(fleet.etcd, self.process)
        self.process.run(self._live(), name)

    def stop(self) -> None:
        """End in good order."""
        self.process.deliver(self._stop.set)

    def gone(self) -> None:
        """The process is no more."""
        self.parts = None
        self.process.crash()
        self.store.gone()
        for bus in self.buses:
            bus.gone()

    async def _live(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                await self._start(stack)
                await self._stop.wait()
                self.parts = None
        except CorefleetError as error:
            # As in production the process ends, and is started again.
            self._fleet.note("exit", self.name, str(error))
        self._fleet.after(0.0, self._fleet.process_ended, self.process)

    async def _start(self, stack: AsyncExitStack) -> None:
        fleet, sizes = self._fleet, self._fleet.plan.sizes
        background = Background(self._part_failed)
        stack.push_async_callback(background.close)
        stack.push_async_callback(self.store.close)
        for bus in self.buses:
            stack.push_async_callback(bus.close)
        wanted = ClusterSettings(shards=sizes.shards, streams=sizes.streams)
        settings = await cluster_settings(self.store, wanted)
        log = SimLog(fleet.streams, self.buses[0])
        await log.ensure(settings)
        rng = fleet.rng(f"chance {self.name} {fleet.starts}")
        cluster = Cluster(
            controld=self.name,
            settings=settings,
            layout=Layout(settings.shards, settings.streams),
            bus=self.buses[0],
            log=log,
            store=self.store,
            clock=SimClock(self.process),
            chance=rng,
        )
        registry = Registry(self.store, background)
        stack.push_async_callback(registry.close)
        await registry.start()
        config = ControldConfig(id=self.name, lease_ttl_s=sizes.lease_ttl_s)
        parts = SimParts(config, cluster, background, registry, self.buses[1])
        parts.reach = SimReach(fleet, self.process)
        await parts.start(stack)
        self.parts = parts
        fleet.serves(self.name)

    def _part_failed(self, error: BaseException) -> None:
        self._fleet.failed(self.process, "a part failed", error)

    def _bus_trouble(self, error: Exception) -> None:
        if not isinstance(error, CorefleetError) or isinstance(error, IllegalTransition):
            self._fleet.failed(self.process, "a handler failed", error)
