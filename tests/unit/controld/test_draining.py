"""Drains in a control plane in one process: begun, watched, ended, and by prediction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from corefleet.client import Client
from corefleet.codec import decode
from corefleet.errors import InvalidInput, NotFound
from corefleet.messages.records import Drain, NodeRegistration
from corefleet.rpc import fleet_pb2, tasks_pb2
from corefleet.subjects import drain_key, node_key
from tests.integration.fake_node import FakeNode, Gate
from tests.unit.controld.plane import SETTINGS, Plane, Running


@pytest.fixture
async def controlds(plane: Plane) -> AsyncIterator[list[Running]]:
    running = [await plane.controld(name) for name in ("c1", "c2")]
    yield running
    for each in running:
        await each.stop()


@pytest.fixture
async def client(controlds: list[Running]) -> AsyncIterator[Client]:
    async with Client(controlds[0].address, timeout_s=5.0) as made:
        async with asyncio.timeout(10):
            while True:
                owned = sum(len(each.shards) for each in await made.controlds())
                if owned == SETTINGS.shards:
                    break
                await asyncio.sleep(0.01)
        yield made


async def until(
    client: Client, node: str, holds: Callable[[fleet_pb2.DrainProgress], bool]
) -> fleet_pb2.DrainProgress:
    """Return the first progress for which `holds` is true."""
    async with asyncio.timeout(10):
        async for progress in client.watch_drain(node, interval_s=0.1):
            if holds(progress):
                return progress
    raise AssertionError(f"the watch ended with {progress}")


async def shown(
    client: Client,
    node: str,
    state: str,
    holds: Callable[[fleet_pb2.Node], bool] = lambda found: True,
) -> fleet_pb2.Node:
    """Return the node once it is shown in `state`, and `holds` is true of it."""
    async with asyncio.timeout(10):
        while True:
            for found in await client.nodes():
                if (found.node, found.state) == (node, state) and holds(found):
                    return found
            await asyncio.sleep(0.02)


async def run(client: Client) -> tasks_pb2.Task:
    async with asyncio.timeout(10):
        return [event async for event in client.run("p", "x")][-1].finished


async def test_a_drained_node_gets_nothing_and_an_undrained_one_everything(
    plane: Plane, client: Client
) -> None:
    async with FakeNode(plane.connect(), "n1") as one, FakeNode(plane.connect(), "n2"):
        await shown(client, "n1", "ready")
        await shown(client, "n2", "ready")
        made = await client.drain_node("n1", reason="new memory", by="ada", deadline_s=60)
        assert (made.reason, made.by) == ("new memory", "ada")
        assert made.deadline_ms == made.at_ms + 60_000
        stored = await plane.store.get(drain_key("n1"))
        assert stored is not None
        assert decode(stored.value, Drain).by == "ada"
        done = await until(client, "n1", lambda progress: progress.drained)
        assert (list(done.left), done.waits_for) == ([], "")
        found = await shown(client, "n1", "draining")
        assert (found.drain.reason, found.drain.waits) == ("new memory", False)
        for _ in range(20):
            assert (await run(client)).node == "n2"
        ended = await client.undrain_node("n1")
        assert (ended.ended.reason, ended.HasField("stands")) == ("new memory", False)
        assert not (await client.undrain_node("n1")).HasField("ended")
        await shown(client, "n1", "ready")
        await client.drain_node("n2")
        await until(client, "n2", lambda progress: progress.drained)
        assert (await run(client)).node == "n1"
        assert len(one.taken) == 1


async def test_the_watch_names_what_is_left_and_why_and_ends_when_nothing_is(
    plane: Plane, client: Client
) -> None:
    gate = Gate()
    async with FakeNode(plane.connect(), "n1", run=gate.run) as node:
        node.yields = False
        accepted = await client.submit("p", "x", session="s1")
        await asyncio.wait_for(gate.running.wait(), 10)
        began = await client.drain_node("n1")
        progress = await until(
            client, "n1", lambda progress: any(each.asked_ms_ago for each in progress.left)
        )
        (left,) = progress.left
        assert (left.task, left.pool, left.session) == (accepted.task, "p", "s1")
        assert (left.state, left.attempt) == ("running", 1)
        assert "to yield at its next step boundary" in left.reason
        assert left.asked_ms_ago <= progress.at_ms - began.at_ms
        assert not progress.drained
        assert progress.waits_for == "1 attempts are left"
        again = await client.drain_node("n1", reason="hurry", deadline_s=30)
        assert again.at_ms == began.at_ms, "it began when it was said first"
        progress = await until(client, "n1", lambda progress: progress.drain.reason == "hurry")
        assert progress.drain.deadline_ms == again.deadline_ms
        gate.through.set()
        await until(client, "n1", lambda progress: progress.drained)


async def test_a_drain_that_somebody_ended_ends_the_watch(plane: Plane, client: Client) -> None:
    gate = Gate()
    async with FakeNode(plane.connect(), "n1", run=gate.run) as node:
        node.yields = False
        await client.submit("p", "x")
        await asyncio.wait_for(gate.running.wait(), 10)
        await client.drain_node("n1")
        await until(client, "n1", lambda progress: bool(progress.left))
        await client.undrain_node("n1")
        seen = [each async for each in client.watch_drain("n1", interval_s=0.1)]
        assert not seen[-1].HasField("drain")
        assert not seen[-1].drained
        gate.through.set()


async def test_a_node_that_says_it_is_at_work_is_not_drained(plane: Plane, client: Client) -> None:
    async with FakeNode(plane.connect(), "n1") as node:
        await shown(client, "n1", "ready")
        node.held["one that its owner took away"] = (1, asyncio.ensure_future(asyncio.sleep(0)))
        await shown(client, "n1", "ready", lambda found: found.running == 1)
        await client.drain_node("n1")
        progress = await until(client, "n1", lambda progress: True)
        assert (progress.drained, list(progress.left)) == (False, [])
        await until(
            client, "n1", lambda progress: progress.waits_for == "the node still ends 1 attempts"
        )
        node.held.clear()
        await until(client, "n1", lambda progress: progress.drained)


async def test_what_runs_there_moves_when_its_node_is_at_a_boundary(
    plane: Plane, client: Client
) -> None:
    gate, passing = Gate(), Gate()
    passing.through.set()
    async with FakeNode(plane.connect(), "n1", run=gate.run) as one:
        await client.submit("p", "x", session="s1")
        accepted = await client.submit("p", "x", session="s2")
        await shown(client, "n1", "ready", lambda found: found.running == 2)
        async with FakeNode(plane.connect(), "n2", run=passing.run) as two:
            await shown(client, "n2", "ready")
            await client.drain_node("n1", reason="new memory")
            await until(client, "n1", lambda progress: progress.drained)
            async for event in client.watch(accepted.task):
                if event.HasField("finished"):
                    assert event.finished.output == "n2 2"
            assert {reason for _, _, reason in one.wanted} == {"draining: new memory"}
            assert {attempt for _, attempt in two.taken} == {2}


async def test_at_the_deadline_what_is_left_is_moved_and_told_to_stop(
    plane: Plane, client: Client
) -> None:
    gate, passing = Gate(), Gate()
    passing.through.set()
    async with FakeNode(plane.connect(), "n1", run=gate.run) as one:
        one.yields = False
        accepted = await client.submit("p", "x")
        await asyncio.wait_for(gate.running.wait(), 10)
        async with FakeNode(plane.connect(), "n2", run=passing.run):
            await shown(client, "n2", "ready")
            drain = await client.drain_node("n1", deadline_s=1)
            done = await until(client, "n1", lambda progress: progress.drained)
            assert done.at_ms >= drain.deadline_ms
            async for event in client.watch(accepted.task):
                if event.HasField("finished"):
                    assert (event.finished.node, event.finished.attempt) == ("n2", 2)
            assert one.dropped == [(accepted.task, 1)]


async def test_whoever_takes_a_shard_over_goes_on_with_the_drain(
    plane: Plane, controlds: list[Running], client: Client
) -> None:
    gate = Gate()
    async with (
        FakeNode(plane.connect(), "n1", run=gate.run) as one,
        Client(controlds[1].address) as other,
    ):
        one.yields = False
        tasks = {(await client.submit("p", "x", session=f"s{i}")).task for i in range(16)}
        await shown(client, "n1", "ready", lambda found: found.running == 16)
        await client.drain_node("n1")
        await controlds[0].stop()
        one.wanted.clear()
        async with asyncio.timeout(20):
            while {task for task, _, _ in one.wanted} != tasks:
                one.asked.clear()
                await one.asked.wait()
        progress = await until(other, "n1", lambda progress: len(progress.left) == 16)
        assert {left.task for left in progress.left} == tasks
        gate.through.set()
        await until(other, "n1", lambda progress: progress.drained)


async def test_names_that_are_none_are_refused(plane: Plane, client: Client) -> None:
    for call in (client.drain_node, client.undrain_node):
        with pytest.raises(NotFound, match="n7"):
            await call("n7")
        with pytest.raises(InvalidInput, match="node"):
            await call("n 7")
    with pytest.raises(NotFound, match="n7"):
        await until(client, "n7", lambda progress: True)


async def test_nodes_that_ask_are_avoided_at_once_and_one_after_the_other_drained(
    plane: Plane, client: Client
) -> None:
    async with (
        FakeNode(plane.connect(), "n1") as one,
        FakeNode(plane.connect(), "n2") as two,
        FakeNode(plane.connect(), "n3"),
    ):
        for name in ("n1", "n2", "n3"):
            await shown(client, name, "ready")
        await two.feel("heat, package 0: 9 a minute")
        first = await shown(client, "n2", "draining")
        assert (first.drain.reason, first.drain.by) == ("heat, package 0: 9 a minute", "")
        assert not first.drain.waits
        await one.feel("disk full")
        assert (await shown(client, "n1", "draining")).drain.waits, "one node of three at a time"
        assert (await run(client)).node == "n3"
        await until(client, "n2", lambda progress: progress.drained)

        key = await plane.store.get(node_key("n2"))
        assert key is not None
        since_ms = decode(key.value, NodeRegistration).draining_since_ms
        await two.feel("heat, package 0: 12 a minute")
        key = await plane.store.get(node_key("n2"))
        assert key is not None
        assert decode(key.value, NodeRegistration).draining_since_ms == since_ms > 0

        stands = (await client.undrain_node("n2")).stands
        assert stands.reason == "heat, package 0: 12 a minute", "its health has the last word"
        await two.feel("")
        assert not (await shown(client, "n2", "ready")).HasField("drain")
        await shown(client, "n1", "draining", lambda found: not found.drain.waits)
        assert {(await run(client)).node for _ in range(20)} <= {"n2", "n3"}
