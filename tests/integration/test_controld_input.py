"""What a controld says to bad input, over its API and at its start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from corefleet.client import Client
from corefleet.errors import Conflict, CorefleetError, Exhausted, InvalidInput, NotFound
from corefleet.rpc import tasks_pb2
from tests.integration.control_plane import (
    POOL,
    ControlPlane,
)
from tests.integration.fake_node import FakeNode
from tests.servers.controld import controld_toml

UNKNOWN_TASK = "0-0123456789abcdefghjkmnpqrs"


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


def test_a_metrics_port_in_use_is_named(plane: ControlPlane) -> None:
    taken = plane.controlds["c1"].address
    config = f'metrics = "{taken}"\n{good_config(plane)}'
    code, line = start_fails(plane, config)
    assert code == 5
    assert f"metrics cannot be served at {taken}" in line


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
