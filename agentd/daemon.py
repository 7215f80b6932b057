"""The parts of agentd, wired to each other: started, kept in step, and ended in order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from agentd import standing
from agentd.adoption import GATHER_S, Adoption
from agentd.attempts import Attempts
from agentd.beats import Beats
from agentd.control import Control
from agentd.core.cpulist import format_list
from agentd.core.health_samples import HealthVerdict
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
from agentd.filler.run import FILLER_KIND
from agentd.health import HealthWatch
from agentd.heartbeat.pipe import Setup, Status
from agentd.hostfs import HostFs
from agentd.household import PlannedHousehold, places_of
from agentd.isolation import Isolation
from agentd.launch.protocol import Launcher
from agentd.links import WorkerLinks
from agentd.models import FoundModels
from agentd.probe_port import ProbePort
from agentd.probes import refresh
from agentd.replicas import ModelReplicas
from agentd.requirements import unmet
from agentd.rooms import Rooms
from agentd.settings import overrides_of, plan_settings
from agentd.supervisor import Supervisor
from agentd.watchdog import Watchdog
from corefleet.background import Background, stop
from corefleet.bus import Bus, Log
from corefleet.clock import Clock
from corefleet.config import AgentdConfig
from corefleet.errors import Incompatible
from corefleet.journal import Journal
from corefleet.messages.links import WorkerToAgentd
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
from corefleet.notify import Notifier
from corefleet.subjects import Layout

_TICK_S = 0.2
_LAST_WRITES_S = 1.0
RESTART_GRACE_S = 30.0
"""What agentd asks for when it ends and its processes go on: the time of an upgrade."""
RENEW_S = 10.0
"""How often to look whether what was registered still holds."""
ORPHAN_S = 600.0
"""Workers that outlive agentd end by themselves after so long without one."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True, frozen=True)
class Surroundings:
    """What a node is made on."""

    config: AgentdConfig
    topology: Topology
    models: FoundModels
    files: ModelReplicas
    launcher: Launcher
    rooms: Rooms
    host: HostFs
    notifier: Notifier
    version: str


class Daemon:
    """One node. Made by the composition root; `start`, then `close`."""

    def __init__(
        self, here: Surroundings, bus: Bus, log: Log, clock: Clock, background: Background
    ) -> None:
        config = here.config
        self._here = here
        self._config = config
        self._topology = here.topology
        self._launcher = here.launcher
        self._clock = clock
        self._background = background
        self._started_ms = clock.wall_ms()
        self._layout: Layout | None = None
        self._plan: Plan | None = None
        self._pools: tuple[PoolSpec, ...] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._stack = AsyncExitStack()
        self._resumes = 0
        """Epoch of the earlier agentd whose processes are adopted, 0 for none."""
        self._restart_grace_s = 0.0
        self._leaving = False
        self._told: NodeRegistration | None = None
        self.node = Node(config.node_id)
        self._links = WorkerLinks(here.rooms.run / "workers.sock", self, clock)
        self._attempts = Attempts(
            self.node,
            bus,
            lambda item: Journal(log, self._known_layout(), item.record, item.revision),
            self._links,
            clock,
            background,
        )
        self._adoption = Adoption(self._attempts.feed)
        self._make_processes()
        self._probe = ProbePort(config.node_id, lambda: self.node.epoch)
        self._control = Control(bus, config.node_id, config.rack, self)
        socket = Path(config.heartbeat_socket) if config.heartbeat_socket else None
        self._beats = Beats(self._heartbeat_setup(), self._status, background, socket)
        self._watchdog = Watchdog(here.notifier, lambda: self._beats.sent)
        self.health = HealthWatch(
            here.host,
            {"data_dir": Path(config.data_dir), "run_dir": here.rooms.run},
            clock,
            background,
            _tell_unwell,
            beats=lambda: (self._beats.sent, config.beat_interval_s),
        )
        self.isolation = Isolation(here, self._supervisor, self._look_again, clock, background)

    def _make_processes(self) -> None:
        here, config = self._here, self._config
        self._engines = EngineWatch(
            config.engine.stuck_after_s,
            self._engine_ready,
            self.stuck,
            self._clock,
            self._background,
        )
        self._household = PlannedHousehold(
            config.node_id,
            here.rooms,
            config.engine,
            here.files,
            self._links,
            self._engines,
            orphan_s=ORPHAN_S if here.launcher.outlives else 0.0,
        )
        self._supervision = Supervision(random.Random())
        self._supervisor = Supervisor(
            self._supervision, here.launcher, self._household, self._clock, self._background
        )

    @property
    def probe_address(self) -> str:
        return self._probe.address

    @property
    def supervisor(self) -> Supervisor:
        return self._supervisor

    @property
    def beats_sent(self) -> int:
        return self._beats.sent

    async def start(self) -> None:
        """Register, start what the pools need, and return when it is ready.

        Waits for a controld as long as it takes. Raises PortInUse, Conflict (the data
        directory is in use), InvalidInput.
        """
        push = self._stack.push_async_callback
        await self._probe.start(self._config.probe_listen)
        push(self._probe.close)
        await self.isolation.prepare()
        self._check_requirements()
        await self._adopt()
        await self._links.start()
        push(self._links.close)
        self._watchdog.start()
        self._stack.callback(self._watchdog.close)
        await self._beats.start()
        push(self._beats.close)
        await self._control.start()
        push(self._control.close)
        push(self._end_processes)
        # Its owner expects beats of a registered node at once.
        await self._beats.connected()
        missing = await self._links.gathered(GATHER_S)
        if missing:
            _log.warning("Workers did not come back", workers=missing)
        await self._register()
        self._supervisor.on_change(self._processes_changed)
        self._tick()
        await self.isolation.start()
        push(self.isolation.close)
        self.health.start()
        push(self.health.close)
        push(stop, self._background.spawn(self._keep_registered(), "registration"))
        if not self._launcher.outlives:
            await self._supervisor.settled()
        self._beats.now()
        self._watchdog.expect()

    def _check_requirements(self) -> None:
        """Raise Incompatible when the node is not isolated as its configuration demands."""
        here = self._here
        missing = unmet(
            self._config.require,
            self._topology,
            here.launcher.outlives,
            here.launcher.unisolated,
            self.isolation.bandwidth.kind,
        )
        if missing:
            raise Incompatible("; ".join(missing))

    async def _adopt(self) -> None:
        """Take over what an earlier agentd of this boot left running."""
        processes = await self._launcher.adopt()
        fillers = tuple(p for p in processes if p.spec.kind == FILLER_KIND)
        await self._here.files.start(fillers)
        self._supervisor.adopt([p for p in processes if p not in fillers])
        if self._launcher.outlives:
            directory, node = self._here.rooms.kept, self._config.node_id
            self._resumes = await asyncio.to_thread(standing.load, directory, node, self._here.host)
            _log.info("Adopted", processes=len(processes), epoch=self._resumes)

    async def close(self) -> None:
        """Take nothing new, finish or give back what runs, end all processes. Idempotent.

        Processes that outlive agentd are left to the next one, with what they run.
        """
        self._here.notifier.stopping("ending")
        await self._stack.aclose()

    async def _end_processes(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if self._launcher.outlives:
            self._leaving = True
            self._restart_grace_s = RESTART_GRACE_S
            self._supervisor.leave()
        else:
            self._attempts.feed(Draining("agentd stops"))
        self._beats.now()
        if not self._launcher.outlives:
            await self._supervisor.close()
        await self._attempts.settled(_LAST_WRITES_S)

    # Crew: what workers do.

    def ready(self, worker: str) -> None:
        if self._adoption.is_back(worker):
            return
        unit = self._supervision.unit_of(worker)
        if unit is not None:
            self._supervisor.ready(worker)
            self._attempts.feed(WorkerReady(worker, Place(unit.name, unit.domain)))

    def came_back(self, worker: str, held: tuple[Assignment, ...]) -> None:
        self.ready(worker)
        self._adoption.came_back(worker, held)

    def said(self, worker: str, message: WorkerToAgentd) -> None:
        self._attempts.said(worker, message)

    def leaving(self, worker: str) -> None:
        self._attempts.feed(WorkerLeaving(worker))

    def parted(self, worker: str) -> None:
        if self._leaving:
            return
        self._attempts.feed(WorkerGone(worker, "its link ended"))
        if self._supervision.phase_of(worker) != "stopping":
            self._supervisor.parted(worker, "its link ended")

    def stuck(self, worker: str, reason: str) -> None:
        self._supervisor.stuck(worker, reason)

    # Commands: what the control plane says.

    def assign(self, batch: AssignBatch) -> list[AssignAnswer]:
        return self._attempts.assign(batch)

    def drop(self, drop: DropAttempt) -> None:
        self._attempts.drop(drop)

    def yield_back(self, asked: YieldAttempt) -> None:
        self._attempts.yield_back(asked)

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
        resumes, self._resumes = self._resumes, 0
        self._told = self._registration()
        asked = msgspec.structs.replace(self._told, epoch=resumes)
        registered = await self._control.register(asked)
        self._layout = Layout(registered.shards, registered.streams)
        self._attempts.feed(Registered(registered.epoch))
        self._adoption.registered()
        self._here.notifier.ready(f"registered at epoch {registered.epoch}")
        self._beats.now()
        _log.info("Registered", epoch=registered.epoch, pools=len(registered.pools))
        self.pools(registered.pools, registered.pools_revision)
        await self._keep_standing(registered.epoch)

    async def _keep_standing(self, epoch: int) -> None:
        """Let the next agentd know the epoch that it may resume."""
        if self._launcher.outlives:
            directory, node = self._here.rooms.kept, self._config.node_id
            await asyncio.to_thread(standing.save, directory, node, epoch, self._here.host)

    async def _keep_registered(self) -> None:
        """Register again, at the same epoch, when what was told has changed."""
        while True:
            await asyncio.sleep(RENEW_S)
            epoch, said = self.node.epoch, self._registration()
            if not epoch or said == self._told:
                continue
            self._told = said
            renewed = await self._control.register(msgspec.structs.replace(said, epoch=epoch))
            if renewed.epoch != epoch and self.node.epoch == epoch:
                self._attempts.feed(EpochLost("the node had been declared lost"))
                self._attempts.feed(Registered(renewed.epoch))
                await self._keep_standing(renewed.epoch)

    def _replan(self, pools: Sequence[PoolSpec]) -> None:
        before = self._plan
        plan = self._plan = make_plan(
            self._topology,
            pools,
            self._here.models.sizes,
            self._config.labels,
            serves_models=bool(self._config.models),
            settings=plan_settings(self._config.plan, not self._here.files.unisolated),
            before=before,
        )
        known = before.warnings if before is not None else ()
        for line in plan.warnings:
            if line not in known:
                _log.warning("Plan", warning=line)
        self._attempts.feed(PlacesSet(places_of(plan)))
        self.isolation.planned(plan)
        self._supervisor.want(self._household.take(plan))

    async def _look_again(self) -> None:
        """Plan anew when CPUs came or went."""
        before = self._topology
        found = await asyncio.to_thread(
            refresh, self._here.host, before, overrides_of(self._config)
        )
        cpus = {domain: known.cpus for domain, known in found.domains.items()}
        if cpus == {domain: known.cpus for domain, known in before.domains.items()}:
            return
        if not cpus:
            _log.error("No CPU may be used any more: the plan stays as it was")
            return
        _log.warning("CPUs have changed", online=format_list(found.online))
        self._topology = found
        if self._pools is not None:
            self._replan(self._pools)

    def _registration(self) -> NodeRegistration:
        plan, health = self._plan, self.health.latest
        return NodeRegistration(
            node=self._config.node_id,
            rack=self._config.rack,
            probe_address=self._config.probe_advertise or self._probe.address,
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
            models=tuple(sorted(self._here.models.paths)),
            version=self._here.version,
            started_ms=self._started_ms,
            warnings=(
                *self._topology.warnings,
                *self._launcher.unisolated,
                *self._here.models.warnings,
                *self._here.files.unisolated,
                *(plan.warnings if plan is not None else ()),
                *self._supervisor.troubles(),
                *(health.unwell if health is not None else ()),
            ),
            isolation=(*self.isolation.lines(), *self._replica_lines()),
            draining=health is not None and health.should_drain,
            draining_reason=_why_draining(health),
        )

    def _replica_lines(self) -> tuple[str, ...]:
        return tuple(
            f"model {state.model} in domain {state.domain}: {state.state}"
            f"{f': {state.why}' if state.why else ''}"
            for state in self._here.files.states()
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
            restart_grace_s=self._restart_grace_s,
            sensed=self.isolation.sensed,
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


def _why_draining(health: HealthVerdict | None) -> str:
    return "; ".join(health.unwell) if health is not None and health.should_drain else ""


def _tell_unwell(verdict: HealthVerdict) -> None:
    """Log what is wrong; the registration tells it to the control plane."""
    if verdict.unwell:
        _log.warning("Unwell", reasons=list(verdict.unwell), draining=verdict.should_drain)
