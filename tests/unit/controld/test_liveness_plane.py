"""Three controlds and their nodes: who is lost, who is only cut off from one, and how many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from controld.core.liveness_io import Found
from corefleet.adapters.memory_bus import MemoryBus
from corefleet.bus import Incoming
from corefleet.client import Client
from corefleet.codec import decode, encode
from corefleet.config import LivenessConfig
from corefleet.messages.records import LostNode, Ownership, PoolSpec
from corefleet.messages.wire import RackDigest, Verdict
from corefleet.subjects import DIGESTS, LOSS_VOTES, LOST, VERDICTS, lost_key, pool_key, rack_key
from tests.integration.fake_node import FakeNode, Gate
from tests.unit.controld.plane import Plane, Running
from tests.unit.controld.test_control_plane import owned

POOL = PoolSpec(name="p", agent="some:Agent", slots=64)
LIVENESS = LivenessConfig(max_lost_floor=1, max_lost_share=0.2, cut_after_s=1.5)


class Three:
    """Three controlds; `racks_owner` watches the only rack."""

    def __init__(self, plane: Plane, controlds: dict[str, Running], client: Client) -> None:
        self.plane = plane
        self.controlds = controlds
        self.client = client
        self.bus = MemoryBus(plane.server)

    async def racks_owner(self) -> str:
        async with asyncio.timeout(10):
            while True:
                entry = await self.plane.store.get(rack_key("rack0"))
                if entry and (owner := decode(entry.value, Ownership).controld):
                    return owner
                await asyncio.sleep(0.01)

    def blind(self, name: str, *, for_peers_only: bool = False) -> None:
        """Let a controld find nobody at any node's port, at least when it looks for another."""
        observer = self.controlds[name].parts.observer
        real = observer.probe

        async def look(address: str, node: str, epoch: int, timeout_s: float) -> Found:
            if for_peers_only and timeout_s >= LIVENESS.probe_timeout_s:
                return await real(address, node, epoch, timeout_s)
            return "nobody"

        observer.probe = look

    async def digest(self, wanted: Callable[[dict[str, str]], bool]) -> dict[str, str]:
        """Return the first digest's states that are `wanted`, by node."""
        heard: asyncio.Queue[Incoming] = asyncio.Queue()
        following = await self.bus.subscribe(DIGESTS, heard.put_nowait)
        try:
            async with asyncio.timeout(15):
                while True:
                    views = decode((await heard.get()).payload, RackDigest).nodes
                    states = {view.node: view.state for view in views}
                    if wanted(dict(states)):
                        return dict(states)
        finally:
            await following.close()


@pytest.fixture
async def three() -> AsyncIterator[Three]:
    plane = Plane()
    await plane.store.put(pool_key("p"), encode(POOL))
    async with AsyncExitStack() as stack:
        controlds = {}
        for name in ("c1", "c2", "c3"):
            controlds[name] = await plane.controld(name, lease_ttl_s=5.0, liveness=LIVENESS)
            stack.push_async_callback(controlds[name].stop)
        client = await stack.enter_async_context(Client(controlds["c1"].address))
        await owned(client, 3)
        made = Three(plane, controlds, client)
        stack.push_async_callback(made.bus.close)
        yield made
    await plane.store.close()
    assert plane.failures == []


async def test_rule_10_a_node_that_only_its_racks_owner_cannot_reach_is_cut_and_not_lost(
    three: Three,
) -> None:
    verdicts: asyncio.Queue[Incoming] = asyncio.Queue()
    await three.bus.subscribe(VERDICTS, verdicts.put_nowait)
    async with FakeNode(three.plane.connect(), "n1") as node:
        await three.digest(lambda states: states.get("n1") == "ready")
        three.blind(await three.racks_owner())
        await node.stop_beating()
        async with asyncio.timeout(10):
            verdict = decode((await verdicts.get()).payload, Verdict)
        assert (verdict.node, verdict.state) == ("n1", "cut")
        assert await three.plane.store.get(lost_key("n1")) is None
        node.beat_again()
        await three.digest(lambda states: states.get("n1") == "ready")


async def test_a_node_that_nobody_reaches_is_lost(three: Three) -> None:
    lost = three.plane.store.watch(LOST, 0)
    async with FakeNode(three.plane.connect(), "n1") as node:
        await three.digest(lambda states: states.get("n1") == "ready")
        await node.fall_silent()
        async with asyncio.timeout(10):
            changes = await anext(lost)
    await lost.aclose()
    (change,) = changes.events  # type: ignore[union-attr]
    assert change.value is not None
    assert decode(change.value, LostNode).node == "n1"


async def test_rule_8_a_node_of_an_old_epoch_is_told_to_give_its_attempts_up(three: Three) -> None:
    verdicts: asyncio.Queue[Incoming] = asyncio.Queue()
    async with FakeNode(three.plane.connect(), "n1") as node:
        await three.digest(lambda states: states.get("n1") == "ready")
        for name in three.controlds:
            three.blind(name)
        await node.stop_beating()
        await three.digest(lambda states: states.get("n1") == "lost")
        await three.bus.subscribe(VERDICTS, verdicts.put_nowait)
        node.beat_again()
        async with asyncio.timeout(10):
            told = decode((await verdicts.get()).payload, Verdict)
        assert (told.node, told.node_epoch, told.state) == ("n1", node.epoch, "lost")
        assert not told.provisional, "the node acts on it"


async def until(condition: Callable[[], bool]) -> None:
    """Nodes tell nobody what they took: look again and again."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.01)


async def fleet(three: Three, stack: AsyncExitStack, gate: Gate) -> list[FakeNode]:
    """Six nodes that all are ready, each with work that goes on until the gate is opened."""
    nodes = [
        await stack.enter_async_context(FakeNode(three.plane.connect(), f"n{number}", run=gate.run))
        for number in range(6)
    ]
    await three.digest(lambda states: list(states.values()).count("ready") == 6)
    for number in range(24):
        await three.client.submit("p", "x", session=f"s{number}")
    async with asyncio.timeout(10):
        await until(lambda: sum(len(node.taken) for node in nodes) == 24)
    return nodes


async def test_a_mass_loss_is_held_until_most_controlds_agree_and_then_goes_on_elsewhere(
    three: Three,
) -> None:
    gate = Gate()
    async with AsyncExitStack() as stack:
        nodes = await fleet(three, stack, gate)
        spare = await stack.enter_async_context(FakeNode(three.plane.connect(), "z", run=gate.run))
        held = asyncio.create_task(three.digest(lambda states: "held" in states.values()))
        stands = three.plane.store.watch(LOST, 0)
        for node in nodes:
            await node.fall_silent()
        await held
        async with asyncio.timeout(20):
            await until(lambda: len(spare.taken) >= 24)
        gate.through.set()
        stored: set[str] = set()
        async with asyncio.timeout(10):
            while len(stored) < 6:
                changes = await anext(stands)
                stored |= {change.key for change in changes.events}  # type: ignore[union-attr]
        await stands.aclose()


async def test_a_mass_loss_that_was_none_moves_no_more_than_the_share(three: Three) -> None:
    gate = Gate()
    async with AsyncExitStack() as stack:
        nodes = await fleet(three, stack, gate)
        mine = await three.racks_owner()
        for name in three.controlds:
            three.blind(name, for_peers_only=name != mine)
        held = asyncio.create_task(
            three.digest(lambda states: list(states.values()).count("held") > 1)
        )
        for node in nodes:
            await node.stop_beating()
        await held
        await three.digest(lambda states: "held" not in states.values())
        entries, _ = await three.plane.store.range(LOST)
        stored = {decode(entry.value, LostNode).node for entry in entries}
        assert len(stored) <= 1
        for node in nodes:
            if node.name not in stored:
                node.beat_again()
        await three.digest(lambda states: list(states.values()).count("ready") >= 5)
        assert sum(len(node.taken) for node in nodes) < 48, "not everything moved"
        gate.through.set()


async def test_a_loss_stays_held_while_most_controlds_are_silent(three: Three) -> None:
    gate = Gate()
    async with AsyncExitStack() as stack:
        nodes = await fleet(three, stack, gate)
        mine = await three.racks_owner()
        for name, running in three.controlds.items():
            if name != mine:
                await running.parts.losses.close()
        for node in nodes:
            await node.fall_silent()
        await three.digest(lambda states: list(states.values()).count("held") > 1)
        heard: asyncio.Queue[Incoming] = asyncio.Queue()
        await three.bus.subscribe(LOSS_VOTES, heard.put_nowait)
        async with asyncio.timeout(15):
            for _ in range(4):
                await heard.get()
        entries, _ = await three.plane.store.range(LOST)
        assert len(entries) <= 1
        gate.through.set()
