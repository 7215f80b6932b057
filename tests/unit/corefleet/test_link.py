"""Framing over Unix sockets: real sockets in a temporary directory."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from corefleet.errors import Conflict, CorruptRecord, InvalidInput, Timeout, Unavailable
from corefleet.link import MAX_PENDING_BYTES, Link, LinkServer, connect, serve
from corefleet.messages.links import (
    MAX_FRAME_BYTES,
    CancelGenerate,
    EngineAlive,
    EnginePing,
    EngineToWorker,
    Generated,
    WorkerToEngine,
)

Handler = Callable[[Link[WorkerToEngine]], Awaitable[None]]
Serve = Callable[[Handler], Awaitable[LinkServer]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "link.sock"


@pytest.fixture
async def serve_with(path: Path) -> AsyncIterator[Serve]:
    servers: list[LinkServer] = []

    async def start(handler: Handler) -> LinkServer:
        servers.append(await serve(path, WorkerToEngine, handler))
        return servers[-1]

    yield start
    for server in servers:
        await server.close()


async def echo(link: Link[WorkerToEngine]) -> None:
    async for batch in link:
        for message in batch:
            if isinstance(message, EnginePing):
                link.send(EngineAlive(number=message.number, running=len(batch)))


async def numbers(link: Link[EngineToWorker], count: int) -> list[tuple[int, int]]:
    got: list[tuple[int, int]] = []
    while len(got) < count:
        for message in await link.receive():
            assert isinstance(message, EngineAlive)
            got.append((message.number, message.running))
    return got


async def test_messages_sent_in_one_turn_arrive_together_and_in_order(
    path: Path, serve_with: Serve
) -> None:
    await serve_with(echo)
    link = await connect(path, EngineToWorker, 1.0)
    for number in range(40):
        link.send(EnginePing(number=number))
    assert await numbers(link, 40) == [(number, 40) for number in range(40)]
    await asyncio.sleep(0)
    link.send(EnginePing(number=99))
    assert await numbers(link, 1) == [(99, 1)]
    await link.close()


@pytest.mark.parametrize("count", [1, 15, 16, 70_000])
async def test_every_array_header_is_read_back(path: Path, serve_with: Serve, count: int) -> None:
    seen: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def handler(link: Link[WorkerToEngine]) -> None:
        seen.set_result(len(await link.receive()))

    await serve_with(handler)
    link = await connect(path, EngineToWorker, 1.0)
    for number in range(count):
        link.send(CancelGenerate(call=number))
    await link.drain()
    assert await seen == count
    await link.close()


async def test_a_large_batch_is_split_into_frames_within_the_limit(
    path: Path, serve_with: Serve
) -> None:
    text = "x" * (MAX_FRAME_BYTES // 3)

    async def handler(link: Link[WorkerToEngine]) -> None:
        for call in range(7):
            link.send(Generated(call=call, text=text))
        await link.drain()

    await serve_with(handler)
    link = await connect(path, EngineToWorker, 1.0)
    batches = [batch async for batch in link]
    calls = [message.call for batch in batches for message in batch if hasattr(message, "call")]
    assert calls == list(range(7))
    assert max(len(batch) for batch in batches) == 2
    await link.close()


async def test_a_message_larger_than_a_frame_is_refused_to_its_sender(
    path: Path, serve_with: Serve
) -> None:
    await serve_with(echo)
    link = await connect(path, EngineToWorker, 1.0)
    with pytest.raises(InvalidInput, match="Generated"):
        link.send(Generated(call=1, text="x" * MAX_FRAME_BYTES))
    link.send(EnginePing(number=5))
    assert await numbers(link, 1) == [(5, 1)]
    await link.close()


async def test_a_peer_that_closes_ends_the_iteration(path: Path, serve_with: Serve) -> None:
    async def handler(link: Link[WorkerToEngine]) -> None:
        link.send(EngineAlive(number=1))

    await serve_with(handler)
    link = await connect(path, EngineToWorker, 1.0)
    assert [len(batch) async for batch in link] == [1]
    with pytest.raises(Unavailable, match="peer is gone"):
        await link.receive()
    await link.close()
    with pytest.raises(Unavailable, match="closed on this side"):
        link.send(EnginePing(number=1))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (struct.pack(">I", MAX_FRAME_BYTES + 1), "a frame of"),
        (struct.pack(">I", 3) + b"\xc1\xc1\xc1", "MessagePack|invalid"),
        (struct.pack(">I", 1) + b"\xa0", "array"),
        (
            struct.pack(">I", 15) + b"\x91" + msgspec.msgpack.encode({"type": "no-such"}),
            "no-such",
        ),
    ],
)
async def test_bytes_that_are_no_frame_are_a_clear_error(
    path: Path, data: bytes, reason: str
) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(path))
    listener.listen(1)
    link = await connect(path, EngineToWorker, 1.0)
    peer, _ = listener.accept()
    with peer, listener:
        peer.sendall(data)
        with pytest.raises(CorruptRecord, match=reason):
            await link.receive()
    await link.close()


async def test_a_frame_cut_short_is_a_gone_peer(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen(1)
        link = await connect(path, EngineToWorker, 1.0)
        peer, _ = listener.accept()
        peer.sendall(struct.pack(">I", 100) + b"\x91")
        peer.close()
        assert [batch async for batch in link] == []
        await link.close()


async def test_garbage_from_one_client_leaves_the_others_alone(
    path: Path, serve_with: Serve
) -> None:
    await serve_with(echo)
    good = await connect(path, EngineToWorker, 1.0)
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(struct.pack(">I", 2) + b"\xc1\xc1")
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    good.send(EnginePing(number=3))
    assert await numbers(good, 1) == [(3, 1)]
    await good.close()


async def test_drain_waits_for_a_slow_reader(path: Path, serve_with: Serve) -> None:
    blocked = asyncio.Event()
    finished = asyncio.Event()

    async def handler(link: Link[WorkerToEngine]) -> None:
        for call in range(4):
            link.send(Generated(call=call, text="x" * 1_000_000))
        draining = asyncio.ensure_future(link.drain())
        await asyncio.wait({draining}, timeout=0.05)
        assert not draining.done()
        blocked.set()
        await draining
        finished.set()

    await serve_with(handler)
    link = await connect(path, EngineToWorker, 1.0)
    await blocked.wait()
    assert sum([len(batch) async for batch in link]) == 4
    assert finished.is_set()
    await link.close()


async def test_a_peer_that_never_reads_is_cut(path: Path, serve_with: Serve) -> None:
    forever = asyncio.Event()

    async def handler(link: Link[WorkerToEngine]) -> None:
        await forever.wait()

    await serve_with(handler)
    link = await connect(path, EngineToWorker, 1.0)
    text = "x" * (MAX_FRAME_BYTES // 2)
    for call in range(MAX_PENDING_BYTES // len(text)):
        link.send(Generated(call=call, text=text))
        await asyncio.sleep(0)
    for call in range(2):
        link.send(Generated(call=call, text=text))
    await asyncio.sleep(0)
    assert link.closed
    with pytest.raises(Unavailable, match="unread"):
        link.send(Generated(call=99, text=""))
    await link.close()


async def test_the_socket_is_private_and_disappears_on_close(path: Path) -> None:
    server = await serve(path, WorkerToEngine, echo)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    await server.close()
    assert os.listdir(path.parent) == []


async def test_a_socket_left_by_a_dead_process_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(path))
    server = await serve(path, WorkerToEngine, echo)
    link = await connect(path, EngineToWorker, 1.0)
    link.send(EnginePing(number=1))
    assert await numbers(link, 1) == [(1, 1)]
    await link.close()
    await server.close()


async def test_a_living_listener_is_not_replaced(path: Path) -> None:
    server = await serve(path, WorkerToEngine, echo)
    with pytest.raises(Conflict, match="another process"):
        await serve(path, WorkerToEngine, echo)
    await server.close()


async def test_closing_the_server_spares_its_successors_file(path: Path) -> None:
    server = await serve(path, WorkerToEngine, echo)
    os.unlink(path)
    successor = await serve(path, WorkerToEngine, echo)
    await server.close()
    assert os.listdir(path.parent) == [path.name]
    await successor.close()


async def test_connect_waits_for_the_server(path: Path) -> None:
    connecting = asyncio.ensure_future(connect(path, EngineToWorker, 5.0))
    await asyncio.sleep(0)
    server = await serve(path, WorkerToEngine, echo)
    link = await connecting
    link.send(EnginePing(number=1))
    assert await numbers(link, 1) == [(1, 1)]
    await link.close()
    await server.close()


async def test_connect_gives_up_and_names_the_path(path: Path) -> None:
    with pytest.raises(Timeout, match=r"link\.sock: nobody listens"):
        await connect(path, EngineToWorker, 0.05)


async def test_a_path_too_long_is_refused_before_use(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="socket path"):
        await serve(tmp_path / ("x" * 108), WorkerToEngine, echo)


async def test_a_handler_that_fails_is_reported(path: Path, serve_with: Serve) -> None:
    reports: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: reports.append(str(context["exception"]))
    )

    async def handler(link: Link[WorkerToEngine]) -> None:
        raise ValueError("broken handler")

    await serve_with(handler)
    link = await connect(path, EngineToWorker, 1.0)
    assert [batch async for batch in link] == []
    assert reports == ["broken handler"]
    await link.close()
