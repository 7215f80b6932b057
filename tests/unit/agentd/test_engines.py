"""Engines from agentd's side: ready with the first answer, stuck without one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentd import engines as engines_module
from agentd.engines import EngineWatch, engine_socket
from corefleet.background import Background
from corefleet.clock import SystemClock
from corefleet.link import Link, serve
from corefleet.messages.links import EngineAlive, EnginePing, WorkerToEngine


class Watched:
    def __init__(self) -> None:
        self.told: list[tuple[str, ...]] = []
        self.changed = asyncio.Event()
        self.errors: list[BaseException] = []
        self.background = Background(self.errors.append)
        self.watch = EngineWatch(0.2, self.ready, self.stuck, SystemClock(), self.background)

    def ready(self, instance: str) -> None:
        self.told.append(("ready", instance))
        self.changed.set()

    def stuck(self, instance: str, reason: str) -> None:
        self.told.append(("stuck", instance, reason))
        self.changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.told) < count:
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    watched = Watched()
    yield watched
    await watched.background.close()
    assert not watched.errors


class Engine:
    """Answers pings as long as `turns`; ends its link when told to."""

    def __init__(self) -> None:
        self.turns = True
        self.pings = 0
        self.asked = asyncio.Event()

    async def handle(self, link: Link[WorkerToEngine]) -> None:
        async for batch in link:
            for message in batch:
                if isinstance(message, EnginePing):
                    self.pings += 1
                    self.asked.set()
                    if self.turns:
                        link.send(EngineAlive(number=message.number))


async def test_an_engine_is_ready_when_it_answers_and_stuck_when_it_stops(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines_module, "PING_EVERY_S", 0.01)
    engine = Engine()
    path = engine_socket(tmp_path, "model", 0)
    watched.watch.watch("e1", path)
    server = await serve(path, WorkerToEngine, engine.handle)
    await watched.until(1)
    assert watched.told == [("ready", "e1")]
    engine.turns = False
    await watched.until(2)
    assert watched.told[1] == ("stuck", "e1", "its decode thread did not turn for 0 s")
    await server.close()


async def test_an_engine_that_hangs_up_is_stuck(watched: Watched, tmp_path: Path) -> None:
    engine = Engine()
    path = engine_socket(tmp_path, "model", 0)
    server = await serve(path, WorkerToEngine, engine.handle)
    watched.watch.watch("e1", path)
    await watched.until(1)
    await server.close()
    await watched.until(2)
    assert watched.told[1][:2] == ("stuck", "e1")


async def test_an_engine_whose_process_ended_is_watched_no_more(
    watched: Watched, tmp_path: Path
) -> None:
    engine = Engine()
    path = engine_socket(tmp_path, "model", 0)
    server = await serve(path, WorkerToEngine, engine.handle)
    watched.watch.watch("e1", path)
    await watched.until(1)
    watched.watch.forget("e1")
    await server.close()
    for _ in range(10):
        await asyncio.sleep(0)
    assert watched.told == [("ready", "e1")]


def test_sockets_are_short_and_differ(tmp_path: Path) -> None:
    one = engine_socket(tmp_path, "m" * 200, 0)
    assert len(one.name) < 30
    assert len({one, engine_socket(tmp_path, "m" * 200, 1), engine_socket(tmp_path, "n", 0)}) == 3
