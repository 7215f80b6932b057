"""What the control plane says, over the in-memory bus; and the port that probes ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Literal

import pytest

from agentd import control as control_module
from agentd.control import Control
from agentd.probe_port import PortInUse, ProbePort
from corefleet.adapters.memory_bus import MemoryBus, MemoryServer
from corefleet.bus import Incoming
from corefleet.codec import encode
from corefleet.errors import InvalidInput
from corefleet.messages.records import NodeRegistration, PoolSpec
from corefleet.messages.wire import (
    AssignAnswer,
    AssignAnswers,
    AssignBatch,
    DropAttempt,
    InventoryAnswer,
    InventoryQuery,
    NodeRegistered,
    NodeView,
    PoolsChanged,
    RackDigest,
    Verdict,
    YieldAttempt,
)
from corefleet.subjects import (
    CONTROL_REGISTER,
    POOLS_CHANGED,
    VERDICTS,
    digest,
    node_assign,
    node_drop,
    node_inventory,
    node_yield,
)


class NotedCommands:
    def __init__(self) -> None:
        self.said: list[object] = []
        self.changed = asyncio.Event()

    def note(self, what: object) -> None:
        self.said.append(what)
        self.changed.set()

    def assign(self, batch: AssignBatch) -> list[AssignAnswer]:
        self.note(batch)
        return [AssignAnswer("t", 1, accepted=True)]

    def drop(self, drop: DropAttempt) -> None:
        self.note(drop)

    def yield_back(self, asked: YieldAttempt) -> None:
        self.note(asked)

    def inventory(self, query: InventoryQuery) -> InventoryAnswer:
        self.note(query)
        return InventoryAnswer(node_epoch=7)

    def lost(self, epoch: int, reason: str) -> None:
        self.note(("lost", epoch, reason))

    def pools(self, pools: tuple[PoolSpec, ...], revision: int) -> None:
        self.note(("pools", pools, revision))

    async def until(self, condition: Callable[[list[object]], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition(self.said):
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    bus = MemoryBus(MemoryServer())
    yield bus
    await bus.close()


@pytest.fixture
async def commands(bus: MemoryBus) -> AsyncIterator[NotedCommands]:
    commands = NotedCommands()
    control = Control(bus, "n1", "r1", commands)
    await control.start()
    yield commands
    await control.close()


async def test_questions_are_answered(bus: MemoryBus, commands: NotedCommands) -> None:
    batch = AssignBatch(controld="c1", items=())
    answers = AssignAnswers(items=(AssignAnswer("t", 1, accepted=True),))
    assert await bus.request(node_assign("n1"), encode(batch), 1.0) == encode(answers)
    query = InventoryQuery(shard=1, owner_epoch=1, held=())
    answer = await bus.request(node_inventory("n1"), encode(query), 1.0)
    assert answer == encode(InventoryAnswer(node_epoch=7))
    assert commands.said == [batch, query]


async def test_orders_are_passed_on_and_rubbish_is_survived(
    bus: MemoryBus, commands: NotedCommands
) -> None:
    drop = DropAttempt(task="t", attempt=1, reason="r")
    bus.publish(node_drop("n1"), b"rubbish")
    bus.publish(node_drop("n1"), encode(drop))
    pools = (PoolSpec(name="p"),)
    bus.publish(POOLS_CHANGED, encode(PoolsChanged(pools=pools, pools_revision=4)))
    wanted = YieldAttempt(task="t", attempt=2, reason="drained")
    bus.publish(node_yield("n1"), encode(wanted))
    await commands.until(lambda said: len(said) == 3)
    assert commands.said == [drop, ("pools", pools, 4), wanted]


async def test_only_our_own_loss_counts_by_verdict_or_digest(
    bus: MemoryBus, commands: NotedCommands
) -> None:
    def verdict(node: str, state: Literal["lost", "cut"]) -> Verdict:
        return Verdict(rack="r1", rack_epoch=1, node=node, node_epoch=3, state=state, reason="dead")

    for said in (verdict("n2", "lost"), verdict("n1", "cut"), verdict("n1", "lost")):
        bus.publish(VERDICTS, encode(said))
    await commands.until(lambda said: len(said) == 1)
    assert commands.said == [("lost", 3, "dead")]
    nodes = (
        NodeView(node="n2", epoch=1, state="lost"),
        NodeView(node="n1", epoch=5, state="lost"),
    )
    bus.publish(
        digest("r1"), encode(RackDigest(rack="r1", controld="c", epoch=1, number=1, nodes=nodes))
    )
    await commands.until(lambda said: len(said) == 2)
    assert commands.said[1] == ("lost", 5, "a digest of its rack said so")


async def test_registration_is_repeated_until_it_is_taken(
    bus: MemoryBus, commands: NotedCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_module, "_FIRST_PAUSE_S", 0.001)
    registering = asyncio.create_task(
        Control(bus, "n1", "r1", commands).register(NodeRegistration(node="n1"))
    )
    await asyncio.sleep(0)
    asked = 0

    def answer(message: Incoming) -> None:
        nonlocal asked
        asked += 1
        refused = NodeRegistered(epoch=0, shards=0, streams=0, error="not now")
        taken = NodeRegistered(epoch=2, shards=4, streams=1)
        bus.publish(message.reply, encode(refused if asked == 1 else taken))

    await bus.subscribe(CONTROL_REGISTER, answer)
    assert (await registering).epoch == 2


async def test_the_probe_port_answers_lines_with_node_and_epoch() -> None:
    epoch = 4
    port = ProbePort("n1", lambda: epoch)
    await port.start("127.0.0.1:0")
    host, number = port.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(number))
    writer.write(b"probe\n")
    assert await reader.readline() == b"corefleet n1 4\n"
    epoch = 5
    writer.write(b"probe\n")
    assert await reader.readline() == b"corefleet n1 5\n"
    with pytest.raises(PortInUse, match=number):
        await ProbePort("n2", lambda: 1).start(port.address)
    await port.close()
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


async def test_who_babbles_at_the_probe_port_is_cut_off() -> None:
    port = ProbePort("n1", lambda: 1)
    await port.start("127.0.0.1:0")
    host, number = port.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(number))
    writer.write(b"x" * 4096)
    assert await reader.read() == b""
    writer.close()
    await port.close()


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1:x", ":", "127.0.0.1:99999"])
async def test_a_probe_address_that_is_none_is_refused(listen: str) -> None:
    with pytest.raises(InvalidInput, match="probe_listen"):
        await ProbePort("n1", lambda: 1).start(listen)
