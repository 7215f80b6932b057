"""Second looks between controlds: real ports, and what an observer's own trouble is worth."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest

from controld.cluster import Cluster
from controld.core.liveness_io import Found
from controld.gauges import make_gauges
from controld.observer import Observer
from controld.probe import probe
from corefleet.adapters.memory_bus import MemoryBus, MemoryServer
from corefleet.background import Background
from corefleet.clock import SystemClock
from corefleet.codec import encode
from corefleet.messages.records import ClusterSettings
from corefleet.messages.wire import NodeObserved
from corefleet.metrics import Metrics
from corefleet.subjects import Layout, observe

DEADLINE_S = 0.6


@dataclass
class Pair:
    """Two controlds' observers on one server; c1 asks, c2 looks."""

    server: MemoryServer
    c1: Observer
    c2: Observer
    bus: MemoryBus


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    failures: list[BaseException] = []
    background = Background(failures.append)
    server = MemoryServer()
    buses = [MemoryBus(server) for _ in range(2)]

    def make(name: str, bus: MemoryBus) -> Observer:
        cluster = Cluster(name, ClusterSettings(), Layout(4, 1), bus, None, None, SystemClock())  # type: ignore[arg-type]
        return Observer(cluster, background, make_gauges(Metrics()), bus, DEADLINE_S)

    made = Pair(server, make("c1", buses[0]), make("c2", buses[1]), buses[1])
    await made.c1.start()
    await made.c2.start()
    yield made
    await made.c1.close()
    await made.c2.close()
    await background.close()
    for bus in buses:
        await bus.close()
    assert failures == []


@pytest.fixture
async def node() -> AsyncIterator[str]:
    """A node's port that answers probes of n1 at epoch 7."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readline()
            writer.write(b"corefleet n1 7\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    await server.wait_closed()


async def test_an_observer_looks_at_the_nodes_own_port(
    pair: Pair, node: str, free_port: Callable[[], int]
) -> None:
    assert await pair.c1.ask("c2", node, "n1", 7) == "alive"
    assert await pair.c1.ask("c2", node, "n1", 8) == "nobody", "another epoch is another node"
    assert await pair.c1.ask("c2", f"127.0.0.1:{free_port()}", "n1", 7) == "nobody"
    assert await pair.c1.look(node, "n1", 7) == "alive"


async def test_an_observer_that_is_gone_fails_at_once(pair: Pair, node: str) -> None:
    await pair.c2.close()
    async with asyncio.timeout(DEADLINE_S / 2):
        assert await pair.c1.ask("c2", node, "n1", 7) == "unable"


async def test_a_port_that_is_silent_is_told_within_the_deadline(pair: Pair) -> None:
    over = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    assert await pair.c1.ask("c2", address, "n1", 7) == "nobody"
    over.set()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("trouble", [errno.ENETUNREACH, errno.EMFILE, errno.EPERM])
async def test_an_observer_whose_own_network_is_in_doubt_says_so(
    pair: Pair, node: str, monkeypatch: pytest.MonkeyPatch, trouble: int
) -> None:
    async def refuse(*_: object) -> None:
        raise OSError(trouble, "ours")

    monkeypatch.setattr(asyncio, "open_connection", refuse)
    assert await probe(node, "n1", 7, 1.0) == "unable"
    assert await pair.c1.ask("c2", node, "n1", 7) == "unable"


async def test_rule_10_an_observer_without_a_bus_of_its_own_gives_no_verdict(
    pair: Pair,
) -> None:
    answers: list[bytes] = []

    class Deaf:
        connected = False

        def publish(self, subject: str, payload: bytes) -> None:
            answers.append(payload)

    async def dead(address: str, node: str, epoch: int, timeout_s: float) -> Found:
        return "nobody"

    pair.c2.probe = dead
    pair.c2._bus = Deaf()  # type: ignore[assignment]
    assert await pair.c1.ask("c2", "127.0.0.1:9", "n1", 7) == "unable"
    assert answers == [
        encode(NodeObserved(node="n1", node_epoch=7, observer="c2", alive=False, reached=False))
    ]


async def test_nonsense_is_no_second_look(pair: Pair, node: str) -> None:
    pair.bus.publish(observe("c2"), b"\xc1")
    await pair.c2.close()
    answering = await pair.bus.subscribe(
        observe("c2"), lambda message: pair.bus.publish(message.reply, b"\xc1")
    )
    assert await pair.c1.ask("c2", node, "n1", 7) == "unable"
    await answering.close()
