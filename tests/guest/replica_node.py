"""A node's model replicas without the rest of agentd; runs in the guest, once for each call.

python replica_node.py ORDER: makes replicas as the JSON in the file ORDER says, prints as JSON
what became of each, and ends as an agentd that is stopped.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from agentd.core.replicas_io import ReplicaState
from agentd.core.topology import Overrides
from agentd.filler.run import FILLER_KIND, Room, Source
from agentd.hostfs import HostFs
from agentd.launch import Deadlines, LaunchSpec, SystemdLauncher, SystemdSettings
from agentd.launch.protocol import ExitStatus, Process
from agentd.probes import discover
from agentd.replica_mounts import SystemdMounts
from agentd.replicas import ModelReplicas
from corefleet.background import Background
from corefleet.clock import SystemClock
from corefleet.errors import LaunchFailed

_SLOW = Deadlines(call_s=30.0, job_s=60.0, verdict_s=20.0, applied_s=20.0)
_RUN = Path("/run/corefleet")


class Order(msgspec.Struct, frozen=True):
    """Which model is to lie in which domains; a filler's memory may come from `nodes` alone."""

    model: str
    path: Path
    size_bytes: int
    sha256: str
    domains: tuple[int, ...]
    room_bytes: int
    nodes: tuple[int, ...] = ()


class Told(msgspec.Struct, frozen=True):
    """What became of an order: by domain the file, or why there is none."""

    files: dict[int, str]
    refused: dict[int, str]
    states: tuple[ReplicaState, ...]
    targets: dict[int, str]
    fillers: tuple[ExitStatus, ...]
    """How each filler ended, in the order of their starts."""


class Watched:
    """The launcher, but fillers get the memory nodes of the order; keeps how they ended."""

    def __init__(self, launcher: SystemdLauncher, nodes: tuple[int, ...]) -> None:
        self._launcher = launcher
        self._nodes = nodes
        self.started: list[Process] = []

    async def start(self, spec: LaunchSpec) -> Process:
        changed = msgspec.structs.replace(spec, memory_nodes=self._nodes)
        process = await self._launcher.start(changed)
        self.started.append(process)
        return process

    async def adopt(self) -> tuple[Process, ...]:
        return await self._launcher.adopt()

    async def squeeze(self, domain: int, cpus: float | None) -> None:
        await self._launcher.squeeze(domain, cpus)

    async def close(self) -> None:
        await self._launcher.close()

    @property
    def outlives(self) -> bool:
        return self._launcher.outlives

    @property
    def unisolated(self) -> tuple[str, ...]:
        return self._launcher.unisolated


async def carry_out(order: Order) -> Told:
    """Be an agentd for as long as it takes to answer; raises what its background died of."""
    host = HostFs()
    topology = discover(host, Overrides())
    settings = SystemdSettings(
        node="replicas",
        cpus={domain: found.cpus for domain, found in topology.domains.items()},
        batch_cpus={},
        memory_nodes={domain: order.nodes or (domain,) for domain in topology.domains},
        working_directory=Path("/"),
    )
    launcher = await SystemdLauncher.find(host, _RUN / "units", settings, None, _SLOW)
    watched = Watched(launcher, order.nodes)
    failures: list[BaseException] = []
    background = Background(failures.append)
    replicas = ModelReplicas(
        models={order.model: Source(order.path, order.size_bytes, order.sha256)},
        rooms={
            domain: Room(topology.domains[domain].cpus, order.room_bytes)
            for domain in order.domains
        },
        directory=_RUN / "models",
        launcher=watched,
        mounts=SystemdMounts(launcher.systemd, host),
        why_not="",
        must=True,
        host=host,
        clock=SystemClock(),
        background=background,
        log_dir=Path("/var/log"),
    )
    try:
        left = await watched.adopt()
        await replicas.start(tuple(each for each in left if each.spec.kind == FILLER_KIND))
        answers = await asyncio.gather(
            *(replicas.ensure(order.model, domain) for domain in order.domains),
            return_exceptions=True,
        )
        fillers = tuple([await process.wait() for process in watched.started])
        states = replicas.states()
    finally:
        await replicas.close()
        await background.close()
        await watched.close()
    if failures:
        raise failures[0]
    return _told(order, replicas, answers, states, fillers)


def _told(
    order: Order,
    replicas: ModelReplicas,
    answers: list[Path | BaseException],
    states: tuple[ReplicaState, ...],
    fillers: tuple[ExitStatus, ...],
) -> Told:
    files: dict[int, str] = {}
    refused: dict[int, str] = {}
    for domain, answer in zip(order.domains, answers, strict=True):
        if isinstance(answer, Path):
            files[domain] = str(answer)
        elif isinstance(answer, LaunchFailed):
            refused[domain] = str(answer)
        else:
            raise answer
    targets = {domain: str(replicas.target(order.model, domain)) for domain in order.domains}
    return Told(files, refused, states, targets, fillers)


def main() -> None:
    """Print what became of the order that the command line names."""
    order = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Order, dec_hook=_path)
    told = asyncio.run(carry_out(order))
    sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")


def _path(kind: type, value: object) -> Path:
    assert kind is Path
    return Path(str(value))


if __name__ == "__main__":
    main()
