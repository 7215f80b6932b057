"""Where this node's model replicas go, and how large they may be."""

from __future__ import annotations

from agentd.core.topology import Topology
from agentd.filler.run import Room, sources_of
from agentd.hostfs import HostFs
from agentd.launch import Launcher, SystemdLauncher
from agentd.models import FoundModels
from agentd.replica_mounts import PlainMounts, SystemdMounts, choose_mounts, may_mount
from agentd.replicas import ModelReplicas
from agentd.requirements import wants_numa
from agentd.rooms import Rooms
from corefleet.background import Background
from corefleet.clock import Clock
from corefleet.config import AgentdConfig

_PAGE_BYTES = 64 * 1024
"""The largest page of any kernel: files are rounded up to it on a tmpfs."""


def make_replicas(
    config: AgentdConfig,
    topology: Topology,
    models: FoundModels,
    launcher: Launcher,
    rooms: Rooms,
    host: HostFs,
    clock: Clock,
    background: Background,
) -> ModelReplicas:
    """Return this node's replicas: one of each model in each domain that has memory for it."""
    units = SystemdMounts(launcher.systemd, host) if isinstance(launcher, SystemdLauncher) else None
    mounts, why_not = choose_mounts(
        config.model_replicas if models.paths else "never",
        len(topology.domains),
        topology.numa,
        systemd=units,
        plain=PlainMounts(host) if may_mount() else None,
    )
    return ModelReplicas(
        models=sources_of(models.paths, models.configs),
        rooms=_rooms(config, topology, models),
        directory=rooms.run / "models",
        launcher=launcher,
        mounts=mounts,
        why_not=why_not,
        must=wants_numa(config.require) and mounts is not None,
        host=host,
        clock=clock,
        background=background,
        log_dir=rooms.log,
    )


def _rooms(config: AgentdConfig, topology: Topology, models: FoundModels) -> dict[int, Room]:
    """All models fit if the memory that the system leaves of a domain is enough."""
    wanted = sum(-(-size // _PAGE_BYTES) * _PAGE_BYTES for size in models.sizes.values())
    share = 1.0 - config.plan.system_memory_share
    return {
        domain: Room(found.cpus, min(wanted, int(found.memory_bytes * share)))
        for domain, found in topology.domains.items()
        if found.memory_bytes
    }
