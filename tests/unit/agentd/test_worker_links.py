"""agentd's socket for workers: greeting, refusals, frames, signs of life."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentd import links as links_module
from agentd.links import WorkerLinks
from corefleet.clock import ManualClock
from corefleet.errors import Unavailable
from corefleet.link import Link, connect
from corefleet.messages.links import (
    LINK_VERSION,
    AgentdToWorker,
    Frame,
    Ping,
    ReturnTask,
    StepsAppended,
    Stop,
    Welcome,
    WelcomeBack,
    WorkerAlive,
    WorkerHello,
    WorkerToAgentd,
)
from corefleet.messages.records import PoolSpec, TaskRecord
from corefleet.messages.wire import Assignment

WELCOME = Welcome(node="n1", domain=0, pool=PoolSpec(name="p"))
HELLO = WorkerHello(version=LINK_VERSION, worker="w1", pid=1)


class NotedCrew:
    def __init__(self) -> None:
        self.events: list[tuple[str, object]] = []
        self.changed = asyncio.Event()

    def note(self, worker: str, what: object) -> None:
        self.events.append((worker, what))
        self.changed.set()

    def ready(self, worker: str) -> None:
        self.note(worker, "ready")

    def came_back(self, worker: str, held: tuple[Assignment, ...]) -> None:
        self.note(worker, ("came back", held))

    def said(self, worker: str, message: WorkerToAgentd) -> None:
        self.note(worker, message)

    def leaving(self, worker: str) -> None:
        self.note(worker, "leaving")

    def parted(self, worker: str) -> None:
        self.note(worker, "parted")

    def stuck(self, worker: str, reason: str) -> None:
        self.note(worker, ("stuck", reason))

    async def until(self, worker: str, what: object) -> None:
        async with asyncio.timeout(5):
            while (worker, what) not in self.events:
                self.changed.clear()
                await self.changed.wait()


class Room:
    def __init__(self, path: Path) -> None:
        self.crew = NotedCrew()
        self.clock = ManualClock()
        self.links = WorkerLinks(path, self.crew, self.clock)
        self.peers: list[Link[AgentdToWorker]] = []

    async def join(self, *frames: Frame) -> Link[AgentdToWorker]:
        peer: Link[AgentdToWorker] = await connect(self.links.path, AgentdToWorker, 2.0)
        self.peers.append(peer)
        for frame in frames:
            peer.send(frame)
        return peer


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    room = Room(tmp_path / "w.sock")
    await room.links.start()
    room.links.expect("w1", WELCOME)
    yield room
    for peer in room.peers:
        await peer.close()
    await room.links.close()


async def test_a_worker_is_welcomed_and_ready_with_its_first_sign_of_life(room: Room) -> None:
    peer = await room.join(HELLO)
    assert await peer.receive() == (WELCOME, Ping(number=1))
    assert room.crew.events == []
    peer.send(WorkerAlive(number=1))
    await room.crew.until("w1", "ready")


async def test_frames_pass_both_ways_and_the_end_is_told(room: Room) -> None:
    peer = await room.join(HELLO)
    await peer.receive()
    frame = ReturnTask(task="t", attempt=1, reason="r")
    peer.send(frame)
    await room.crew.until("w1", frame)
    assert room.links.send("w1", StepsAppended(task="t", attempt=1))
    assert await peer.receive() == (StepsAppended(task="t", attempt=1),)
    assert room.links.stop("w1", "enough", 2.0)
    assert await peer.receive() == (Stop(reason="enough", grace_s=2.0),)
    assert ("w1", "leaving") in room.crew.events
    await peer.close()
    await room.crew.until("w1", "parted")
    assert not room.links.send("w1", StepsAppended(task="t", attempt=1))


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (WorkerHello(version=99, worker="w1", pid=1), "version 99"),
        (WorkerHello(version=LINK_VERSION, worker="w9", pid=1), "no worker w9"),
        (WorkerAlive(number=1), "expected WorkerHello"),
    ],
)
async def test_who_does_not_belong_here_is_told_why(room: Room, first: Frame, reason: str) -> None:
    peer = await room.join(first)
    (stop,) = await peer.receive()
    assert isinstance(stop, Stop)
    assert reason in stop.reason
    with pytest.raises(Unavailable):
        await peer.receive()
    assert room.crew.events == []


async def test_a_second_worker_of_the_same_name_is_refused(room: Room) -> None:
    peer = await room.join(HELLO)
    await peer.receive()
    second = await room.join(HELLO)
    (stop,) = await second.receive()
    assert isinstance(stop, Stop)
    assert "connected already" in stop.reason


async def test_a_loop_that_does_not_turn_is_found(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links_module, "PING_EVERY_S", 0.01)
    await room.links.close()
    await room.links.start()
    peer = await room.join(HELLO)
    await peer.receive()
    peer.send(WorkerAlive(number=1))
    assert await peer.receive() == (Ping(number=2),)
    room.clock.advance(links_module.STUCK_AFTER_S + 1)
    await room.crew.until("w1", ("stuck", "its loop did not turn for 21 s"))


async def test_a_process_that_ended_has_no_link_any_more(room: Room) -> None:
    peer = await room.join(HELLO)
    await peer.receive()
    room.links.forget("w1")
    await room.crew.until("w1", "parted")
    with pytest.raises(Unavailable):
        await peer.receive()


HELD = Assignment(
    record=TaskRecord(task="t", pool="p", session="s", request_id="r", input=""),
    revision=7,
    create_seq=7,
)


async def test_a_worker_of_an_earlier_agentd_is_welcomed_back_with_what_it_runs(room: Room) -> None:
    room.links.expect_back("w2")
    gathered = asyncio.create_task(room.links.gathered(30.0))
    hello = WorkerHello(version=LINK_VERSION, worker="w2", pid=1, held=(HELD,))
    peer = await room.join(hello)
    assert await peer.receive() == (WelcomeBack(), Ping(number=1))
    assert room.crew.events == [("w2", ("came back", (HELD,)))]
    assert await gathered == ()


async def test_workers_that_do_not_come_back_are_named_and_not_waited_for_when_dead(
    room: Room,
) -> None:
    room.links.expect_back("w2")
    assert await room.links.gathered(0.01) == ("w2",)
    waiting = asyncio.create_task(room.links.gathered(30.0))
    room.links.forget("w2")
    assert await waiting == ()


async def test_a_worker_that_lost_this_agentd_with_attempts_is_not_taken_back(room: Room) -> None:
    hello = WorkerHello(version=LINK_VERSION, worker="w1", pid=1, held=(HELD,))
    peer = await room.join(hello)
    (refusal,) = await peer.receive()
    assert isinstance(refusal, Stop)
    assert "given up" in refusal.reason
