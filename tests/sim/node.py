"""A simulated node: agentd's core, attempts, control and journal, with scripted workers.

What stands in for agentd's Daemon does the same with them, without processes to start: its
workers are ready some time after the node was registered.
"""

from __future__ import annotations

import asyncio

from agentd.attempts import Attempts
from agentd.control import Control
from agentd.core.node import Node
from agentd.core.node_io import (
    Draining,
    EpochLost,
    NodeTick,
    Place,
    PlaceSpec,
    PlacesSet,
    Registered,
    WorkerGone,
    WorkerReady,
)
from agentd.heartbeat.beat import Heart
from agentd.heartbeat.pipe import Setup, Status
from agentd.probe_port import ProbePort
from corefleet.background import Background
from corefleet.codec import encode
from corefleet.config import LogConfig, NatsConfig
from corefleet.errors import CorefleetError, IllegalTransition, InvalidInput
from corefleet.journal import Journal
from corefleet.messages.links import Frame
from corefleet.messages.records import DomainInfo, NodeRegistration, PoolSpec
from corefleet.messages.wire import (
    AssignAnswer,
    AssignBatch,
    Assignment,
    DropAttempt,
    InventoryAnswer,
    InventoryQuery,
    YieldAttempt,
)
from corefleet.subjects import Layout, beat
from tests.sim.agent import SimWorker
from tests.sim.loop import Process, SimClock
from tests.sim.nats import SimBus
from tests.sim.plan import rack_of
from tests.sim.streams import SimLog
from tests.sim.surroundings import Surroundings
from tests.sim.wires import drawn

BEAT_S = 0.2
STATUS_S = 0.1
TICK_S = 0.2
WORKER_S = (0.05, 0.4)
"""How long a worker takes to be ready."""
LAST_WRITES_S = 1.0


class SimNode:
    """One start of agentd on a node, with its heartbeat program."""

    def __init__(self, fleet: Surroundings, name: str) -> None:
        self.name = name
        self.rack = rack_of(name)
        self.process = Process(fleet, name, "node")
        self.heart_frozen = False
        self._fleet = fleet
        self._rng = fleet.rng(f"node {name} {fleet.starts}")
        self._clock = SimClock(self.process)
        self.bus = SimBus(fleet.nats, self.process, "bus", self._bus_trouble)
        self.beats_bus = SimBus(fleet.nats, self.process, "beats", self._bus_trouble)
        self._layout: Layout | None = None
        self._background = Background(lambda error: fleet.failed(self.process, "a part", error))
        self._workers: dict[str, SimWorker] = {}
        self._worker_number = 0
        self._numbers = 0
        self._started_ms = self._clock.wall_ms()
        log = SimLog(fleet.streams, self.bus)
        self.node = Node(name)
        self.attempts = Attempts(
            self.node,
            self.bus,
            lambda item: self._journal(log, item),
            self,
            self._clock,
            self._background,
        )
        self._control = Control(self.bus, name, self.rack, self)
        self._probe = ProbePort(name, lambda: self.node.epoch)
        setup = Setup(name, self.rack, NatsConfig(), LogConfig(), BEAT_S, ())
        self._heart = Heart(setup, Status(number=0), self._clock.monotonic())
        self.process.run(self._start(), name)
        fleet.after(drawn(self._rng, 0.0, BEAT_S), self._beat)

    # Faults.

    def stop(self) -> None:
        """End in good order."""
        self.process.deliver(lambda: self._spawn(self._stop(), "stop"))

    def gone(self) -> None:
        """agentd and all that ends with it are no more."""
        self.process.crash()
        self.bus.gone()
        self.beats_bus.gone()

    def kill_worker(self) -> None:
        """The oldest worker dies; another one takes its place."""
        self.process.deliver(self._worker_dies)

    # Senders: the way to the workers.

    def send(self, worker: str, frame: Frame) -> bool:
        found = self._workers.get(worker)
        if found is None:
            return False
        asyncio.get_running_loop().call_soon(found.take, frame)
        return True

    # Commands: what the control plane says, as agentd.daemon takes it.

    def assign(self, batch: AssignBatch) -> list[AssignAnswer]:
        return self.attempts.assign(batch)

    def drop(self, drop: DropAttempt) -> None:
        self.attempts.drop(drop)

    def yield_back(self, asked: YieldAttempt) -> None:
        self.attempts.yield_back(asked)

    def inventory(self, query: InventoryQuery) -> InventoryAnswer:
        return self.attempts.inventory(query)

    def lost(self, epoch: int, reason: str) -> None:
        if not self.node.epoch or epoch < self.node.epoch:
            return
        self.attempts.feed(EpochLost(f"node declared lost: {reason}"))
        self._tell_heart()
        self._spawn(self._register(), "register")

    def pools(self, pools: tuple[PoolSpec, ...], revision: int) -> None:
        places = {
            Place(pool.name, 0): PlaceSpec(pool.slots, 1, pool.progress_timeout_s) for pool in pools
        }
        self.attempts.feed(PlacesSet(places))
        for place in places:
            if not any(worker.startswith(f"{place.pool}-") for worker in self._workers):
                self._start_worker(place)

    # Inside.

    async def _start(self) -> None:
        await self._probe.start(f"{self.name}:0")
        await self._control.start()
        await self._register()
        self._tick()
        self._status()

    async def _stop(self) -> None:
        self.attempts.feed(Draining("agentd stops"))
        for worker in self._workers.values():
            worker.die()
        await self.attempts.settled(LAST_WRITES_S)
        await self._control.close()
        await self._probe.close()
        self._fleet.after(0.0, self._fleet.process_ended, self.process)

    async def _register(self) -> None:
        registration = NodeRegistration(
            node=self.name,
            rack=self.rack,
            probe_address=self._probe.address,
            domains=(DomainInfo(domain=0, cpus="0-3"),),
            started_ms=self._started_ms,
        )
        registered = await self._control.register(registration)
        self._layout = Layout(registered.shards, registered.streams)
        self.attempts.feed(Registered(registered.epoch))
        self._tell_heart()
        self._fleet.note("registered", self.name, registered.epoch)
        self.pools(registered.pools, registered.pools_revision)

    def _journal(self, log: SimLog, item: Assignment) -> Journal:
        if self._layout is None:
            raise AssertionError("an attempt was accepted before the node was registered")
        return Journal(log, self._layout, item.record, item.revision)

    def _start_worker(self, place: Place) -> None:
        self._worker_number += 1
        name = f"{place.pool}-{self._worker_number}"
        self._workers[name] = SimWorker(name, self.name, self._said, self._fleet.wrong)
        asyncio.get_running_loop().call_later(
            drawn(self._rng, *WORKER_S), self._worker_ready, name, place
        )

    def _worker_ready(self, name: str, place: Place) -> None:
        if name in self._workers:
            self.attempts.feed(WorkerReady(name, place))

    def _worker_dies(self) -> None:
        if self._workers:
            name = next(iter(self._workers))
            self._workers.pop(name).die()
            self.attempts.feed(WorkerGone(name, "killed"))
            self._start_worker(Place(name.rpartition("-")[0], 0))

    def _said(self, worker: str, frame: Frame) -> None:
        if worker in self._workers:
            asyncio.get_running_loop().call_soon(self._hear, worker, frame)

    def _hear(self, worker: str, frame: Frame) -> None:
        if worker in self._workers:
            self.attempts.said(worker, frame)  # type: ignore[arg-type]

    def _tick(self) -> None:
        self.attempts.feed(NodeTick())
        asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _status(self) -> None:
        self._tell_heart()
        asyncio.get_running_loop().call_later(STATUS_S, self._status)

    def _tell_heart(self) -> None:
        self._numbers += 1
        running, queued = self.node.counts()
        now = self._clock.monotonic()
        self._heart.hear(
            Status(
                number=self._numbers,
                epoch=self.node.epoch,
                running=running,
                queued=queued,
                slots=self.node.slots(),
                slow=self.node.slow(now),
            ),
            now,
        )

    def _beat(self) -> None:
        """The heartbeat program: it goes on while agentd's loop stands still."""
        if not self.process.alive:
            return
        self._fleet.after(BEAT_S, self._beat)
        if self.heart_frozen:
            return
        made = self._heart.beat(self._clock.monotonic(), self._clock.wall_ms())
        if made is not None:
            self.beats_bus.publish(beat(self.rack, self.name), encode(made))

    def _spawn(self, work: asyncio._CoroutineLike[None], name: str) -> None:
        self._background.spawn(work, name)  # type: ignore[arg-type]

    def _bus_trouble(self, error: Exception) -> None:
        defect = not isinstance(error, CorefleetError) or isinstance(error, IllegalTransition)
        if defect or isinstance(error, InvalidInput):
            self._fleet.failed(self.process, "a handler failed", error)
