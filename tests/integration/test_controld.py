"""Two real controlds on real etcd and NATS, with small fake nodes in the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from corefleet.client import Client
from corefleet.errors import Conflict, CorefleetError
from corefleet.ids import shard_of_task
from corefleet.rpc import tasks_pb2
from tests.integration.control_plane import (
    POOL,
    ControlPlane,
    all_owned,
    events_until,
    first_step,
    node_state,
)
from tests.integration.fake_node import FakeNode, Gate
from tests.servers.controld import ControldServer


async def test_a_task_is_placed_and_finished(plane: ControlPlane, client: Client) -> None:
    async with FakeNode(plane.nats.url, "n1") as node:
        assert node.pools["p"].slots == 64
        seen = [event async for event in client.run("p", "hello", session="alice")]
        finished = seen[-1].finished
        assert "placed" in [event.WhichOneof("what") for event in seen]
        assert (finished.state, finished.output) == (tasks_pb2.TASK_STATE_DONE, "hello")
        assert (finished.node, finished.attempt) == ("n1", 1)
        again = await client.get(finished.task)
        assert (again.state, again.output) == (tasks_pb2.TASK_STATE_DONE, "hello")
        watched = [e.WhichOneof("what") async for e in client.watch(finished.task)]
        assert watched == ["snapshot", "finished"]


async def test_many_tasks_over_all_shards_end_once_each(
    plane: ControlPlane, client: Client
) -> None:
    requests = [Client.request("p", f"input {n}", follow=True) for n in range(300)]
    async with FakeNode(plane.nats.url, "n1") as one, FakeNode(plane.nats.url, "n2") as two:
        outputs = {}
        async for event in client.submit_many(requests):
            assert not event.HasField("refused"), event.refused
            if event.HasField("event") and event.event.HasField("finished"):
                assert event.request_id not in outputs
                outputs[event.request_id] = event.event.finished.output
    assert outputs == {request.request_id: request.input.decode() for request in requests}
    assert len(one.taken) + len(two.taken) == 300
    assert one.again + two.again == []
    assert one.taken
    assert two.taken


async def test_the_same_request_id_is_the_same_task(client: Client) -> None:
    first = await client.submit("p", "once", session="dup", request_id="my-own-id")
    second = await client.submit("p", "once", session="dup", request_id="my-own-id")
    assert not first.duplicate
    assert second.duplicate
    assert second.task == first.task
    with pytest.raises(Conflict, match="request_id"):
        await client.submit("p", "another", session="dup", request_id="my-own-id")
    await client.cancel(first.task)


async def test_without_a_node_it_waits_and_says_why(plane: ControlPlane, client: Client) -> None:
    await client.apply_pool("lonely", POOL)
    made = await client.submit("lonely", "x")
    task = await client.get(made.task)
    assert task.state == tasks_pb2.TASK_STATE_QUEUED
    assert "lonely" in task.reason
    listed = await client.list(pool="lonely")
    assert [each.task for each in listed.tasks] == [made.task]
    explained = await client.explain(made.task)
    assert "lonely" in explained.why
    async with FakeNode(plane.nats.url, "n1", pool="lonely"):
        seen = await events_until(client, made.task, "finished")
    assert seen[-1].finished.node == "n1"


async def test_a_queued_task_can_be_cancelled_once(client: Client) -> None:
    await client.apply_pool("nobody", POOL)
    made = await client.submit("nobody", "x")
    cancelled = await client.cancel(made.task, "changed my mind")
    assert cancelled.state == tasks_pb2.TASK_STATE_CANCELLED
    assert "changed my mind" in cancelled.failure.message
    with pytest.raises(Conflict, match="ended before, as cancelled"):
        await client.cancel(made.task)


async def test_a_running_task_can_be_cancelled(plane: ControlPlane, client: Client) -> None:
    gate = Gate()
    async with FakeNode(plane.nats.url, "n1", run=gate.run) as node:
        made = await client.submit("p", "x")
        await first_step(client, made.task)
        assert (await client.get(made.task)).state == tasks_pb2.TASK_STATE_RUNNING
        cancelled = await client.cancel(made.task)
        assert cancelled.state == tasks_pb2.TASK_STATE_CANCELLED
        gate.through.set()
        async with asyncio.timeout(5):
            await node.over.wait()
    assert (await client.get(made.task)).state == tasks_pb2.TASK_STATE_CANCELLED


async def test_tasks_of_one_session_run_in_order(plane: ControlPlane, client: Client) -> None:
    requests = [Client.request("p", str(n), session="ordered", follow=True) for n in range(20)]
    tasks = []
    for request in requests:
        made = await client.submit(
            "p", request.input, session="ordered", request_id=request.request_id
        )
        tasks.append(made.task)
    async with FakeNode(plane.nats.url, "n1") as node:
        for task in tasks:
            await events_until(client, task, "finished")
        assert [task for task, _ in node.taken] == tasks


async def test_a_silent_node_is_found_lost_and_its_task_goes_on_elsewhere(
    plane: ControlPlane, client: Client
) -> None:
    gate = Gate()
    async with AsyncExitStack() as stack:
        nodes = {
            name: await stack.enter_async_context(FakeNode(plane.nats.url, name, run=gate.run))
            for name in ("gone1", "gone2")
        }
        for name in nodes:
            await node_state(client, name, "ready")
        made = await client.submit("p", "x")
        first = (await first_step(client, made.task)).name
        gate.running.clear()
        died_at = time.monotonic()
        await nodes[first].die()
        async with asyncio.timeout(5):
            await gate.running.wait()
        gap = time.monotonic() - died_at
        gate.through.set()
        finished = (await events_until(client, made.task, "finished"))[-1].finished
        assert finished.attempt == 2
        assert finished.node != first
        assert gap < 1.5
        assert (await node_state(client, first, "lost")).node == first


async def test_an_attempt_that_was_replaced_can_write_no_more(
    plane: ControlPlane, client: Client
) -> None:
    gate = Gate()
    late = Gate()
    async with FakeNode(plane.nats.url, "stuck", run=late.run) as stuck:
        made = await client.submit("p", "x", session="fenced")
        await first_step(client, made.task)
        async with FakeNode(plane.nats.url, "other", run=gate.run):
            await stuck.fall_silent()
            async with asyncio.timeout(5):
                await gate.running.wait()
            late.through.set()
            async with asyncio.timeout(5):
                await stuck.over.wait()
            gate.through.set()
            finished = (await events_until(client, made.task, "finished"))[-1].finished
    assert (finished.attempt, finished.output) == (2, "other 2")


async def test_a_node_that_registers_again_has_a_higher_epoch(plane: ControlPlane) -> None:
    async with FakeNode(plane.nats.url, "twice") as first:
        assert first.epoch >= 1
    async with FakeNode(plane.nats.url, "twice") as second:
        assert second.epoch > first.epoch


@pytest.fixture
async def third(plane: ControlPlane, client: Client) -> AsyncIterator[ControldServer]:
    """A third controld that owns its share: one that a test may kill, freeze or stop."""
    server = plane.controld("c3")
    try:
        await asyncio.to_thread(server.start)
        await all_owned(client, controlds=3)
        yield server
    finally:
        await asyncio.to_thread(server.end)
        await all_owned(client)


async def test_shards_of_a_killed_controld_are_taken_over(
    plane: ControlPlane, client: Client, third: ControldServer
) -> None:
    owners = await all_owned(client, controlds=3)
    gate = Gate()
    async with FakeNode(plane.nats.url, "n1", run=gate.run):
        await node_state(client, "n1", "ready")
        made = await owned_task(client, owners, "c3")
        await first_step(client, made.task)
        killed_at = time.monotonic()
        await asyncio.to_thread(third.kill)
        async with asyncio.timeout(10):
            while True:
                with contextlib.suppress(CorefleetError):
                    if (await client.explain(made.task)).chosen:
                        break
        took = time.monotonic() - killed_at
        await all_owned(client)
        gate.through.set()
        finished = (await events_until(client, made.task, "finished"))[-1].finished
        assert (finished.state, finished.attempt) == (tasks_pb2.TASK_STATE_DONE, 1)
        after = [event async for event in client.run("p", "after", session=made.session)]
        assert after[-1].finished.state == tasks_pb2.TASK_STATE_DONE
        assert took < 4


async def test_a_killed_controlds_peers_do_not_wait_for_its_lease(
    plane: ControlPlane, client: Client
) -> None:
    """Rule 12: its port refuses, so it is dead, and its registration goes at once."""
    async with AsyncExitStack() as stack:
        third = stack.enter_context(plane.controld("c3", lease_ttl_s=60.0))
        owners = await all_owned(client, 3)
        assert "c3" in owners.values()
        third.kill()
        # all_owned gives up long before the lease of c3 is over.
        assert "c3" not in (await all_owned(client, 2)).values()
        again = stack.enter_context(plane.controld("c3", lease_ttl_s=60.0))
        assert "c3" in (await all_owned(client, 3)).values()
        await asyncio.to_thread(again.stop)
        await all_owned(client, 2)


async def test_a_watch_outlives_the_controld_that_serves_it(
    plane: ControlPlane, client: Client, third: ControldServer
) -> None:
    gate = Gate()
    async with (
        FakeNode(plane.nats.url, "n1", run=gate.run),
        Client([third.address, *plane.addresses]) as mine,
    ):
        mine.prefer(third.address)
        seen = []
        async for event in mine.run("p", "x"):
            seen.append(event.WhichOneof("what"))
            if seen[-1] == "step":
                await asyncio.to_thread(third.kill)
                gate.through.set()
        assert seen[-1] == "finished"
        assert "snapshot" in seen


async def test_a_controld_that_was_frozen_decides_nothing_when_it_wakes_up(
    plane: ControlPlane, client: Client, third: ControldServer
) -> None:
    owners = await all_owned(client, controlds=3)
    async with FakeNode(plane.nats.url, "n1") as node:
        await node_state(client, "n1", "ready")
        third.freeze()
        try:
            await all_owned(client)
            tasks = [
                (await client.submit("p", "x", session=f"frozen-{number}")).task
                for number in range(48)
            ]
            assert {owners[shard_of_task(task)] for task in tasks} == {"c1", "c2", "c3"}
            for task in tasks:
                await events_until(client, task, "finished")
        finally:
            third.thaw()
        await all_owned(client, controlds=3)
        assert sorted(node.taken) == sorted((task, 1) for task in tasks)
        after = [event async for event in client.run("p", "after")]
        assert after[-1].finished.state == tasks_pb2.TASK_STATE_DONE


async def test_a_stopped_controld_gives_its_shards_up_at_once(
    client: Client, third: ControldServer
) -> None:
    stopped_at = time.monotonic()
    assert await asyncio.to_thread(third.stop) == 0
    await all_owned(client)
    assert time.monotonic() - stopped_at < 3


async def owned_task(
    client: Client, owners: dict[int, str], controld: str
) -> tasks_pb2.SubmitReply:
    """Submit a task whose shard belongs to `controld`."""
    for number in range(1000):
        made = await client.submit("p", "x", session=f"owned-{number}")
        if owners[shard_of_task(made.task)] == controld:
            return made
    raise AssertionError(f"no shard of {controld} was met")
