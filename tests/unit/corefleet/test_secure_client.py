"""The client library and a gRPC server with certificates on both sides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from corefleet.client import Client
from corefleet.errors import Unavailable
from corefleet.grpc_tls import server_credentials
from corefleet.identity import Identity, find_identity
from corefleet.rpc import tasks_pb2, tasks_pb2_grpc
from corefleet.tls import TlsFiles
from tests.servers.authority import Authority
from tests.unit.corefleet.test_client import TASK, FakeTasks

SERVER, ALICE = Identity("controld", "c1"), Identity("client", "alice")
TIMEOUT_S = 5.0


class Tasks(FakeTasks):
    """Remembers who called, and holds a watch open until it is told to end."""

    def __init__(self) -> None:
        super().__init__()
        self.callers: list[Identity | None] = []
        self.go_on = asyncio.Event()

    async def Get(self, request: tasks_pb2.GetRequest, context: Any) -> tasks_pb2.Task:  # noqa: N802
        names = context.auth_context().get("x509_subject_alternative_name", [])
        self.callers.append(find_identity(name.decode() for name in names))
        return await super().Get(request, context)

    async def Watch(  # noqa: N802
        self, request: tasks_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[tasks_pb2.TaskEvent]:
        yield tasks_pb2.TaskEvent(task=request.task, snapshot=tasks_pb2.Task(task=request.task))
        await self.go_on.wait()
        yield tasks_pb2.TaskEvent(task=request.task, finished=tasks_pb2.Task(task=request.task))


@pytest.fixture(autouse=True)
def files_are_looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corefleet.tls.LOOK_EVERY_S", 0.0)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def served(authority: Authority, tmp_path: Path) -> TlsFiles:
    return opened(authority, tmp_path / "server", SERVER)


@pytest.fixture
def ours(authority: Authority, tmp_path: Path) -> TlsFiles:
    return opened(authority, tmp_path / "client", ALICE)


def opened(authority: Authority, directory: Path, identity: Identity, **more: Any) -> TlsFiles:
    files = authority.write(directory, identity, **more)
    return TlsFiles(files.ca, files.cert, files.key)


Serve = Callable[[TlsFiles | None, Tasks], Any]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def start(files: TlsFiles | None, service: Tasks) -> str:
            server = grpc.aio.server()
            tasks_pb2_grpc.add_TasksServicer_to_server(service, server)  # type: ignore[no-untyped-call]
            if files is None:
                port = server.add_insecure_port("127.0.0.1:0")
            else:
                port = server.add_secure_port("127.0.0.1:0", server_credentials(files))
            await server.start()
            stack.push_async_callback(server.stop, None)
            return f"127.0.0.1:{port}"

        yield start


async def test_the_server_learns_who_calls(serve: Serve, served: TlsFiles, ours: TlsFiles) -> None:
    tasks = Tasks()
    async with Client(await serve(served, tasks), tls=ours) as client:
        await client.get(TASK)
    assert tasks.callers == [ALICE]


async def test_a_client_without_certificates_is_told_what_is_missing(
    serve: Serve, served: TlsFiles
) -> None:
    address = await serve(served, Tasks())
    async with Client(address, timeout_s=1.0) as client:
        with pytest.raises(Unavailable, match=f"{address} speaks TLS, and no certificates are"):
            await client.get(TASK)


async def test_a_client_of_a_foreign_ca_is_told_that_it_is_refused(
    serve: Serve, served: TlsFiles, authority: Authority, tmp_path: Path
) -> None:
    strange = opened(Authority("foreign"), tmp_path / "strange", ALICE, trusted=[authority])
    tasks = Tasks()
    address = await serve(served, tasks)
    async with Client(address, tls=strange, timeout_s=1.0) as client:
        with pytest.raises(Unavailable, match=rf"{address} (refuses us|closes).*{strange.cert}"):
            await client.get(TASK)
    assert tasks.callers == []


async def test_a_client_names_a_server_that_it_does_not_believe(
    serve: Serve, ours: TlsFiles, tmp_path: Path
) -> None:
    address = await serve(opened(Authority("foreign"), tmp_path / "foreign", SERVER), Tasks())
    async with Client(address, tls=ours, timeout_s=1.0) as client:
        with pytest.raises(Unavailable, match=f"certificate of {address} is not signed by"):
            await client.get(TASK)


async def test_a_client_names_a_server_without_tls(serve: Serve, ours: TlsFiles) -> None:
    address = await serve(None, Tasks())
    async with Client(address, tls=ours, timeout_s=1.0) as client:
        with pytest.raises(Unavailable, match=f"{address} does not speak TLS"):
            await client.get(TASK)


async def test_a_ca_is_replaced_in_three_passes_and_no_call_is_broken(
    serve: Serve,
    served: TlsFiles,
    ours: TlsFiles,
    authority: Authority,
    tmp_path: Path,
) -> None:
    new = Authority("new CA")
    tasks = Tasks()
    address = await serve(served, tasks)

    def replace(signing: Authority, *trusted: Authority) -> None:
        for files, identity in ((served, SERVER), (ours, ALICE)):
            signing.write(files.cert.parent, identity, trusted=trusted)

    async with Client(address, tls=ours, timeout_s=TIMEOUT_S) as client:
        watching = client.watch(TASK)
        assert (await anext(watching)).HasField("snapshot")
        for signing, trusted in (
            (authority, (authority, new)),
            (new, (authority, new)),
            (new, (new,)),
        ):
            replace(signing, *trusted)
            await client.get(TASK)
        assert tasks.callers == [ALICE] * 3
        assert (served.current().number, ours.current().number) == (4, 4)
        tasks.go_on.set()
        assert (await anext(watching)).HasField("finished")
    former = opened(authority, tmp_path / "former", ALICE, trusted=[new])
    async with Client(address, tls=former, timeout_s=1.0) as client:
        with pytest.raises(Unavailable, match=r"refuses us|closes the connection"):
            await client.get(TASK)
