"""A worker that lost its agentd: it finds the next one, or ends when none comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agentd.worker.uplink import Uplink
from corefleet.link import Link, connect, serve
from corefleet.messages.links import (
    AgentdToWorker,
    AppendSteps,
    EmitEvents,
    Ping,
    RunResumed,
    SendMessage,
    Stop,
    WelcomeBack,
    WorkerHello,
    WorkerToAgentd,
)
from corefleet.messages.records import TaskRecord
from corefleet.messages.wire import Assignment

HELD = Assignment(
    record=TaskRecord(task="t", pool="p", session="s", request_id="r", input="", attempt=1),
    revision=7,
    create_seq=7,
)
APPEND = AppendSteps(task="t", attempt=1, steps=())
EMIT = EmitEvents(task="t", attempt=1, events=())
SUBMIT = SendMessage(call=1, pool="p", session="s", request_id="r", input="")

Serve = Callable[[Link[WorkerToAgentd]], Awaitable[None]]


@asynccontextmanager
async def agentd(path: Path, handler: Serve) -> AsyncIterator[None]:
    server = await serve(path, WorkerToAgentd, handler)
    try:
        yield
    finally:
        await server.close()


async def worker(path: Path, orphan_s: float) -> Uplink:
    """Return the uplink of a worker that an agentd on `path` takes."""

    async def first(link: Link[WorkerToAgentd]) -> None:
        link.send(Ping(number=1))
        async for _ in link:
            pass

    async with agentd(path, first):
        link: Link[AgentdToWorker] = await connect(path, AgentdToWorker, 5.0)
        uplink = Uplink(link, path, "w1", orphan_s, lambda: (HELD,))
        frames = uplink.frames()
        assert await anext(frames) == (Ping(number=1),)
        uplink.send(APPEND)
        uplink.send(SUBMIT)
        await link.drain()
    return uplink


async def test_what_was_not_answered_is_told_to_the_next_agentd_once_it_carries_on(
    tmp_path: Path,
) -> None:
    path = tmp_path / "w.sock"
    uplink = await worker(path, 30.0)
    uplink_said: list[Any] = []
    over = asyncio.Event()

    async def second(link: Link[WorkerToAgentd]) -> None:
        uplink_said.extend(await link.receive())
        link.send(WelcomeBack())
        uplink_said.extend(await link.receive())
        link.send(RunResumed(task="t", attempt=1))
        uplink_said.extend(await link.receive())
        link.send(Stop(reason="seen enough"))
        await over.wait()

    async with asyncio.timeout(20), agentd(path, second):
        async for batch in uplink.frames():
            if Stop(reason="seen enough") in batch:
                break
        over.set()
    await uplink.close()
    hello, submission, append = uplink_said
    assert isinstance(hello, WorkerHello)
    assert (hello.worker, hello.held) == ("w1", (HELD,))
    assert (submission, append) == (SUBMIT, APPEND)


async def test_an_agentd_that_does_not_want_the_worker_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "w.sock"
    uplink = await worker(path, 30.0)

    async def refuses(link: Link[WorkerToAgentd]) -> None:
        await link.receive()
        link.send(Stop(reason="no worker w1 was started here"))
        await link.close()

    async with asyncio.timeout(20), agentd(path, refuses):
        assert [batch async for batch in uplink.frames()] == []
    await uplink.close()


async def test_rule_7_without_an_agentd_the_worker_ends_when_its_time_is_over(
    tmp_path: Path,
) -> None:
    uplink = await worker(tmp_path / "w.sock", 0.3)
    before = time.monotonic()
    uplink.send(EMIT)
    async with asyncio.timeout(20):
        assert [batch async for batch in uplink.frames()] == []
    assert time.monotonic() - before < 10
    await uplink.close()


async def test_a_worker_that_dies_with_its_agentd_looks_for_no_other(tmp_path: Path) -> None:
    for orphan_s, stopped in ((0.0, False), (30.0, True)):
        uplink = await worker(tmp_path / "w.sock", orphan_s)
        if stopped:
            uplink.stop_looking()
        async with asyncio.timeout(5):
            assert [batch async for batch in uplink.frames()] == []
        await uplink.close()
