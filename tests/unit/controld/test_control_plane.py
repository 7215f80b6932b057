"""The control plane in one process: its parts together, and what happens when one fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

from controld.api import followers, watching
from corefleet.bus import Entry
from corefleet.client import Client
from corefleet.clock import SystemClock
from corefleet.codec import decode, encode
from corefleet.errors import CorefleetError, Exhausted, Unavailable
from corefleet.messages.records import LostNode, NodeRegistration
from corefleet.messages.wire import (
    NodeRegistered,
    RegisterNode,
    SubmitAnswer,
    SubmitMessage,
    TaskFinished,
)
from corefleet.rpc import tasks_pb2
from corefleet.store import Changes
from corefleet.subjects import (
    CONTROL_SUBMIT,
    SHARDS,
    control_register,
    kind_of,
    lost_key,
    node_key,
)
from tests.integration.fake_node import FakeNode, Gate
from tests.unit.controld.plane import SETTINGS, Plane, Running


@pytest.fixture
async def first(plane: Plane) -> AsyncIterator[Running]:
    running = await plane.controld("c1")
    yield running
    await running.stop()


@pytest.fixture
async def client(first: Running) -> AsyncIterator[Client]:
    async with Client(first.address) as made:
        await owned(made, {"c1": SETTINGS.shards})
        yield made


async def owned(client: Client, shares: dict[str, int] | int) -> None:
    """Return once every shard is owned, by as many as `shares` says or as it says."""
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(CorefleetError):
                found = {each.controld: len(each.shards) for each in await client.controlds()}
                whole = sum(found.values()) == SETTINGS.shards and all(found.values())
                if found == shares or (whole and len(found) == shares):
                    return
            await asyncio.sleep(0.01)


async def finish(client: Client, session: str = "") -> tasks_pb2.Task:
    async with asyncio.timeout(10):
        events = [event async for event in client.run("p", "hello", session=session)]
    return events[-1].finished


async def test_a_task_goes_all_the_way(plane: Plane, client: Client) -> None:
    async with FakeNode(plane.connect(), "n1"):
        task = await finish(client)
    assert (task.state, task.output) == (tasks_pb2.TASK_STATE_DONE, "hello")


async def test_two_share_the_shards_and_one_that_leaves_hands_over(
    plane: Plane, client: Client
) -> None:
    second = await plane.controld("c2")
    await owned(client, 2)
    async with FakeNode(plane.connect(), "n1"):
        for number in range(16):
            assert (await finish(client, f"s{number}")).output == "hello"
        await second.stop()
        await owned(client, {"c1": SETTINGS.shards})
        for number in range(16):
            assert (await finish(client, f"s{number}")).output == "hello"


async def test_who_loses_the_lease_decides_nothing_and_comes_back(
    plane: Plane, first: Running, client: Client
) -> None:
    gate = Gate()
    async with FakeNode(plane.connect(), "n1", run=gate.run) as node:
        made = await client.submit("p", "x")
        await gate.running.wait()
        claims = plane.store.watch(SHARDS, 0)
        first.store.stop_keepalives()
        anew: set[str] = set()
        async with asyncio.timeout(10):
            while len(anew) < SETTINGS.shards:
                changes = await anext(claims)
                assert isinstance(changes, Changes)
                anew.update(change.key for change in changes.events if change.value)
        await claims.aclose()
        await owned(client, {"c1": SETTINGS.shards})
        gate.through.set()
        events = [event async for event in client.watch(made.task)]
        assert events[-1].finished.output == "n1 1"
        assert node.taken == [(made.task, 1)]


async def test_a_full_stream_refuses_submissions_and_loses_nothing(
    plane: Plane, first: Running, client: Client
) -> None:
    async with FakeNode(plane.connect(), "n1"):
        first.log.fault = lambda entries: "full"
        with pytest.raises(Exhausted, match="full"):
            await client.submit("p", "x", request_id="again")
        first.log.fault = None
        made = await client.submit("p", "x", request_id="again")
        assert not made.duplicate
        assert [e async for e in client.watch(made.task)][-1].HasField("finished")


@pytest.mark.parametrize("fault", ["lose_ack", "drop", "refuse"])
async def test_one_unclear_answer_of_the_log_makes_no_second_task(
    plane: Plane, first: Running, client: Client, fault: str
) -> None:
    hit: set[str] = set()

    def once(entries: Sequence[Entry]) -> str | None:
        kind = kind_of(entries[0].subject)
        if kind in hit:
            return None
        hit.add(kind)
        return fault

    async with FakeNode(plane.connect(), "n1") as node:
        first.log.fault = once  # type: ignore[assignment]
        assert (await finish(client)).output == "hello"
        assert len(node.taken) == 1
    assert {"task"} <= hit


async def test_a_lost_end_is_found_by_those_who_follow_and_those_who_watch(
    plane: Plane, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "_SILENCE_S", 0.05)
    monkeypatch.setattr(followers, "_SWEEP_S", 0.05)
    monkeypatch.setattr(watching, "_SILENCE_S", 0.05)
    gate = Gate()
    async with FakeNode(plane.connect(), "n1", run=gate.run) as node:
        give = node.give
        monkeypatch.setattr(
            node,
            "give",
            lambda assignment, event: (
                None if isinstance(event, TaskFinished) else give(assignment, event)
            ),
        )
        made = await client.submit("p", "x")
        await gate.running.wait()
        watched = asyncio.create_task(last_of_watch(client, made.task))
        followed = asyncio.create_task(finish(client, "other"))
        gate.through.set()
        async with asyncio.timeout(10):
            assert (await watched).finished.output == "n1 1"
            assert (await followed).output == "n1 1"


async def last_of_watch(client: Client, task: str) -> tasks_pb2.TaskEvent:
    return [event async for event in client.watch(task)][-1]


async def test_an_agents_message_is_a_submission_like_any_other(
    plane: Plane, client: Client
) -> None:
    bus, _ = await plane.connect()("agent", plane.failures.append)
    asked = SubmitMessage(pool="p", session="s", request_id="t/1", input="hi")
    answers = []
    for _ in range(2):
        answers.append(decode(await bus.request(CONTROL_SUBMIT, encode(asked), 5), SubmitAnswer))
        # By one controld in one millisecond the second is taken for the first one, repeated.
        answered_ms = SystemClock().wall_ms()
        while SystemClock().wall_ms() == answered_ms:
            pass
    assert answers[0].error == ""
    assert [answer.duplicate for answer in answers] == [False, True]
    assert answers[0].task == answers[1].task
    unknown = SubmitMessage(pool="nope", session="s", request_id="t/2", input="hi")
    refused = decode(await bus.request(CONTROL_SUBMIT, encode(unknown), 5), SubmitAnswer)
    assert "no such pool" in refused.error
    await bus.close()


async def test_registering_takes_the_next_epoch_and_ends_an_older_verdict(
    plane: Plane, client: Client
) -> None:
    await plane.store.put(lost_key("n1"), encode(LostNode(node="n1", epoch=4)))
    async with FakeNode(plane.connect(), "n1") as node:
        assert node.epoch == 5
        stored = await plane.store.get(node_key("n1"))
        assert stored is not None
        assert decode(stored.value, NodeRegistration).epoch == 5
        assert await plane.store.get(lost_key("n1")) is None
        assert (await finish(client)).node == "n1"


async def test_a_node_resumes_its_newest_epoch_unless_it_was_found_lost(
    plane: Plane, first: Running
) -> None:
    bus, _ = await plane.connect()("a node", plane._failed)

    async def ask(epoch: int) -> int:
        asked = RegisterNode(registration=NodeRegistration(node="n1", epoch=epoch))
        answer = await bus.request(control_register("n1"), encode(asked), 5)
        return decode(answer, NodeRegistered).epoch

    assert await ask(7) == 1, "an epoch that nobody knows is not resumed"
    assert await ask(1) == 1
    assert await ask(0) == 2
    assert await ask(1) == 3
    assert await ask(3) == 3
    await plane.store.put(lost_key("n1"), encode(LostNode(node="n1", epoch=3)))
    assert await ask(3) == 4
    await bus.close()


async def test_the_store_may_be_away_while_the_lease_is_valid(
    plane: Plane, first: Running, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unavailable(*_: object) -> None:
        raise Unavailable("etcd: told to be away")

    async with FakeNode(plane.connect(), "n1"):
        assert (await finish(client)).output == "hello"
        for name in ("get", "put", "commit", "range"):
            monkeypatch.setattr(first.store, name, unavailable)
        assert (await finish(client)).output == "hello"
        async with Client(first.address, timeout_s=0.5) as impatient:
            with pytest.raises(Unavailable, match="told to be away"):
                await impatient.apply_pool("q", 'agent = "some:Agent"')
        monkeypatch.undo()
