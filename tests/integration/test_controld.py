"""Two real controlds on real etcd and NATS, with small fake nodes in the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from corefleet.client import Client
from corefleet.errors import Conflict, CorefleetError, Exhausted, InvalidInput, NotFound
from corefleet.ids import shard_of_task
from corefleet.rpc import fleet_pb2, tasks_pb2
from tests.integration.fake_node import FakeNode, Gate
from tests.servers.controld import ControldServer, controld_toml
from tests.servers.etcd import EtcdServer
from tests.servers.nats import NatsServer

POOL = 'agent = "some:Agent"\nslots = 64\n'
UNKNOWN_TASK = "0-0123456789abcdefghjkmnpqrs"


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Servers and the directory of one control plane."""

    directory: Path
    etcd: EtcdServer
    nats: NatsServer
    controlds: dict[str, ControldServer]

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self.controlds.values()]

    def controld(self, name: str) -> ControldServer:
        config = controld_toml(name, self.nats.url, self.etcd.endpoint, lease_ttl_s=1.5)
        return ControldServer(self.directory, name, config)


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """etcd, NATS and two controlds with 16 shards over two streams."""
    directory = tmp_path_factory.mktemp("plane")
    for name in ("etcd", "nats"):
        (directory / name).mkdir()
    with ExitStack() as stack:
        etcd = stack.enter_context(EtcdServer(directory / "etcd"))
        nats = stack.enter_context(NatsServer(directory / "nats"))
        made = ControlPlane(directory, etcd, nats, {})
        for name in ("c1", "c2"):
            made.controlds[name] = stack.enter_context(made.controld(name))
        yield made


@pytest.fixture
async def client(plane: ControlPlane) -> AsyncIterator[Client]:
    """A client of both, once both own a share of the shards and no node is left alive."""
    async with Client(plane.addresses) as made:
        await all_owned(made)
        for node in await made.nodes():
            await node_state(made, node.node, "lost")
        await made.apply_pool("p", POOL)
        yield made


async def all_owned(client: Client, controlds: int = 2) -> dict[int, str]:
    """Return the owner of each shard once `controlds` living ones own all of them."""
    async with asyncio.timeout(15):
        while True:
            with contextlib.suppress(CorefleetError):
                living = await client.controlds()
                owners = {shard: each.controld for each in living for shard in each.shards}
                shares = [len(each.shards) for each in living]
                if len(owners) == 16 and len(living) == controlds and all(shares):
                    return owners
            await asyncio.sleep(0.02)


async def node_state(client: Client, name: str, state: str) -> fleet_pb2.Node:
    """Return the node once it is in `state`."""
    async with asyncio.timeout(10):
        while True:
            for node in await client.nodes():
                if node.node == name and node.state == state:
                    return node
            await asyncio.sleep(0.02)


async def events_until(client: Client, task: str, what: str) -> list[tasks_pb2.TaskEvent]:
    """Return a task's events up to the first of kind `what`."""
    seen = []
    async with asyncio.timeout(15):
        async for event in client.watch(task):
            seen.append(event)
            if event.WhichOneof("what") == what:
                return seen
    raise AssertionError(f"the watch ended without {what}")


async def first_step(client: Client, task: str) -> tasks_pb2.Step:
    """Return the task's first committed step, once there is one."""
    async with asyncio.timeout(15):
        async for event in client.watch(task):
            if event.HasField("step"):
                return event.step
            if event.snapshot.steps:
                return event.snapshot.steps[0]
    raise AssertionError("the watch ended without a step")


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


BAD_SUBMISSIONS: list[tuple[str, dict[str, object], type[CorefleetError], str]] = [
    ("pool", {"pool": ""}, InvalidInput, "pool"),
    ("unknown pool", {"pool": "nope"}, NotFound, ""),
    ("session", {"session": "a b"}, InvalidInput, "session"),
    ("long session", {"session": "s" * 64}, InvalidInput, "session"),
    ("request id", {"request_id": "a b"}, InvalidInput, "request_id"),
    ("long request id", {"request_id": "r" * 129}, InvalidInput, "request_id"),
    ("2 MB", {"input": b"x" * 2_000_000}, InvalidInput, "input"),
    ("just too long", {"input": b"x" * 262_145}, InvalidInput, "input"),
    ("not UTF-8", {"input": b"abc\xff\xfe"}, InvalidInput, "input"),
    ("kind", {"kind": "quick"}, InvalidInput, "kind"),
    ("deadline", {"deadline_s": 4e7}, InvalidInput, "deadline_ms"),
]


@pytest.mark.parametrize(
    ("change", "kind", "field"), [row[1:] for row in BAD_SUBMISSIONS],
    ids=[row[0] for row in BAD_SUBMISSIONS],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_a_bad_submission_is_refused_with_its_field(
    client: Client, change: dict[str, Any], kind: type[CorefleetError], field: str, stream: bool
) -> None:
    asked = {"pool": "p", "input": b"x", **change}
    call = anext(client.run(**asked)) if stream else client.submit(**asked)
    with pytest.raises(kind) as caught:
        await call
    if isinstance(caught.value, InvalidInput):
        assert caught.value.field == field
        assert "expected" in str(caught.value)


async def test_a_missing_request_id_is_refused(client: Client) -> None:
    request = tasks_pb2.SubmitRequest(pool="p", input=b"x")
    events = [event async for event in client.submit_many([request])]
    assert [(e.refused.code, e.refused.field) for e in events] == [(3, "request_id")]


async def test_the_largest_input_is_taken(plane: ControlPlane, client: Client) -> None:
    text = "ü" * (262_144 // 2)
    async with FakeNode(plane.nats.url, "n1"):
        seen = [event async for event in client.run("p", text)]
    assert seen[-1].finished.output == text


@pytest.mark.parametrize("task", ["", "nonsense", "zz-01", "ffff-0123456789abcdefghjkmnpqrs"])
async def test_a_task_id_that_is_none_is_refused(client: Client, task: str) -> None:
    for call in (client.get, client.cancel, client.explain):
        with pytest.raises(InvalidInput) as caught:
            await call(task)
        assert caught.value.field == "task"
    with pytest.raises(InvalidInput):
        [event async for event in client.watch(task)]


async def test_an_unknown_task_is_not_found(client: Client) -> None:
    for call in (client.get, client.cancel, client.explain):
        with pytest.raises(NotFound):
            await call(UNKNOWN_TASK)
    with pytest.raises(NotFound):
        [event async for event in client.watch(UNKNOWN_TASK)]


async def test_an_ended_task_is_not_cancelled(plane: ControlPlane, client: Client) -> None:
    async with FakeNode(plane.nats.url, "n1"):
        seen = [event async for event in client.run("p", "x")]
    with pytest.raises(Conflict, match="ended before, as done"):
        await client.cancel(seen[-1].task)


async def test_a_pool_over_its_rate_is_told_when_to_come_back(client: Client) -> None:
    await client.apply_pool("slow", POOL + "rate_per_s = 1.0\nburst = 2\n")
    calls = [client.submit("slow", "x") for _ in range(10)]
    with pytest.raises(Exhausted, match="slow") as caught:
        await asyncio.gather(*calls)
    assert 0 < caught.value.retry_after_s <= 3


@pytest.mark.parametrize(
    ("spec", "part"),
    [("slots = 0\n" + POOL.splitlines()[0], "slots"), ("mdel = 'x'", "model"), ("[", "TOML")],
)
async def test_a_bad_pool_is_refused(client: Client, spec: str, part: str) -> None:
    with pytest.raises(InvalidInput, match=part) as caught:
        await client.apply_pool("bad", spec)
    assert caught.value.field == "spec_toml"
    assert "bad" not in [pool.name for pool in await client.pools()]


async def test_pages_of_a_list_hold_every_task_once(client: Client) -> None:
    await client.apply_pool("listed", POOL)
    made = {(await client.submit("listed", "x")).task for _ in range(45)}
    told: list[str] = []
    token = ""
    while True:
        page = await client.list(pool="listed", page_size=7, page_token=token)
        assert len(page.tasks) <= 7
        told += [task.task for task in page.tasks]
        token = page.next_page_token
        if not token:
            break
    assert len(told) == len(set(told))
    assert set(told) == made
    with pytest.raises(InvalidInput, match="page_token"):
        await client.list(page_token="x")
    with pytest.raises(InvalidInput, match="state"):
        await client.list(state=tasks_pb2.TASK_STATE_DONE)
    with pytest.raises(InvalidInput, match="pool"):
        await client.list(session="s")


async def test_health_and_reflection_are_served(plane: ControlPlane) -> None:
    async with grpc.aio.insecure_channel(plane.controlds["c1"].address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "corefleet.v1.Tasks", "corefleet.v1.Fleet"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in reflection.ServerReflectionInfo(iter([request])):
            names = {each.name for each in answer.list_services_response.service}
            assert {"corefleet.v1.Tasks", "corefleet.v1.Fleet"} <= names


def start_fails(plane: ControlPlane, config: str, *arguments: str) -> tuple[int, str]:
    """Run a controld that must end by itself; return its exit code and last line."""
    path = plane.directory / "fails.toml"
    path.write_text(config)
    done = subprocess.run(
        [sys.executable, "-m", "controld", "--config", str(path), *arguments],
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines()[-1]


def good_config(plane: ControlPlane) -> str:
    return controld_toml("c9", plane.nats.url, plane.etcd.endpoint)


def test_a_config_typo_is_named(plane: ControlPlane) -> None:
    code, line = start_fails(plane, good_config(plane).replace("listen =", "lisen ="))
    assert code == 2
    assert "fails.toml" in line
    assert "did you mean `listen`" in line


def test_a_missing_config_is_named(plane: ControlPlane) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "controld", "--config", str(plane.directory / "none.toml")],
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "none.toml: no such file" in done.stderr


def test_a_port_in_use_is_named(plane: ControlPlane) -> None:
    taken = plane.controlds["c1"].address
    code, line = start_fails(plane, good_config(plane), "--listen", taken)
    assert code == 5
    assert taken in line


def test_an_id_in_use_is_named(plane: ControlPlane) -> None:
    code, line = start_fails(plane, good_config(plane), "--id", "c1")
    assert code == 1
    assert "'c1' is in use" in line


def test_unreachable_servers_end_the_start(
    plane: ControlPlane, free_port: Callable[[], int]
) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    config = controld_toml("c9", plane.nats.url, nobody)
    assert start_fails(plane, config, "--start-timeout", "0.5")[0] == 4
    config = controld_toml("c9", f"nats://{nobody}", plane.etcd.endpoint)
    assert start_fails(plane, config, "--start-timeout", "0.5")[0] == 4


def test_a_nats_that_is_too_old_is_refused(plane: ControlPlane) -> None:
    with old_nats() as url:
        config = controld_toml("c9", url, plane.etcd.endpoint)
        code, line = start_fails(plane, config)
    assert code == 3
    assert "2.9.10" in line
    assert "2.12" in line


@contextlib.contextmanager
def old_nats() -> Iterator[str]:
    """Serve as much of NATS as a client needs to learn the version, 2.9.10."""
    info = {
        "server_id": "x", "server_name": "x", "version": "2.9.10", "go": "go1", "proto": 1,
        "host": "127.0.0.1", "port": 4222, "headers": True, "max_payload": 1048576,
        "jetstream": True,
    }  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(f"INFO {json.dumps(info)}\r\n".encode())
                        while data := connection.recv(65536):
                            if b"PING" in data:
                                connection.sendall(b"PONG\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"nats://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


async def owned_task(
    client: Client, owners: dict[int, str], controld: str
) -> tasks_pb2.SubmitReply:
    """Submit a task whose shard belongs to `controld`."""
    for number in range(1000):
        made = await client.submit("p", "x", session=f"owned-{number}")
        if owners[shard_of_task(made.task)] == controld:
            return made
    raise AssertionError(f"no shard of {controld} was met")
