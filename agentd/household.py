"""How each process of the plan is started, greeted and ended."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

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
from corefleet.messages.records import PoolSpec


@dataclass(slots=True)
class PlannedHousehold:
    """The supervisor's view of the current plan."""

    node: str
    rooms: Rooms
    config: EngineConfig
    models: Mapping[str, Path]
    links: WorkerLinks
    engines: EngineWatch
    _units: dict[UnitKey, EngineUnit | WorkerUnit] = field(default_factory=dict)

    def take(self, plan: Plan) -> dict[UnitKey, tuple[int, object]]:
        """Use `plan` from now on; return what it wants of each unit."""
        self._units = {
            **{UnitKey("engine", unit.model, unit.domain): unit for unit in plan.engines},
            **{UnitKey("worker", unit.pool.name, unit.domain): unit for unit in plan.workers},
        }
        return {
            key: (1, unit)
            if isinstance(unit, EngineUnit)
            else (unit.workers + unit.spares, _worker_version(unit))
            for key, unit in self._units.items()
        }

    def spec(self, unit: UnitKey, instance: str) -> LaunchSpec:
        planned = self._units.get(unit)
        if planned is None:
            raise LaunchFailed(f"{unit.kind} {instance}: the plan has changed since")
        if isinstance(planned, EngineUnit):
            command = self._engine_command(planned)
        else:
            self.links.expect(instance, self._welcome(planned))
            command = self._worker_command(planned, instance)
        return LaunchSpec(
            name=f"{unit.kind} {instance}",
            command=(sys.executable, "-m", *command),
            cpus=planned.cpus,
            domain=planned.domain,
            log=self.rooms.log / f"{unit.kind}-{unit.name}-d{unit.domain}.log",
        )

    def started(self, unit: UnitKey, instance: str, process: Process) -> None:
        if unit.kind == "engine":
            socket = engine_socket(self.rooms.run, unit.name, unit.domain)
            self.engines.watch(instance, socket)

    def stop(self, unit: UnitKey, instance: str, reason: str, grace_s: float) -> bool:
        return unit.kind == "worker" and self.links.stop(instance, reason, grace_s)

    def gone(self, unit: UnitKey, instance: str, reason: str) -> None:
        if unit.kind == "engine":
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
        )

    def _worker_command(self, unit: WorkerUnit, instance: str) -> tuple[str, ...]:
        return (
            *("agentd.worker", "--socket", str(self.links.path), "--worker", instance),
            *("--domain", str(unit.domain), "--cpus", format_list(unit.cpus)),
        )

    def _engine_command(self, unit: EngineUnit) -> tuple[str, ...]:
        config = self.config
        return (
            *("agentd.engine", "--model", str(self.models[unit.model])),
            *("--socket", str(engine_socket(self.rooms.run, unit.model, unit.domain))),
            *("--domain", str(unit.domain), "--cpus", format_list(unit.cpus)),
            *("--threads", str(unit.threads), "--context", str(config.context_tokens)),
            *("--sequences", str(config.max_sequences), "--batch", str(config.batch_tokens)),
            *("--chunk", str(config.prefill_chunk_tokens)),
        )


def _worker_version(unit: WorkerUnit) -> tuple[PoolSpec, tuple[int, ...]]:
    """What workers cannot learn without a restart: not what only we and controld read."""
    pool = msgspec.structs.replace(
        unit.pool, slots=1, workers=1, spares=0, rate_per_s=0.0, burst=0, labels={}
    )
    return pool, unit.cpus


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
