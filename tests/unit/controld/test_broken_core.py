"""A shard whose core is wrong begins anew; its controld and the other shards go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from controld import shards
from controld.core.shard import ShardCore
from controld.core.shard_io import Action, Event, RecordStored
from corefleet.client import Client
from corefleet.errors import IllegalTransition
from tests.integration.fake_node import FakeNode
from tests.unit.controld.plane import Plane


class Breaking:
    """Makes the core of whichever shard is shown session `bad`, live, break so many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.left = times
        self.epochs: list[tuple[int, int]] = []
        self.done = asyncio.Event()
        handle = ShardCore.handle

        def breaking(core: ShardCore, event: Event, now: float, wall_ms: int) -> list[Action]:
            bad = isinstance(event, RecordStored) and event.record.session == "bad"
            if bad and core.live and self.left:
                self.left -= 1
                self.epochs.append((core._state.shard, core._state.epoch))
                if not self.left:
                    self.done.set()
                raise IllegalTransition("task t", "running", "placing", "0.000 queued")
            return handle(core, event, now, wall_ms)

        monkeypatch.setattr(ShardCore, "handle", breaking)


@pytest.fixture
async def client(plane: Plane) -> AsyncIterator[Client]:
    running = await plane.controld("c1")
    async with Client(running.address) as made, FakeNode(plane.connect(), "n1"):
        yield made
    await running.stop()


async def finish(client: Client, session: str) -> str:
    async with asyncio.timeout(20):
        events = [event async for event in client.run("p", "hello", session=session)]
    return events[-1].finished.output


async def test_its_tasks_are_done_by_a_core_made_anew_at_the_same_epoch(
    plane: Plane, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking = Breaking(monkeypatch, times=2)
    assert await finish(client, "bad") == "hello"
    assert breaking.left == 0
    assert len(set(breaking.epochs)) == 1


async def test_one_that_breaks_again_and_again_rests_while_the_others_go_on(
    plane: Plane, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_BREAK_PAUSE_S", 0.5)
    breaking = Breaking(monkeypatch, times=3)
    bad = asyncio.create_task(finish(client, "bad"))
    async with asyncio.timeout(20):
        await breaking.done.wait()
    for number in range(8):
        assert await finish(client, f"s{number}") == "hello"
    assert await bad == "hello"
