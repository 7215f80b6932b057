"""The guard on a real gRPC server: certificates, tokens, every RPC, and the audit log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import _async as health_aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from controld.api.access import AccessService
from controld.api.callers import Authenticator
from controld.api.guard import Access, Guard
from controld.api.verbs import RULES
from controld.core.grants import VERBS, Grant
from corefleet.background import Background
from corefleet.clock import SystemClock
from corefleet.config import TokenConfig
from corefleet.errors import InvalidInput, PermissionDenied
from corefleet.rpc import (
    access_pb2,
    access_pb2_grpc,
    fleet_pb2,
    fleet_pb2_grpc,
    tasks_pb2,
    tasks_pb2_grpc,
)
from tests.unit.controld.certificates import Authority
from tests.unit.controld.token_issuer import Issuer, write_jwks

SERVICES: list[ServiceDescriptor] = [
    service
    for file in (tasks_pb2, fleet_pb2, access_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
]
METHODS: list[MethodDescriptor] = [method for each in SERVICES for method in each.methods]
TASK = "3-0123456789abcdefghjkmnpqrs"

Logs = list[MutableMapping[str, Any]]


class Tasks(tasks_pb2_grpc.TasksServicer):
    """Answers whoever gets past the guard."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.release = asyncio.Event()
        self.ended = asyncio.Event()

    async def Submit(self, request: tasks_pb2.SubmitRequest, access: Access) -> Any:  # noqa: N802
        access.check(request.pool, request.tenant)
        if request.pool == "broken":
            raise ValueError("nobody foresaw this")
        if not request.request_id:
            raise InvalidInput("request_id", "", "an id")
        self.called.append(access.by)
        return tasks_pb2.SubmitReply(task=TASK, session="s")

    async def Get(self, request: tasks_pb2.GetRequest, access: Access) -> Any:  # noqa: N802
        self.called.append(access.by)
        return tasks_pb2.Task(task=request.task)

    async def Watch(  # noqa: N802
        self, request: tasks_pb2.WatchRequest, access: Access
    ) -> AsyncIterator[tasks_pb2.TaskEvent]:
        access.check("p")
        self.called.append(access.by)
        try:
            yield tasks_pb2.TaskEvent(task=request.task)
            await self.release.wait()
        finally:
            self.ended.set()

    async def Trace(self, request: tasks_pb2.TraceRequest, access: Access) -> Any:  # noqa: N802
        return tasks_pb2.TaskTrace()


class Door:
    """A server behind the guard, on TLS and in plain text, and its clients."""

    def __init__(self, authority: Authority) -> None:
        self.authority = authority
        self.tasks = Tasks()
        self.stack = AsyncExitStack()
        self.guard: Guard

    async def open(
        self, *grants: Grant, tokens: TokenConfig | None = None, clock: Any = None
    ) -> Door:
        """Begin to serve."""
        background = Background(lambda error: None)
        self.stack.push_async_callback(background.close)
        made = clock or SystemClock()
        self.guard = Guard(made, Authenticator(made, background, tokens), grants)
        self.stack.push_async_callback(self.guard.close)
        await self.guard.start()
        server = grpc.aio.server(interceptors=(self.guard,))
        tasks_pb2_grpc.add_TasksServicer_to_server(self.tasks, server)  # type: ignore[no-untyped-call]
        fleet_pb2_grpc.add_FleetServicer_to_server(fleet_pb2_grpc.FleetServicer(), server)  # type: ignore[no-untyped-call]
        access_pb2_grpc.add_AccessServicer_to_server(AccessService(), server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(health_aio.HealthServicer(), server)
        reflection.enable_server_reflection([reflection.SERVICE_NAME], server)
        self.secure = server.add_secure_port("127.0.0.1:0", self.authority.server())
        self.plain = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self.stack.push_async_callback(server.stop, None)
        return self

    def channel(self, *dns_names: str) -> Any:
        """Return a channel of a client whose certificate has these names."""
        credentials = self.authority.client(*dns_names)
        made = grpc.aio.secure_channel(f"127.0.0.1:{self.secure}", credentials)
        self.stack.push_async_callback(made.close, None)
        return made

    def plain_channel(self) -> Any:
        made = grpc.aio.insecure_channel(f"127.0.0.1:{self.plain}")
        self.stack.push_async_callback(made.close, None)
        return made


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
async def door(authority: Authority) -> AsyncIterator[Door]:
    made = Door(authority)
    yield made
    await made.stack.aclose()


@pytest.fixture
def audited() -> Iterator[Callable[[], Logs]]:
    """Return what says the records of the audit log so far."""
    with capture_logs() as lines:
        yield lambda: [line for line in lines if line.get("audit") == 1]


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def outcome(call: Any) -> tuple[grpc.StatusCode, str]:
    """Return how a call ended, whatever its kind."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


def whoami(channel: Any, **more: Any) -> Any:
    stub = access_pb2_grpc.AccessStub(channel)  # type: ignore[no-untyped-call]
    return stub.WhoAmI(access_pb2.WhoAmIRequest(), **more)


def tasks_of(channel: Any) -> Any:
    return tasks_pb2_grpc.TasksStub(channel)  # type: ignore[no-untyped-call]


def call_any(channel: Any, method: MethodDescriptor, **more: Any) -> Any:
    """Call an RPC with an empty request, or an empty stream of them."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    kinds = {
        (False, False): channel.unary_unary, (False, True): channel.unary_stream,
        (True, False): channel.stream_unary, (True, True): channel.stream_stream,
    }  # fmt: skip
    make = kinds[method.client_streaming, method.server_streaming]
    asked = b"" if not method.client_streaming else iter([b""])
    return make(path)(asked, **more)


def test_every_rpc_has_exactly_one_verb_and_every_verb_an_rpc() -> None:
    paths = {f"/{method.containing_service.full_name}/{method.name}" for method in METHODS}
    ours = {path for path in RULES if path.startswith("/corefleet.")}
    assert ours == paths
    assert {rule.verb for rule in RULES.values()} - {None} == set(VERBS)


def test_what_changes_something_is_written_down() -> None:
    reads = {"Get", "Watch", "Trace", "WhoAmI", "Explain", "Overview"}
    for method in METHODS:
        rule = RULES[f"/{method.containing_service.full_name}/{method.name}"]
        only_reads = method.name in reads or method.name.startswith(("List", "Watch"))
        assert (rule.mutates or rule.itemised) is not only_reads, method.name


@pytest.mark.parametrize(
    "names", [(), ("host.example",), ("a.client.corefleet", "b.client.corefleet")]
)
async def test_no_rpc_is_open_to_a_certificate_that_names_nobody(
    door: Door, audited: Callable[[], Logs], names: tuple[str, ...]
) -> None:
    """docs/security.md: the guard stands before every RPC."""
    await door.open()
    channel = door.channel(*names)
    for method in METHODS:
        code, details = await outcome(call_any(channel, method))
        assert code is grpc.StatusCode.UNAUTHENTICATED, method.full_name
        assert "certificate names nobody" in details
    assert door.tasks.called == []
    told = audited()
    assert [line["event"] for line in told] == [method.name for method in METHODS]
    assert {(line["who"], line["result"]) for line in told} == {("", "UNAUTHENTICATED")}


@pytest.mark.parametrize(
    "name", ["n1.agentd.corefleet", "m.monitor.corefleet", "c2.controld.corefleet"]
)
async def test_roles_that_submit_nothing_may_call_nothing_but_whoami(door: Door, name: str) -> None:
    await door.open()
    channel = door.channel(name, "host.example")
    role = name.split(".")[1]
    for method in METHODS:
        code, details = await outcome(call_any(channel, method))
        if method.name == "WhoAmI":
            assert code is grpc.StatusCode.OK
            continue
        assert code is grpc.StatusCode.PERMISSION_DENIED, method.full_name
        assert details.startswith(f"{role}/{name.split('.')[0]} may not ")


async def test_health_is_open_and_reflection_is_for_operators(door: Door) -> None:
    await door.open()
    for names, allowed in ((("x",), False), (("a.client.corefleet",), False),
                           (("a.operator.corefleet",), True)):  # fmt: skip
        channel = door.channel(*names)
        found = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert found.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="*")
        code, _ = await outcome(stub.ServerReflectionInfo(iter([asked])))
        assert (code is grpc.StatusCode.OK) is allowed


async def test_the_certificate_says_who_calls(door: Door) -> None:
    await door.open()
    found = await whoami(door.channel("alice.operator.corefleet", "host.example"))
    assert (found.name, found.identity, found.subject) == ("operator/alice", "operator/alice", "")
    assert set(found.rights[0].verbs) == set(VERBS)
    channel = door.channel("batch.client.corefleet")
    assert (await whoami(channel)).name == "client/batch"
    asked = tasks_pb2.SubmitRequest(pool="p", request_id="r-1")
    assert (await tasks_of(channel).Submit(asked)).task == TASK
    assert door.tasks.called == ["client/batch"]


async def test_in_plain_text_everybody_is_anonymous_and_may_do_all(door: Door) -> None:
    await door.open()
    channel = door.plain_channel()
    found = await whoami(channel)
    assert (found.name, found.identity) == ("anonymous", "")
    assert set(found.rights[0].verbs) == set(VERBS)
    await tasks_of(channel).Submit(tasks_pb2.SubmitRequest(pool="p", request_id="r-1"))
    assert door.tasks.called == [""]


async def test_in_plain_text_grants_hold_for_anonymous_too(door: Door) -> None:
    await door.open(Grant(identities=("anonymous",), verbs=("submit",), pools=("p",)))
    stub = tasks_of(door.plain_channel())
    await stub.Submit(tasks_pb2.SubmitRequest(pool="p", request_id="r-1"))
    code, details = await outcome(stub.Submit(tasks_pb2.SubmitRequest(pool="q", request_id="r-2")))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert details.startswith("anonymous may not submit in pool q;")


async def test_a_token_speaks_and_the_certificate_stands_beside_it(
    door: Door, tmp_path: Path, audited: Callable[[], Logs]
) -> None:
    issuer = Issuer()
    grants = (
        Grant(identities=("*",), verbs=("*",)),
        Grant(subjects=("bob",), groups=("ml",), verbs=("submit",)),
    )
    await door.open(*grants, tokens=write_jwks(tmp_path / "keys.json", issuer))
    channel = door.channel("gate.client.corefleet")
    token = issuer.token("bob", groups=["ml"])
    found = await whoami(channel, metadata=bearer(token))
    assert (found.name, found.identity, found.subject, list(found.groups)) == (
        "subject:bob", "client/gate", "bob", ["ml"],
    )  # fmt: skip
    assert [list(right.verbs) for right in found.rights] == [["submit"]]
    assert found.expires_ms / 1000 > time.time()

    asked = tasks_pb2.SubmitRequest(pool="p", request_id="r-1")
    await tasks_of(channel).Submit(asked, metadata=bearer(token))
    assert door.tasks.called == ["subject:bob"]
    (line,) = audited()
    assert (line["who"], line["identity"]) == ("subject:bob", "client/gate")


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (bearer("nonsense"), "not a JSON web token"),
        ((("authorization", "Basic Ym9iOmJvYg=="),), "Bearer"),
        ((*bearer("a"), *bearer("b")), "one value"),
        (bearer(Issuer("ES256", "k1").token()), "signature"),
    ],
)
async def test_a_wrong_token_is_refused_even_beside_a_good_certificate(
    door: Door, tmp_path: Path, metadata: Any, reason: str
) -> None:
    await door.open(tokens=write_jwks(tmp_path / "keys.json", Issuer()))
    code, details = await outcome(
        whoami(door.channel("alice.operator.corefleet"), metadata=metadata)
    )
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert reason in details


async def test_a_token_is_refused_where_none_are_taken(door: Door) -> None:
    await door.open()
    call = whoami(door.channel("a.operator.corefleet"), metadata=bearer(Issuer().token()))
    code, details = await outcome(call)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert "takes none" in details


async def test_a_stream_ends_when_its_token_does(door: Door, tmp_path: Path) -> None:
    """docs/security.md: a token that has expired opens nothing and keeps nothing open."""
    issuer = Issuer()
    config = write_jwks(tmp_path / "keys.json", issuer)
    clock = SystemClock()
    await door.open(Grant(subjects=("bob",), verbs=("read",)), tokens=config, clock=clock)
    token = issuer.token("bob", exp=int(time.time()) - int(config.leeway_s) + 2)
    stub = tasks_of(door.channel("gate.client.corefleet"))
    async with asyncio.timeout(60):
        code, details = await outcome(
            stub.Watch(tasks_pb2.WatchRequest(task=TASK), metadata=bearer(token))
        )
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert "expired" in details
    assert door.tasks.called == ["subject:bob"]
    assert door.tasks.ended.is_set()


async def test_who_goes_away_ends_the_stream_behind_the_guard(door: Door) -> None:
    await door.open()
    call = tasks_of(door.plain_channel()).Watch(tasks_pb2.WatchRequest(task=TASK))
    await call.read()
    call.cancel()
    async with asyncio.timeout(60):
        await door.tasks.ended.wait()


async def test_a_servicer_that_forgets_to_ask_answers_only_who_may_see_all(door: Door) -> None:
    await door.open(
        Grant(identities=("client/*",), verbs=("read",), pools=("p",)),
        Grant(identities=("operator/*",), verbs=("read",)),
    )
    limited = tasks_of(door.channel("a.client.corefleet"))
    full = tasks_of(door.channel("a.operator.corefleet"))
    code, details = await outcome(limited.Get(tasks_pb2.GetRequest(task=TASK)))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "no servicer asked" in details
    assert (await full.Get(tasks_pb2.GetRequest(task=TASK))).task == TASK


async def test_a_service_that_has_no_verb_is_closed_to_everybody(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(RULES, "/corefleet.v1.Tasks/Submit")
    await door.open()
    for channel in (door.channel("a.operator.corefleet"), door.plain_channel()):
        request = tasks_pb2.SubmitRequest(pool="p", request_id="r-1")
        code, details = await outcome(tasks_of(channel).Submit(request))
        assert code is grpc.StatusCode.PERMISSION_DENIED
        assert "may not call Submit: nobody may" in details
    assert door.tasks.called == []


async def test_other_grants_hold_for_streams_that_are_open(door: Door) -> None:
    await door.open()
    access = Access(
        door.guard,
        RULES["/corefleet.v1.Tasks/SubmitStream"],
        door.guard.authenticator.caller((), {}),
        None,
    )
    access.check("p", "t")
    background = Background(lambda error: None)
    fresh = Authenticator(SystemClock(), background, None)
    await door.guard.replace(
        fresh, [Grant(identities=("anonymous",), verbs=("submit",), pools=("q",))]
    )
    with pytest.raises(PermissionDenied):
        access.check("p", "t")
    access.check("q", "t")


async def test_each_call_that_changes_something_leaves_exactly_one_record(
    door: Door, audited: Callable[[], Logs]
) -> None:
    await door.open()
    channel = door.channel("a.client.corefleet")
    stub = tasks_of(channel)
    secret = b"the input of a task is nobody's business"
    cases = [
        ("p", "r-1", "OK"),
        ("p", "", "INVALID_ARGUMENT"),
        ("broken", "r-2", "UNKNOWN"),
    ]
    for pool, request_id, _ in cases:
        request = tasks_pb2.SubmitRequest(pool=pool, request_id=request_id, input=secret)
        await outcome(stub.Submit(request))
    await stub.Get(tasks_pb2.GetRequest(task=TASK))
    told = audited()
    assert [line["result"] for line in told] == [result for *_, result in cases]
    first = told[0]
    assert first["event"] == "Submit"
    assert first["who"] == "client/a"
    assert first["verb"] == "submit"
    assert (first["pool"], first["request_id"], first["task"]) == ("p", "r-1", TASK)
    assert first["peer"].startswith("ipv4:127.0.0.1:")
    assert first["ms"] >= 0
    assert "nobody" not in repr(told)


async def test_what_clients_write_stays_one_word_of_one_line(
    door: Door, audited: Callable[[], Logs]
) -> None:
    await door.open()
    stub = tasks_of(door.channel("a.client.corefleet"))
    pool = "p\nAUDIT=1 who=operator/root " + "x" * 500
    await outcome(stub.Submit(tasks_pb2.SubmitRequest(pool=pool, request_id="r-1")))
    (line,) = audited()
    assert line["pool"].isprintable()
    assert " " not in line["pool"]
    assert len(line["pool"]) < 400
