"""The overview over controlds in one process, and what they count of their own moves."""

from __future__ import annotations

import asyncio
import time
from random import Random

from controld.core.ownership import OwnershipCore
from controld.core.ownership_io import (
    Claim,
    ClaimWon,
    LeaseValidity,
    MembersSeen,
    OwnershipTick,
    UnitsKnown,
)
from controld.gauges import make_gauges
from controld.moves import Moves
from controld.overview import ANSWER_S
from corefleet.client import Client
from corefleet.codec import encode
from corefleet.messages.records import ControldRegistration
from corefleet.metrics import Metrics
from corefleet.rpc import fleet_pb2
from corefleet.subjects import controld_key
from tests.integration.fake_node import FakeNode
from tests.unit.controld.plane import SETTINGS, Plane


async def settled(client: Client, controlds: int) -> None:
    """Return once all shards are decided for, by `controlds` of them."""
    async with asyncio.timeout(20):
        while True:
            told = (await client.overview()).controlds
            shares = [each.shards for each in told if each.answered]
            if len(shares) == controlds and all(shares) and sum(shares) == SETTINGS.shards:
                return
            await asyncio.sleep(0.02)


async def counts(client: Client) -> dict[str, fleet_pb2.PoolCounts]:
    reply = await client.overview()
    return {each.controld: pool for each in reply.controlds for pool in each.pools}


async def finished(client: Client, tasks: int) -> None:
    """Return once so many tasks were seen to end."""
    while True:
        if sum(each.finished for each in (await counts(client)).values()) >= tasks:
            return
        await asyncio.sleep(0.01)


async def test_every_controld_tells_what_it_counted(plane: Plane) -> None:
    one, two = await plane.controld("c1"), await plane.controld("c2")
    try:
        async with Client(one.address) as client:
            await settled(client, 2)
            async with FakeNode(plane.connect(), "n1"):
                async with asyncio.timeout(20):
                    for session in range(12):
                        async for _ in client.run("p", "x", session=f"s{session}"):
                            pass
                    await finished(client, 12)
                told = await counts(client)
            assert told.keys() == {"c1", "c2"}
            assert all(each.placed for each in told.values())
            assert sum(each.placed for each in told.values()) == 12
            assert sum(each.home["new"] for each in told.values()) == 12
            assert sum(sum(each.waits) for each in told.values()) == 12
    finally:
        await two.stop()
        await one.stop()


async def test_a_controld_that_does_not_answer_is_named_after_half_a_second(
    plane: Plane,
) -> None:
    one = await plane.controld("c1")
    try:
        async with Client(one.address) as client:
            await settled(client, 1)
            ghost = ControldRegistration(controld="ghost", address=one.address)
            await plane.store.put(controld_key("ghost"), encode(ghost))
            async with asyncio.timeout(10):
                while True:
                    begun = time.monotonic()
                    told = {each.controld: each for each in (await client.overview()).controlds}
                    took = time.monotonic() - begun
                    if "ghost" in told:
                        break
            assert told["c1"].answered
            assert not told["ghost"].answered
            assert took >= ANSWER_S
            first, second = await asyncio.gather(client.overview(), client.overview())
            assert first.at_ms == second.at_ms, "callers at once share a round"
    finally:
        await one.stop()


def test_units_won_and_left_are_counted_by_why() -> None:
    metrics = Metrics()
    moves = Moves(make_gauges(metrics))
    core = OwnershipCore("c1", Random(1))
    now = 10.0

    def feed(*events: object) -> None:
        for event in events:
            for action in core.handle(event, now):  # type: ignore[arg-type]
                moves.count(action)
                if isinstance(action, Claim):
                    feed(ClaimWon(action.unit, action.epoch, action.epoch))

    units = frozenset(f"shard/{number}" for number in range(8))
    feed(LeaseValidity(1e9), MembersSeen(frozenset({"c1"})), UnitsKnown(units), OwnershipTick())
    assert _count(metrics, "won", kind="shard", source="free") == 8
    feed(MembersSeen(frozenset({"c1", "c2"})))
    for _ in range(40):
        now += 0.5
        feed(OwnershipTick())
    given = _count(metrics, "left", kind="shard", reason="given")
    assert 0 < given < 8
    feed(LeaseValidity(0.0))
    assert _count(metrics, "left", kind="shard", reason="lease") == 8 - given
    assert _count(metrics, "left", kind="shard", reason="other") == 0


def _count(metrics: Metrics, what: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"corefleet_units_{what}_total", labels) or 0.0
