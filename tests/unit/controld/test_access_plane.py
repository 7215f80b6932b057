"""A whole controld with tokens and grants: what each caller sees, does, and leaves in the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import pytest
import structlog
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from corefleet import logs
from corefleet.client import Client
from corefleet.codec import encode
from corefleet.config import AuthConfig, GrantConfig, LivenessConfig, LogConfig
from corefleet.errors import CorefleetError, NotFound, PermissionDenied, Unauthenticated
from corefleet.identity import Identity, Role
from corefleet.messages.records import PoolSpec
from corefleet.rpc import tasks_pb2
from corefleet.subjects import pool_key
from corefleet.tls import TlsFiles
from tests.integration.fake_node import FakeNode, Gate
from tests.servers.authority import Authority
from tests.unit.controld.plane import SETTINGS, Plane, Running
from tests.unit.controld.token_issuer import Issuer, write_jwks

ISSUER = Issuer()
GRANTS = (
    GrantConfig(subjects=("root",), verbs=("*",)),
    GrantConfig(
        subjects=("ann",), verbs=("submit", "read", "list", "cancel", "explain"), pools=("p",)
    ),
    GrantConfig(groups=("acme",), verbs=("submit", "read", "list"), tenants=("acme*",)),
    GrantConfig(subjects=("pools",), verbs=("pools-read", "pools-write"), pools=("p*",)),
)

PATIENT = LivenessConfig(suspect_after_s=20.0, lost_after_s=30.0, cut_after_s=60.0)
"""No node is found lost on a busy machine."""

As = Callable[..., Client]
Logs = list[MutableMapping[str, Any]]


@pytest.fixture
async def controld(plane: Plane, tmp_path: Path) -> AsyncIterator[Running]:
    await plane.store.put(pool_key("q"), encode(PoolSpec(name="q", agent="some:Agent", slots=64)))
    auth = AuthConfig(tokens=write_jwks(tmp_path / "keys.json", ISSUER), grants=GRANTS)
    running = await plane.controld("c1", auth=auth, liveness=PATIENT)
    yield running
    await running.stop()


@pytest.fixture
async def as_(controld: Running) -> AsyncIterator[As]:
    """Return what makes the client of a token's subject."""
    async with AsyncExitStack() as stack:

        def client(subject: str, *groups: str) -> Client:
            token = ISSUER.token(subject, groups=list(groups))
            made = Client(controld.address, token=lambda: token)
            stack.push_async_callback(made.close)
            return made

        await owned(client("root"))
        yield client


@pytest.fixture
def audited() -> Iterator[Callable[[], Logs]]:
    with capture_logs() as lines:
        yield lambda: [line for line in lines if line.get("audit") == 1]


async def owned(client: Client) -> None:
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(CorefleetError):
                if sum(len(each.shards) for each in await client.controlds()) == SETTINGS.shards:
                    return
            await asyncio.sleep(0.01)


async def test_a_task_tells_who_submitted_it_while_it_lives_and_when_it_has_ended(
    plane: Plane, as_: As
) -> None:
    ann, root, gate = as_("ann"), as_("root"), Gate()
    async with FakeNode(plane.connect(), "n1", run=gate.run):
        single = await ann.submit("p", "x")
        await gate.running.wait()
        assert (await root.get(single.task)).submitted_by == "subject:ann"
        gate.through.set()
        async with asyncio.timeout(20):
            last = [event async for event in ann.watch(single.task)][-1]
            streamed = [event async for event in root.run("p", "y")][-1]
    assert last.finished.submitted_by == "subject:ann"
    assert (await ann.get(single.task)).submitted_by == "subject:ann"
    assert (await root.get(streamed.task)).submitted_by == "subject:root"


async def test_nothing_of_another_pools_task_is_told_or_changed(
    as_: As, audited: Callable[[], Logs]
) -> None:
    ann, root = as_("ann"), as_("root")
    task = (await root.submit("q", "x")).task
    denials: list[Callable[[], Any]] = [
        lambda: ann.get(task),
        lambda: ann.trace(task),
        lambda: ann.cancel(task),
        lambda: ann.explain(task),
        lambda: anext(aiter(ann.watch(task))),
        lambda: ann.list(pool="q"),
        lambda: ann.submit("q", "x"),
    ]
    for call in denials:
        with pytest.raises(PermissionDenied, match=r"^subject:ann may not \S+ in pool q;"):
            await call()
    assert (await root.get(task)).state == tasks_pb2.TASK_STATE_QUEUED
    told = [line for line in audited() if line["who"] == "subject:ann"]
    assert [line["event"] for line in told] == [
        "Get", "Trace", "Cancel", "Explain", "Watch", "List", "Submit",
    ]  # fmt: skip
    assert {line["result"] for line in told} == {"PERMISSION_DENIED"}


async def test_fleet_wide_calls_need_fleet_wide_grants(as_: As) -> None:
    ann, pools = as_("ann"), as_("pools")
    for call in (ann.nodes, ann.controlds, ann.overview, ann.pools, lambda: ann.drain_node("n1")):
        with pytest.raises(PermissionDenied, match="subject:ann may not"):
            await call()
    assert [pool.name for pool in await pools.pools()] == ["p"]
    await pools.apply_pool("p2", 'agent = "some:Agent"')
    with pytest.raises(PermissionDenied, match="may not pools-write in pool q"):
        await pools.apply_pool("q", 'agent = "some:Agent"')


async def test_who_is_limited_to_tenants_must_name_one_of_them(as_: As) -> None:
    member, root = as_("carl", "acme"), as_("root")
    assert (await member.submit("q", "x", tenant="acme-1")).task
    with pytest.raises(PermissionDenied, match="without naming a tenant"):
        await member.submit("q", "x")
    with pytest.raises(PermissionDenied, match="for tenant other"):
        await member.submit("q", "x", tenant="other")
    others = (await root.submit("q", "x", tenant="other")).task
    with pytest.raises(PermissionDenied):
        await member.get(others)


async def test_a_list_without_a_pool_shows_what_one_may_see_page_by_page(as_: As) -> None:
    root, ann, member = as_("root"), as_("ann"), as_("carl", "acme")
    made: dict[str, set[str]] = {"p": set(), "q": set(), "acme": set()}
    for number in range(30):
        pool, tenant = "pq"[number % 2], "acme" if number % 5 == 0 else ""
        reply = await root.submit(pool, "x", tenant=tenant)
        made[pool].add(reply.task)
        if tenant:
            made["acme"].add(reply.task)
    assert await listed(root) == made["p"] | made["q"]
    assert await listed(ann) == made["p"]
    assert await listed(member) == made["acme"]


async def listed(client: Client) -> set[str]:
    """Return the tasks of all pages of four; none is on two of them."""
    found: list[str] = []
    token = ""
    while True:
        page = await client.list(page_size=4, page_token=token)
        found += [task.task for task in page.tasks]
        token = page.next_page_token
        if not token:
            assert len(found) == len(set(found))
            return set(found)


async def test_each_submission_of_a_stream_is_asked_for_and_written_down_once(
    plane: Plane, as_: As, audited: Callable[[], Logs]
) -> None:
    ann = as_("ann")
    wanted = ["p"] * 40 + ["q"] * 5 + ["p"] * 40
    requests = [
        ann.request(pool, f"secret {number}", request_id=f"r-{number}")
        for number, pool in enumerate(wanted)
    ]
    requests.append(ann.request("p", "x", request_id="r-odd", kind="wrong"))
    accepted, refused = set(), {}
    async for event in ann.submit_many(requests):
        if event.HasField("accepted"):
            accepted.add(event.accepted.task)
        else:
            refused[event.request_id] = event.refused
    assert len(accepted) == 80
    denied = {f"r-{number}" for number, pool in enumerate(wanted) if pool == "q"}
    assert set(refused) == {*denied, "r-odd"}
    assert "subject:ann may not submit in pool q;" in refused[min(denied)].message

    told = [line for line in audited() if line["event"] == "SubmitStream"]
    assert sum(line["count"] for line in told) == len(requests)
    by_result: dict[str, list[str]] = {}
    for line in told:
        ids = str(line.get("tasks") or line.get("requests")).split()
        assert len(ids) == line["count"]
        assert line["who"] == "subject:ann"
        by_result.setdefault(line["result"], []).extend(ids)
    assert sorted(by_result["OK"]) == sorted(accepted)
    assert sorted(by_result["PERMISSION_DENIED"]) == sorted(denied)
    assert by_result["INVALID_ARGUMENT"] == ["r-odd"]
    assert "secret" not in repr(told)


async def test_each_change_leaves_one_record_and_reading_none(
    plane: Plane, as_: As, audited: Callable[[], Logs]
) -> None:
    root = as_("root")
    async with FakeNode(plane.connect(), "n1"):
        before = len(audited())
        await root.drain_node("n1", reason="new kernel", by="ada@desk")
        await root.undrain_node("n1")
        await root.apply_pool("r", 'agent = "some:Agent"')
        task = (await root.submit("r", "x", request_id="r-1")).task
        await root.cancel(task)
        with pytest.raises(NotFound):
            await root.drain_node("n9")
        await root.nodes()
        await root.get(task)
        await root.list()
        await root.whoami()
    told = audited()[before:]
    assert [(line["event"], line["verb"], line["result"]) for line in told] == [
        ("DrainNode", "drain", "OK"),
        ("UndrainNode", "drain", "OK"),
        ("ApplyPool", "pools-write", "OK"),
        ("Submit", "submit", "OK"),
        ("Cancel", "cancel", "OK"),
        ("DrainNode", "drain", "NOT_FOUND"),
    ]
    assert [line.get("node") for line in told[:2]] == ["n1", "n1"]
    assert told[2]["pool"] == "r"
    assert (told[3]["pool"], told[3]["task"], told[3]["request_id"]) == ("r", task, "r-1")
    assert (told[4]["pool"], told[4]["task"]) == ("r", task)
    assert {line["who"] for line in told} == {"subject:root"}


async def test_a_drain_tells_who_it_is_by_token(plane: Plane, as_: As) -> None:
    async with FakeNode(plane.connect(), "n1"):
        drain = await as_("root").drain_node("n1", by="ada@desk")
    assert drain.by == "ada@desk as subject:root"


async def test_no_log_line_of_a_run_holds_a_token_or_an_input(
    plane: Plane, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/security.md: secrets are never in logs."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    logs.configure(LogConfig(format="json", level="debug"), "controld")
    # A logger that keeps this test's stderr would break those of later tests.
    structlog.configure(cache_logger_on_first_use=False)
    try:
        auth = AuthConfig(tokens=write_jwks(tmp_path / "keys.json", ISSUER), grants=GRANTS)
        running = await plane.controld("c1", auth=auth)
        good, expired = ISSUER.token("root"), ISSUER.token("root", exp=1)
        forged = Issuer("ES256", ISSUER.kid).token("root")
        secret = "the account number is 4711"
        for token in (good, expired, forged, "not-a-token-but-a-password"):
            async with Client(running.address, token=partial(str, token)) as client:
                with contextlib.suppress(Unauthenticated):
                    await client.whoami()
                    await owned(client)
                    await client.submit("p", secret)
                    async for _ in client.submit_many([client.request("p", secret)]):
                        pass
        await running.stop()
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        structlog.contextvars.clear_contextvars()
        structlog.reset_defaults()
    said = capsys.readouterr()
    text = said.out + said.err
    results = [line.get("result") for line in map(msgspec.json.decode, said.err.splitlines())]
    assert results.count("OK") == 2
    assert results.count("UNAUTHENTICATED") == 3
    assert "4711" not in text
    assert "not-a-token" not in text
    for token in (good, expired, forged):
        for part in token.split("."):
            assert part not in text


async def test_a_stream_goes_on_with_the_next_token_when_one_expires(
    plane: Plane, controld: Running, as_: As, audited: Callable[[], Logs]
) -> None:
    issued: list[str] = []
    renewed = asyncio.Event()

    def token() -> str:
        # The first ones are of the past, and good only by the leeway for a clock that is off.
        left_s = 3600 if renewed.is_set() else 2
        issued.append(ISSUER.token("ann", exp=int(time.time()) - 10 + left_s, jti=str(len(issued))))
        if len(issued) == 2:
            renewed.set()
        return issued[-1]

    gate = Gate()
    async with (
        asyncio.timeout(60),
        FakeNode(plane.connect(), "n1", run=gate.run),
        Client(controld.address, token=token, timeout_s=60) as client,
    ):
        events = client.run("p", "x")
        first = await anext(events)
        await gate.running.wait()
        release = asyncio.create_task(when(lambda: count_of(audited(), "OK") == 2, gate.through))
        last = [event async for event in events][-1]
        await release
    assert first.task == last.task
    assert last.finished.submitted_by == "subject:ann"
    assert count_of(audited(), "UNAUTHENTICATED") == 1


async def when(true: Callable[[], bool], event: asyncio.Event) -> None:
    while True:
        if true():
            event.set()
            return
        await asyncio.sleep(0.01)


def count_of(lines: Logs, result: str) -> int:
    return sum(line["result"] == result for line in lines)


async def test_over_tls_the_certificate_says_who_submits_and_what_one_may(
    plane: Plane, tmp_path: Path
) -> None:
    authority, issuer = Authority(), Issuer()

    def files(role: Role, name: str) -> TlsFiles:
        wanted = authority.write(tmp_path / name, Identity(role, name))
        return TlsFiles(wanted.ca, wanted.cert, wanted.key)

    auth = AuthConfig(tokens=write_jwks(tmp_path / "keys.json", issuer))
    running = await plane.controld("c1", liveness=PATIENT, auth=auth, tls=files("controld", "c1"))
    async with (
        Client(running.address, tls=files("operator", "alice")) as operator,
        Client(running.address, tls=files("client", "batch")) as client,
        Client(running.address, tls=files("agentd", "n1")) as node,
        Client(running.address, tls=files("client", "gate"), token=issuer.token) as bearer,
    ):
        await owned(operator)
        task = (await client.submit("p", "x")).task
        assert (await client.get(task)).submitted_by == "client/batch"
        for forbidden in (client.nodes, client.overview, node.nodes, lambda: node.get(task)):
            with pytest.raises(PermissionDenied, match=r"^(client/batch|agentd/n1) may not"):
                await forbidden()
        found = await bearer.whoami()
        assert (found.name, found.identity) == ("subject:bob", "client/gate")
        with pytest.raises(PermissionDenied, match="subject:bob may not submit"):
            await bearer.submit("p", "x")
        assert (await operator.cancel(task)).submitted_by == "client/batch"
    await running.stop()


async def test_a_plane_without_auth_takes_everybody(plane: Plane) -> None:
    running = await plane.controld("c1")
    async with Client(running.address) as client:
        await owned(client)
        task = (await client.submit("p", "x")).task
        assert (await client.get(task)).submitted_by == ""
        assert (await client.whoami()).name == "anonymous"
    await running.stop()


async def test_reading_the_protocol_by_reflection_needs_a_grant(controld: Running) -> None:
    async with grpc.aio.insecure_channel(controld.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="*")])
        )
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
    assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
