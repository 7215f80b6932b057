"""The parts of agentd, wired to each other: started, kept in step, and ended in order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack

import structlog

from agentd.attempts import Attempts
from agentd.beats import Beats
from agentd.control import Control
from agentd.core.cpulist import format_list
from agentd.core.node import Node
from agentd.core.node_io import (
    Draining,
    EngineUsable,
    EpochLost,
    NodeTick,
    Place,
    PlacesSet,
    Registered,
    WorkerGone,
    WorkerLeaving,
    WorkerReady,
)
from agentd.core.plan import Plan, make_plan
from agentd.core.supervision import Supervision, UnitKey
from agentd.core.topology import Topology
from agentd.engines import EngineWatch
from agentd.heartbeat.pipe import Setup, Status
from agentd.household import PlannedHousehold, places_of
from agentd.launch.protocol import Launcher
from agentd.links import WorkerLinks
from agentd.models import FoundModels
from agentd.probe_port import ProbePort
from agentd.rooms import Rooms
from agentd.supervisor import Supervisor
from corefleet.background import Background
from corefleet.bus import Bus, Log
from corefleet.clock import Clock
from corefleet.config import AgentdConfig
from corefleet.journal import Journal
from corefleet.messages.links import WorkerToAgentd
from corefleet.messages.records import DomainInfo, NodeRegistration, PoolSpec
from corefleet.messages.wire import (
    AssignAnswer,
    AssignBatch,
    DropAttempt,
    InventoryAnswer,
    InventoryQuery,
)
from corefleet.subjects import Layout

_TICK_S = 0.2
_LAST_WRITES_S = 1.0

_log = structlog.get_logger(__name__)


class Daemon:
    """One node. Made by the composition root; `start`, then `close`."""

    def __init__(
        self,
        config: AgentdConfig,
        topology: Topology,
        models: FoundModels,
        launcher: Launcher,
        rooms: Rooms,
        bus: Bus,
        log: Log,
        clock: Clock,
        background: Background,
        version: str,
    ) -> None:
        self._config = config
        self._topology = topology
        self._models = models
        self._launcher = launcher
        self._clock = clock
        self._background = background
        self._version = version
        self._started_ms = clock.wall_ms()
        self._layout: Layout | None = None
        self._plan: Plan | None = None
        self._pools: tuple[PoolSpec, ...] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._stack = AsyncExitStack()
        self.node = Node(config.node_id)
        self._links = WorkerLinks(rooms.run / "workers.sock", self, clock)
        self._attempts = Attempts(
            self.node,
            bus,
            lambda item: Journal(log, self._known_layout(), item.record, item.revision),
            self._links,
            clock,
            background,
        )
        self._engines = EngineWatch(
            config.engine.stuck_after_s, self._engine_ready, self.stuck, clock, background
        )
        self._household = PlannedHousehold(
            config.node_id, rooms, config.engine, models.paths, self._links, self._engines
        )
        self._supervision = Supervision(random.Random())
        self._supervisor = Supervisor(
            self._supervision, launcher, self._household, clock, background
        )
        self._probe = ProbePort(config.node_id, lambda: self.node.epoch)
        self._control = Control(bus, config.node_id, config.rack, self)
        self._beats = Beats(self._heartbeat_setup(), self._status, background)

    @property
    def probe_address(self) -> str:
        return self._probe.address

    def troubles(self) -> tuple[str, ...]:
        """Return one line for each process that fails again and again."""
        return self._supervisor.troubles()

    async def start(self) -> None:
        """Register, start what the pools need, and return when it is ready.

        Waits for a controld as long as it takes. Raises PortInUse, Conflict (the data
        directory is in use), InvalidInput.
        """
        push = self._stack.push_async_callback
        await self._probe.start(self._config.probe_listen)
        push(self._probe.close)
        await self._links.start()
        push(self._links.close)
        await self._beats.start()
        push(self._beats.close)
        await self._control.start()
        push(self._control.close)
        push(self._end_processes)
        # Its owner expects beats of a registered node at once.
        await self._beats.connected()
        await self._register()
        self._supervisor.on_change(self._processes_changed)
        self._tick()
        await self._supervisor.settled()
        self._beats.now()

    async def close(self) -> None:
        """Take nothing new, finish or give back what runs, end all processes. Idempotent."""
        await self._stack.aclose()

    async def _end_processes(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._attempts.feed(Draining("agentd stops"))
        self._beats.now()
        await self._supervisor.close()
        await self._attempts.settled(_LAST_WRITES_S)

    # Crew: what workers do.

    def ready(self, worker: str) -> None:
        unit = self._supervision.unit_of(worker)
        if unit is not None:
            self._supervisor.ready(worker)
            self._attempts.feed(WorkerReady(worker, Place(unit.name, unit.domain)))

    def said(self, worker: str, message: WorkerToAgentd) -> None:
        self._attempts.said(worker, message)

    def leaving(self, worker: str) -> None:
        self._attempts.feed(WorkerLeaving(worker))

    def parted(self, worker: str) -> None:
        self._attempts.feed(WorkerGone(worker, "its link ended"))
        if self._supervision.phase_of(worker) != "stopping":
            self._supervisor.stuck(worker, "its link ended")

    def stuck(self, worker: str, reason: str) -> None:
        self._supervisor.stuck(worker, reason)

    # Commands: what the control plane says.

    def assign(self, batch: AssignBatch) -> list[AssignAnswer]:
        return self._attempts.assign(batch)

    def drop(self, drop: DropAttempt) -> None:
        self._attempts.drop(drop)

    def inventory(self, query: InventoryQuery) -> InventoryAnswer:
        return self._attempts.inventory(query)

    def lost(self, epoch: int, reason: str) -> None:
        if not self.node.epoch or epoch < self.node.epoch:
            return
        _log.error("Declared lost: dropping all attempts", epoch=epoch, reason=reason)
        self._attempts.feed(EpochLost(f"node declared lost: {reason}"))
        self._beats.now()
        self._background.spawn(self._register(), "register")

    def pools(self, pools: tuple[PoolSpec, ...], revision: int) -> None:
        # By content: removing the newest pool makes the newest revision an older one.
        if self._layout is not None and pools != self._pools:
            self._pools = pools
            _log.info("Pools", pools=[pool.name for pool in pools], revision=revision)
            self._replan(pools)

    # Inside.

    async def _register(self) -> None:
        registered = await self._control.register(self._registration())
        self._layout = Layout(registered.shards, registered.streams)
        self._attempts.feed(Registered(registered.epoch))
        self._beats.now()
        _log.info("Registered", epoch=registered.epoch, pools=len(registered.pools))
        self.pools(registered.pools, registered.pools_revision)

    def _replan(self, pools: Sequence[PoolSpec]) -> None:
        before = self._plan
        plan = self._plan = make_plan(
            self._topology,
            pools,
            self._models.paths,
            self._config.labels,
            serves_models=bool(self._config.models),
        )
        known = before.warnings if before is not None else ()
        for line in plan.warnings:
            if line not in known:
                _log.warning("Plan", warning=line)
        self._attempts.feed(PlacesSet(places_of(plan)))
        self._supervisor.want(self._household.take(plan))

    def _registration(self) -> NodeRegistration:
        plan = self._plan
        return NodeRegistration(
            node=self._config.node_id,
            rack=self._config.rack,
            probe_address=self._probe.address,
            arch=self._topology.arch,
            features=self._topology.features,
            labels=self._config.labels,
            domains=tuple(
                DomainInfo(
                    domain=domain.domain,
                    cpus=format_list(domain.cpus),
                    memory_bytes=domain.memory_bytes,
                    slots=dict(plan.domains[domain.domain].slots) if plan is not None else {},
                )
                for domain in self._topology.domains.values()
            ),
            models=tuple(sorted(self._models.paths)),
            version=self._version,
            started_ms=self._started_ms,
            warnings=(
                *self._topology.warnings,
                *self._launcher.unisolated,
                *self._models.warnings,
                *(plan.warnings if plan is not None else ()),
                *self._supervisor.troubles(),
            ),
        )

    def _heartbeat_setup(self) -> Setup:
        cpus = [cpu for domain in self._topology.domains.values() for cpu in domain.cpus]
        return Setup(
            node=self._config.node_id,
            rack=self._config.rack,
            nats=self._config.nats,
            log=self._config.log,
            interval_s=self._config.beat_interval_s,
            cpus=tuple(sorted(cpus)),
        )

    def _status(self, number: int) -> Status:
        running, queued = self.node.counts()
        return Status(
            number=number,
            epoch=self.node.epoch,
            running=running,
            queued=queued,
            slots=self.node.slots(),
            slow=self.node.slow(self._clock.monotonic()),
        )

    def _engine_ready(self, instance: str) -> None:
        self._supervisor.ready(instance)

    def _processes_changed(self) -> None:
        """Offer what needs an engine only where that engine does not fail again and again."""
        for engine in self._plan.engines if self._plan is not None else ():
            usable = not self._supervisor.troubled(UnitKey("engine", engine.model, engine.domain))
            self._attempts.feed(EngineUsable(engine.model, engine.domain, usable))

    def _tick(self) -> None:
        self._attempts.feed(NodeTick())
        self._alarm = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _known_layout(self) -> Layout:
        if self._layout is None:
            raise AssertionError("an attempt was accepted before the node was registered")
        return self._layout
