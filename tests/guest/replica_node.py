"""A node's model replicas without the rest of agentd; runs in the guest, once for each call.

python replica_node.py ORDERS: makes replicas as the JSON in the file ORDERS says, prints as
JSON what became of each order, and ends as an agentd that is stopped.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from agentd.core.topology import Overrides
from agentd.filler.run import FILLER_KIND, Room, Source
from agentd.hostfs import HostFs
from agentd.launch import Deadlines, LaunchSpec, SystemdLauncher, SystemdSettings
from agentd.launch.protocol import ExitStatus, Process, ServiceClass
from agentd.probes import discover
from agentd.replica_mounts import SystemdMounts
from agentd.replicas import ModelReplicas
from corefleet.background import Background
from corefleet.clock import SystemClock
from corefleet.errors import LaunchFailed

_SLOW = Deadlines(call_s=30.0, job_s=60.0, verdict_s=20.0, applied_s=20.0)
_RUN = Path("/run/corefleet")
_SPARE_BYTES = 1 << 20


class Order(msgspec.Struct, frozen=True):
    """A model that is to lie in some domains; its fillers' memory comes from `nodes`.

    No `nodes`: from the domain's, as it should be.
    """

    model: str
    path: Path
    size_bytes: int
    sha256: str
    domains: tuple[int, ...]
    nodes: tuple[int, ...] = ()


class Told(msgspec.Struct, frozen=True):
    """What became of an order: by domain the file, or why there is none."""

    files: dict[int, str]
    refused: dict[int, str]
    states: dict[int, str]
    """Phases as agentd tells them."""
    targets: dict[int, str]
    """Where the files are, or would be."""
    fillers: tuple[ExitStatus, ...]
    """How each filler ended, in the order of their starts."""


class Watched:
    """The launcher, but fillers get the memory nodes of their order; keeps the processes."""

    def __init__(self, launcher: SystemdLauncher, orders: tuple[Order, ...]) -> None:
        self._launcher = launcher
        self._nodes = {order.model: order.nodes for order in orders}
        self.started: list[Process] = []

    async def start(self, spec: LaunchSpec) -> Process:
        changed = msgspec.structs.replace(spec, memory_nodes=self._nodes[spec.unit])
        process = await self._launcher.start(changed)
        self.started.append(process)
        return process

    async def adopt(self) -> tuple[Process, ...]:
        return await self._launcher.adopt()

    async def squeeze(self, domain: int, cpus: float | None) -> None:
        await self._launcher.squeeze(domain, cpus)

    async def groups(self, domain: int) -> dict[ServiceClass, str]:
        return await self._launcher.groups(domain)

    async def close(self) -> None:
        await self._launcher.close()

    @property
    def outlives(self) -> bool:
        return self._launcher.outlives

    @property
    def unisolated(self) -> tuple[str, ...]:
        return self._launcher.unisolated


async def carry_out(orders: tuple[Order, ...]) -> dict[str, Told]:
    """Be an agentd until all is answered; raises what its background died of."""
    host = HostFs()
    topology = discover(host, Overrides())
    settings = SystemdSettings(
        node="replicas",
        cpus={domain: found.cpus for domain, found in topology.domains.items()},
        batch_cpus={},
        # A slice has to allow what a unit in it is to have.
        memory_nodes={
            domain: (domain, *order.nodes) for order in orders for domain in order.domains
        },
        working_directory=Path("/"),
    )
    launcher = await SystemdLauncher.find(host, _RUN / "units", settings, None, _SLOW)
    watched = Watched(launcher, orders)
    failures: list[BaseException] = []
    background = Background(failures.append)
    room = sum(order.size_bytes for order in orders) + _SPARE_BYTES
    replicas = ModelReplicas(
        models={each.model: Source(each.path, each.size_bytes, each.sha256) for each in orders},
        rooms={domain: Room(found.cpus, room) for domain, found in topology.domains.items()},
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
        told = await asyncio.gather(*(_ask(replicas, watched, order) for order in orders))
    finally:
        await replicas.close()
        await background.close()
        await watched.close()
    if failures:
        raise failures[0]
    return {order.model: each for order, each in zip(orders, told, strict=True)}


async def _ask(replicas: ModelReplicas, watched: Watched, order: Order) -> Told:
    """Wait for all answers to an order."""
    files: dict[int, str] = {}
    refused: dict[int, str] = {}

    async def ask(domain: int) -> None:
        try:
            files[domain] = str(await replicas.ensure(order.model, domain))
        except LaunchFailed as error:
            refused[domain] = str(error)

    await asyncio.gather(*(ask(domain) for domain in order.domains))
    fillers = [each for each in watched.started if each.spec.unit == order.model]
    return Told(
        files=files,
        refused=refused,
        states={
            state.domain: state.state for state in replicas.states() if state.model == order.model
        },
        targets={domain: str(replicas.target(order.model, domain)) for domain in order.domains},
        fillers=tuple([await process.wait() for process in fillers]),
    )


def main() -> None:
    """Print what became of the orders in the file that the command line names."""
    data = Path(sys.argv[1]).read_bytes()
    orders = msgspec.json.decode(data, type=tuple[Order, ...], dec_hook=_path)
    told = asyncio.run(carry_out(orders))
    sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")


def _path(kind: type, value: object) -> Path:
    assert kind is Path
    return Path(str(value))


if __name__ == "__main__":
    main()
