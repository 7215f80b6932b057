"""How each process of the plan is started, greeted and ended."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import msgspec

from agentd.core.cpulist import format_list
from agentd.core.node_io import Place, PlaceSpec
from agentd.core.plan import EngineUnit, Plan, WorkerUnit
from agentd.core.supervision import UnitKey
from agentd.engines import EngineWatch, engine_socket
from agentd.launch.protocol import LaunchSpec, Process
from agentd.links import WorkerLinks
from agentd.rooms import Rooms
from corefleet.config import EngineConfig
from corefleet.errors import LaunchFailed
from corefleet.messages.links import Welcome


class ModelFiles(Protocol):
    """Where engines find their models."""

    async def ensure(self, model: str, domain: int) -> Path:
        """Return the file that engines of `domain` map; raises LaunchFailed."""

    def note_engine(self, model: str, domain: int, *, started: bool) -> None:
        """One more engine uses the file, or one less."""


@dataclass(slots=True)
class PlannedHousehold:
    """The supervisor's view of the current plan."""

    node: str
    rooms: Rooms
    config: EngineConfig
    models: ModelFiles
    links: WorkerLinks
    engines: EngineWatch
    orphan_s: float = 0.0
    """How long workers go on without agentd; 0: they die with it."""
    _units: dict[UnitKey, EngineUnit | WorkerUnit] = field(default_factory=dict)
    _nodes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _paths: dict[UnitKey, Path] = field(default_factory=dict)
    _mapping: set[str] = field(default_factory=set)
    """Engines that use a model's file."""

    def take(self, plan: Plan) -> dict[UnitKey, tuple[int, object]]:
        """Use `plan` from now on; return what it wants of each unit."""
        self._nodes = {domain: found.memory_nodes for domain, found in plan.domains.items()}
        self._units = {
            **{UnitKey("engine", unit.model, unit.domain): unit for unit in plan.engines},
            **{UnitKey("worker", unit.pool.name, unit.domain): unit for unit in plan.workers},
        }
        return {
            key: (
                1 if isinstance(unit, EngineUnit) else unit.workers + unit.spares,
                _version(unit, self.config),
            )
            for key, unit in self._units.items()
        }

    async def prepare(self, unit: UnitKey) -> None:
        if unit.kind == "engine":
            self._paths[unit] = await self.models.ensure(unit.name, unit.domain)

    def spec(self, unit: UnitKey, instance: str) -> LaunchSpec:
        planned = self._units.get(unit)
        if planned is None:
            raise LaunchFailed(f"{unit.kind} {instance}: the plan has changed since")
        if isinstance(planned, EngineUnit):
            command = self._engine_command(planned, self._paths[unit])
        else:
            self.links.expect(instance, self._welcome(planned))
            command = self._worker_command(planned, instance)
        return LaunchSpec(
            name=f"{unit.kind} {instance}",
            command=(sys.executable, "-m", *command),
            cpus=planned.cpus,
            domain=planned.domain,
            memory_nodes=self._nodes.get(unit.domain, ()),
            service_class=planned.service_class,
            memory_high=planned.memory_high,
            memory_max=planned.memory_max,
            tasks_max=planned.tasks_max,
            cpu_weight=planned.cpu_weight,
            kind=unit.kind,
            pool=planned.pool.name if isinstance(planned, WorkerUnit) else "",
            unit=unit.name,
            version=_version(planned, self.config),
            log=self.rooms.log / f"{unit.kind}-{unit.name}-d{unit.domain}.log",
        )

    def started(self, unit: UnitKey, instance: str, process: Process) -> None:
        if unit.kind == "engine":
            self._mapping.add(instance)
            self.models.note_engine(unit.name, unit.domain, started=True)
            socket = engine_socket(self.rooms.run, unit.name, unit.domain)
            self.engines.watch(instance, socket)

    def adopted(self, unit: UnitKey, instance: str, process: Process) -> None:
        if unit.kind == "engine":
            self.started(unit, instance, process)
        else:
            self.links.expect_back(instance)

    def stop(self, unit: UnitKey, instance: str, reason: str, grace_s: float) -> bool:
        return unit.kind == "worker" and self.links.stop(instance, reason, grace_s)

    def gone(self, unit: UnitKey, instance: str, reason: str) -> None:
        if unit.kind == "engine":
            if instance in self._mapping:
                self._mapping.remove(instance)
                self.models.note_engine(unit.name, unit.domain, started=False)
            self.engines.forget(instance)
        else:
            self.links.forget(instance)

    def _welcome(self, unit: WorkerUnit) -> Welcome:
        model = unit.pool.model
        return Welcome(
            node=self.node,
            domain=unit.domain,
            pool=unit.pool,
            engine_socket=str(engine_socket(self.rooms.run, model, unit.domain)) if model else "",
            orphan_s=self.orphan_s,
        )

    def _worker_command(self, unit: WorkerUnit, instance: str) -> tuple[str, ...]:
        return (
            *("agentd.worker", "--socket", str(self.links.path), "--worker", instance),
            *("--domain", str(unit.domain), "--cpus", format_list(unit.cpus)),
        )

    def _engine_command(self, unit: EngineUnit, model: Path) -> tuple[str, ...]:
        config = self.config
        return (
            *("agentd.engine", "--model", str(model)),
            *("--socket", str(engine_socket(self.rooms.run, unit.model, unit.domain))),
            *("--domain", str(unit.domain), "--cpus", format_list(unit.cpus)),
            *("--threads", str(unit.threads), "--context", str(config.context_tokens)),
            *("--sequences", str(config.max_sequences), "--batch", str(config.batch_tokens)),
            *("--chunk", str(config.prefill_chunk_tokens)),
        )


def _version(unit: EngineUnit | WorkerUnit, config: EngineConfig) -> str:
    """Return a digest of what a process cannot learn without a restart.

    Not of what only we and controld read.
    """
    parts: tuple[object, ...]
    if isinstance(unit, EngineUnit):
        parts = (unit.model, unit.domain, unit.cpus, unit.threads, config)
    else:
        pool = msgspec.structs.replace(
            unit.pool, slots=1, workers=1, spares=0, rate_per_s=0.0, burst=0, labels={}
        )
        parts = (pool, unit.cpus, unit.domain)
    return blake2b(msgspec.json.encode(parts, order="sorted"), digest_size=8).hexdigest()


def places_of(plan: Plan) -> dict[Place, PlaceSpec]:
    """Return what the plan offers, for the node's core."""
    return {
        Place(unit.pool.name, unit.domain): PlaceSpec(
            slots=unit.pool.slots,
            workers=unit.workers,
            progress_timeout_s=unit.pool.progress_timeout_s,
            model=unit.pool.model,
        )
        for unit in plan.workers
    }
