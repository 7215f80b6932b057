"""Limits and drains through a whole controld: from the store to the nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from corefleet.adapters.memory_bus import MemoryBus
from corefleet.bus import Incoming
from corefleet.client import Client
from corefleet.codec import decode, encode
from corefleet.messages.records import Drain
from corefleet.messages.wire import YieldAttempt
from corefleet.rpc import tasks_pb2
from corefleet.subjects import drain_key, node_yield
from tests.integration.fake_node import FakeNode, Gate
from tests.unit.controld.plane import POOL, Plane, plane_of


@pytest.fixture
async def plane() -> AsyncIterator[Plane]:
    async with plane_of(replace(POOL, max_in_flight=8)) as made:
        yield made


@pytest.fixture
async def client(plane: Plane) -> AsyncIterator[Client]:
    running = await plane.controld("c1")
    async with Client(running.address) as made:
        yield made
    await running.stop()


async def finished(client: Client, task: str) -> tasks_pb2.Task:
    async with asyncio.timeout(20):
        events = [event async for event in client.watch(task)]
    return events[-1].finished


async def test_a_drain_in_the_store_asks_the_node_to_give_its_attempts_back(
    plane: Plane, client: Client
) -> None:
    bus = MemoryBus(plane.server)
    asked: asyncio.Queue[Incoming] = asyncio.Queue()
    await bus.subscribe(node_yield("n1"), asked.put_nowait)
    gate = Gate()
    async with FakeNode(plane.connect(), "n1", run=gate.run) as node:
        node.yields = False
        made = await client.submit("p", "x")
        await gate.running.wait()
        await plane.store.put(drain_key("n1"), encode(Drain(node="n1", reason="new kernel")))
        async with asyncio.timeout(10):
            ask = decode((await asked.get()).payload, YieldAttempt)
        assert (ask.task, ask.attempt, ask.reason) == (made.task, 1, "draining: new kernel")
        gate.through.set()
        assert (await finished(client, made.task)).output == "n1 1"
    await bus.close()


async def test_a_limit_over_all_shards_lets_everything_through_in_the_end(
    plane: Plane, client: Client
) -> None:
    async with FakeNode(plane.connect(), "n1"):
        made = [await client.submit("p", "x", session=f"s{n}") for n in range(40)]
        for each in made:
            assert (await finished(client, each.task)).state == tasks_pb2.TASK_STATE_DONE
