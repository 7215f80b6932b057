"""A control plane of two controlds for integration tests, and what tests ask of it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path

from corefleet.client import Client
from corefleet.errors import CorefleetError
from corefleet.rpc import fleet_pb2, tasks_pb2
from tests.servers.controld import ControldServer, controld_toml
from tests.servers.etcd import EtcdServer
from tests.servers.nats import NatsServer

POOL = 'agent = "some:Agent"\nslots = 64\n'


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Servers and the directory of one control plane."""

    directory: Path
    etcd: EtcdServer
    nats: NatsServer
    controlds: dict[str, ControldServer]

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self.controlds.values()]

    def controld(self, name: str, lease_ttl_s: float = 1.5) -> ControldServer:
        config = controld_toml(name, self.nats.url, self.etcd.endpoint, lease_ttl_s=lease_ttl_s)
        return ControldServer(self.directory, name, config)


async def all_owned(client: Client, controlds: int = 2) -> dict[int, str]:
    """Return the owner of each shard once `controlds` living ones own all of them."""
    async with asyncio.timeout(15):
        while True:
            with contextlib.suppress(CorefleetError):
                living = await client.controlds()
                owners = {shard: each.controld for each in living for shard in each.shards}
                shares = [len(each.shards) for each in living]
                if len(owners) == 16 and len(living) == controlds and all(shares):
                    return owners
            await asyncio.sleep(0.02)


async def node_state(client: Client, name: str, state: str) -> fleet_pb2.Node:
    """Return the node once it is in `state`."""
    async with asyncio.timeout(10):
        while True:
            for node in await client.nodes():
                if node.node == name and node.state == state:
                    return node
            await asyncio.sleep(0.02)


async def events_until(client: Client, task: str, what: str) -> list[tasks_pb2.TaskEvent]:
    """Return a task's events up to the first of kind `what`."""
    seen = []
    async with asyncio.timeout(15):
        async for event in client.watch(task):
            seen.append(event)
            if event.WhichOneof("what") == what:
                return seen
    raise AssertionError(f"the watch ended without {what}")


async def first_step(client: Client, task: str) -> tasks_pb2.Step:
    """Return the task's first committed step, once there is one."""
    async with asyncio.timeout(15):
        async for event in client.watch(task):
            if event.HasField("step"):
                return event.step
            if event.snapshot.steps:
                return event.snapshot.steps[0]
    raise AssertionError("the watch ended without a step")
