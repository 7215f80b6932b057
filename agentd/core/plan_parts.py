"""What a plan is made of: the operator's settings, units, domains. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentd.launch.protocol import ServiceClass
from corefleet.messages.records import PoolSpec

MIB = 1 << 20

_ENGINE_TASKS = 1024
"""Room for llama.cpp's two pools of threads on the largest domains, and an end to runaways."""

CPU_WEIGHTS: Mapping[ServiceClass, int] = {"engine": 200, "online": 100, "batch": 20}
"""Against each other on the same CPUs; 100 is what every other process has."""


@dataclass(slots=True, frozen=True)
class PlanSettings:
    """What the operator may say about the division of the machine."""

    system_cpus: tuple[int, ...] = ()
    """CPUs for the system and agentd instead of what the plan would pick; with the other
    threads of their cores."""
    system_cores_per_node: int = 1
    """Cores that the first domain leaves to the system and agentd."""
    system_cores_per_domain: int = 0
    """Cores that every domain leaves to them; the first leaves the larger of both."""
    sandbox_share: float = 0.25
    """Share of the CPUs for workers that sandboxes get for themselves; 0: they share them."""
    system_memory_share: float = 0.06
    """Share of a domain's memory that is left to the system."""
    system_memory_floor_bytes: int = 512 * MIB
    """Least that is left to it, though never more than a quarter of the domain."""
    engine_memory_bytes: int = 0
    """Memory of an engine beside its model: KV cache and compute buffers. 0: by
    `engine_memory` of plan_memory."""
    model_replicas: bool = False
    """Models lie in a memory of their own (tmpfs) that no engine is charged for."""
    worker_memory_bytes: int = 2048 * MIB
    """Most that a worker gets when its pool does not say."""
    worker_memory_floor_bytes: int = 96 * MIB
    """A pool whose workers would get less is not offered."""
    sandbox_memory_share: float = 0.1
    """Share of what the system leaves that all sandboxes of a domain have together."""
    worker_tasks_max: int = 256
    """Processes and threads of one worker, its tools among them."""
    engine_tasks_max: int = _ENGINE_TASKS


@dataclass(slots=True, frozen=True)
class EngineUnit:
    """One engine process: a model in a domain. `threads` are physical cores."""

    model: str
    domain: int
    cpus: tuple[int, ...]
    threads: int
    memory_high: int = 0
    """Bytes; 0: no limit."""
    memory_max: int = 0
    """Bytes, with the model unless that has a replica; 0: no limit."""
    tasks_max: int = _ENGINE_TASKS
    cpu_weight: int = CPU_WEIGHTS["engine"]
    service_class: ServiceClass = "engine"
    bandwidth_class: ServiceClass = "engine"
    """Whose resctrl group it is in."""


@dataclass(slots=True, frozen=True)
class WorkerUnit:
    """The worker processes of a pool in a domain: `workers` at work, `spares` waiting.

    Limits are those of one process.
    """

    pool: PoolSpec
    domain: int
    cpus: tuple[int, ...]
    workers: int
    spares: int
    memory_high: int = 0
    """Bytes; 0: no limit."""
    memory_max: int = 0
    """Bytes; 0: no limit."""
    tasks_max: int = 0
    cpu_weight: int = CPU_WEIGHTS["online"]
    service_class: ServiceClass = "online"
    bandwidth_class: ServiceClass = "online"
    """Whose resctrl group it is in."""


@dataclass(slots=True, frozen=True)
class DomainPlan:
    """How one domain is used."""

    domain: int
    cpus: tuple[int, ...]
    system_cpus: tuple[int, ...]
    """Those of the workers when the system has none of its own here."""
    engine_cpus: tuple[int, ...]
    """One of each physical core; its siblings stay idle."""
    worker_cpus: tuple[int, ...]
    shared: bool
    """Engines, workers, sandboxes and the system run on the same CPUs."""
    slots: Mapping[str, int]
    sandbox_cpus: tuple[int, ...] = ()
    """Those of the workers when sandboxes have none of their own here."""
    memory_nodes: tuple[int, ...] = ()
    """Nodes that its processes bind their memory to: itself, or the nearest with memory."""
    memory_bytes: int = 0
    """Memory of `memory_nodes`, less huge pages; 0: unknown, and nothing is limited."""
    system_memory_bytes: int = 0
    """Part of it that is left to the system; of domains on the same node, said by each."""
    model_bytes: int = 0
    """Size of the models that its engines use."""
    sandbox_memory_max: int = 0
    """Bytes for all its sandboxes together; 0: no limit."""


@dataclass(slots=True, frozen=True)
class Plan:
    """What runs on this node."""

    domains: Mapping[int, DomainPlan]
    engines: tuple[EngineUnit, ...]
    workers: tuple[WorkerUnit, ...]
    warnings: tuple[str, ...]
