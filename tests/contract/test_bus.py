"""The contract of corefleet.bus.Bus, held by NATS and by memory."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from corefleet.adapters import nats_connection
from corefleet.adapters.nats_bus import NatsBus
from corefleet.adapters.nats_connection import Connection
from corefleet.bus import Incoming
from corefleet.config import NatsConfig
from corefleet.errors import (
    Incompatible,
    InvalidInput,
    NoResponders,
    Timeout,
    Unavailable,
)
from tests.contract.conftest import Secured
from tests.contract.log_backends import (
    Backend,
    Collected,
    Errors,
    MemoryBackend,
    NatsBackend,
    connect,
)
from tests.servers.nats import NatsServer

_subjects = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server that no test harms."""
    with NatsServer(tmp_path_factory.mktemp("nats")) as running:
        yield running


@pytest.fixture(params=["memory", "nats", "nats over TLS"])
async def backend(
    request: pytest.FixtureRequest, server: NatsServer, secure_nats: Secured
) -> AsyncIterator[Backend]:
    made: Backend = MemoryBackend()
    if request.param == "nats":
        made = NatsBackend(server.url)
    elif request.param == "nats over TLS":
        made = NatsBackend(secure_nats.address, secure_nats.tls)
    yield made
    await made.close()


@pytest.fixture
def subject() -> str:
    """A subject that no other test uses."""
    return f"test.{next(_subjects)}"


async def test_messages_arrive_in_order_at_every_subscriber(backend: Backend, subject: str) -> None:
    sender, first, second = await backend.bus(), await backend.bus(), await backend.bus()
    seen: list[Collected[Incoming]] = []
    for bus, pattern in ((first, f"{subject}.*"), (second, f"{subject}.>"), (first, subject)):
        collected = Collected[Incoming]()
        await bus.subscribe(pattern, collected)
        seen.append(collected)
    for number in range(500):
        sender.publish(f"{subject}.a", b"%d" % number)
    sender.publish(subject, b"whole")
    expected = [b"%d" % number for number in range(500)]
    assert [each.payload for each in await seen[0].at_least(500)] == expected
    assert [each.payload for each in await seen[1].at_least(500)] == expected
    assert [each.payload for each in await seen[2].at_least(1)] == [b"whole"]
    assert {(each.subject, each.reply) for each in seen[0].items} == {(f"{subject}.a", "")}


async def test_one_member_of_a_queue_group_gets_a_message(backend: Backend, subject: str) -> None:
    sender = await backend.bus()
    every, shared = Collected[Incoming](), Collected[Incoming]()
    for _ in range(3):
        await (await backend.bus()).subscribe(subject, shared, queue="workers")
    await (await backend.bus()).subscribe(subject, every)
    for number in range(60):
        sender.publish(subject, b"%d" % number)
    await every.at_least(60)
    await shared.at_least(60)
    assert sorted(int(each.payload) for each in shared.items) == list(range(60))


async def test_request_returns_the_answer(backend: Backend, subject: str) -> None:
    server, client = await backend.bus(), await backend.bus()

    def answer(message: Incoming) -> None:
        server.publish(message.reply, message.payload.upper())

    await server.subscribe(subject, answer)
    answers = await asyncio.gather(
        *(client.request(subject, b"a%d" % number, 5.0) for number in range(200))
    )
    assert answers == [b"A%d" % number for number in range(200)]


async def test_request_without_a_listener_fails_at_once(backend: Backend, subject: str) -> None:
    bus = await backend.bus()
    with pytest.raises(NoResponders, match=subject):
        await bus.request(subject, b"", 60.0)


async def test_request_without_an_answer_times_out(backend: Backend, subject: str) -> None:
    bus = await backend.bus()
    asked = Collected[Incoming]()
    await bus.subscribe(subject, asked)
    with pytest.raises(Timeout):
        await bus.request(subject, b"", 0.1)
    # A late answer meets nobody and harms nobody.
    bus.publish(asked.items[0].reply, b"late")
    with pytest.raises(Timeout):
        await bus.request(subject, b"", 0.1)


async def test_closed_subscription_gets_nothing(backend: Backend, subject: str) -> None:
    bus, other = await backend.bus(), await backend.bus()
    closed, kept = Collected[Incoming](), Collected[Incoming]()
    subscription = await bus.subscribe(subject, closed)
    await bus.subscribe(subject, kept)
    other.publish(subject, b"1")
    await kept.at_least(1)
    await closed.at_least(1)
    await subscription.close()
    await subscription.close()
    other.publish(subject, b"2")
    await kept.at_least(2)
    assert [each.payload for each in closed.items] == [b"1"]


async def test_a_handler_that_raises_is_reported_and_goes_on(
    backend: Backend, subject: str
) -> None:
    errors = Errors()
    bus = await backend.bus(errors)
    seen = Collected[Incoming]()

    def handle(message: Incoming) -> None:
        seen(message)
        if message.payload == b"bad":
            raise ValueError("a bad message")

    await bus.subscribe(subject, handle)
    bus.publish(subject, b"bad")
    bus.publish(subject, b"good")
    await seen.at_least(2)
    assert [str(error) for error in errors.seen] == ["a bad message"]


async def test_after_close_nothing_is_sent(backend: Backend, subject: str) -> None:
    bus, other = await backend.bus(), await backend.bus()
    seen = Collected[Incoming]()
    await other.subscribe(subject, seen)
    bus.publish(subject, b"before")
    await bus.close()
    await bus.close()
    assert not bus.connected
    bus.publish(subject, b"after")
    with pytest.raises(Unavailable):
        await bus.request(subject, b"after", 1.0)
    other.publish(subject, b"last")
    assert [each.payload for each in await seen.at_least(2)] == [b"before", b"last"]


# Memory


async def test_memory_server_can_be_lost_and_found(subject: str) -> None:
    backend = MemoryBackend()
    bus = await backend.bus()
    told: list[bool] = []
    bus.on_connection(told.append)
    seen = Collected[Incoming]()
    await bus.subscribe(subject, seen)
    waiting = asyncio.create_task(bus.request(subject, b"", 60.0))
    await seen.at_least(1)
    backend.server.reachable(False)
    with pytest.raises(Unavailable):
        await waiting
    assert not bus.connected
    bus.publish(subject, b"dropped")
    backend.server.reachable(True)
    bus.publish(subject, b"arrives")
    assert [each.payload for each in await seen.at_least(2)] == [b"", b"arrives"]
    assert told == [False, True]
    await backend.close()


# NATS


async def test_payload_that_is_too_large_is_refused(server: NatsServer, subject: str) -> None:
    bus = await connect(server.url, Errors())
    with pytest.raises(InvalidInput, match="payload"):
        bus.publish(subject, bytes(2_000_000))
    with pytest.raises(InvalidInput, match="payload"):
        await bus.request(subject, bytes(2_000_000), 1.0)
    assert bus.connected
    await bus.close()


class _Followed:
    """A bus with what it tells of its connection."""

    def __init__(self, bus: NatsBus) -> None:
        self.bus = bus
        self.told = Collected[bool]()
        bus.on_connection(self.told)


async def test_outlives_a_restart_of_the_server(
    tmp_path_factory: pytest.TempPathFactory, subject: str
) -> None:
    with NatsServer(tmp_path_factory.mktemp("restart")) as mortal:
        errors = Errors()
        followed = _Followed(await connect(mortal.url, errors))
        bus = followed.bus
        seen = Collected[Incoming]()
        await bus.subscribe(subject, seen)
        waiting = asyncio.create_task(bus.request(subject, b"asked before", 60.0))
        await seen.at_least(1)
        await asyncio.to_thread(mortal.kill)
        with pytest.raises(Unavailable):
            await waiting
        assert await followed.told.at_least(1) == [False]
        bus.publish(subject, b"dropped")
        late, closed = Collected[Incoming](), Collected[Incoming]()
        await bus.subscribe(f"{subject}.late", late)
        await (await bus.subscribe(f"{subject}.late", closed)).close()
        await asyncio.to_thread(mortal.restart)
        assert await followed.told.at_least(2) == [False, True]
        bus.publish(f"{subject}.late", b"subscribed without a server")
        await late.at_least(1)
        assert closed.items == []
        bus.publish(subject, b"sent after")
        await seen.at_least(2)
        assert [each.payload for each in seen.items] == [b"asked before", b"sent after"]
        assert errors.seen
        await bus.close()


async def test_frozen_server_does_not_hold_anything_up(
    tmp_path_factory: pytest.TempPathFactory, subject: str
) -> None:
    """Requests keep their deadlines, and the connection is given up and found again."""
    with NatsServer(tmp_path_factory.mktemp("frozen")) as mortal:
        followed = _Followed(await connect(mortal.url, Errors()))
        bus = followed.bus
        seen = Collected[Incoming]()
        await bus.subscribe(subject, seen)
        mortal.freeze()
        loop = asyncio.get_running_loop()
        started = loop.time()
        for _ in range(100):
            bus.publish(subject, bytes(500_000))
        with pytest.raises(Unavailable):
            await bus.request(subject, b"", 0.2)
        assert loop.time() - started < 2.0
        assert await followed.told.at_least(1) == [False]
        mortal.thaw()
        await followed.told.at_least(2)
        bus.publish(subject, b"thawed")
        await seen.at_least(1)
        assert seen.items[-1].payload == b"thawed"
        await bus.close()


async def test_takes_the_other_server_when_one_is_frozen(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with (
        NatsServer(tmp_path_factory.mktemp("one")) as one,
        NatsServer(tmp_path_factory.mktemp("other")) as other,
    ):
        both = NatsConfig(servers=(one.url, other.url))
        followed = _Followed(await NatsBus.connect(both, "contract test", Errors()))
        bus = followed.bus
        in_use = one if bus.server == one.url else other
        in_use.freeze()
        for _ in range(100):
            bus.publish("anything", bytes(500_000))
        await followed.told.at_least(2)
        assert bus.server not in ("", in_use.url)
        with pytest.raises(NoResponders):
            await bus.request("nobody", b"", 5.0)
        await bus.close()


async def test_a_bus_closes_that_is_told_to_as_a_ping_is_answered(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio.wait_for of Python 3.11 returns the answer and forgets the cancellation."""
    pinging = asyncio.Event()
    pong: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def ping(connection: Connection) -> bool:
        pinging.set()
        await asyncio.wait_for(pong, 3.0)
        return True

    monkeypatch.setattr(Connection, "_ping", ping)
    monkeypatch.setattr(nats_connection, "_PING_EVERY_S", 0.0)
    bus = await connect(server.url, Errors())
    await pinging.wait()
    pong.set_result(None)
    async with asyncio.timeout(10.0):
        await bus.close()


async def test_no_server_is_unavailable(free_port: Callable[[], int]) -> None:
    with pytest.raises(Unavailable, match="NATS at nats://127"):
        await connect(f"nats://127.0.0.1:{free_port()}", Errors())


async def test_server_older_than_2_12_is_refused() -> None:
    info = b'INFO {"server_id":"X","version":"2.9.10","headers":true,"max_payload":1048576}\r\n'

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(info)
        while line := await reader.readline():
            if line == b"PING\r\n":
                writer.write(b"PONG\r\n")
        writer.close()

    old = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with old:
        port = old.sockets[0].getsockname()[1]
        with pytest.raises(Incompatible, match=r"2\.9.*expected 2\.12"):
            await connect(f"nats://127.0.0.1:{port}", Errors())
