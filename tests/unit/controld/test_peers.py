"""Peers that die, freeze, or come back: what the others do about their registration."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
from structlog.testing import capture_logs

from controld.cluster import Cluster
from controld.gauges import make_gauges
from controld.membership import Membership
from controld.peer_reach import GrpcReach
from controld.peers import Peers
from controld.registry import Registry
from corefleet.adapters.memory_bus import MemoryBus, MemoryServer
from corefleet.adapters.memory_store import MemoryStore
from corefleet.background import Background
from corefleet.bus import Incoming
from corefleet.clock import SystemClock
from corefleet.codec import decode, encode
from corefleet.grpc_tls import server_credentials
from corefleet.identity import Identity
from corefleet.messages.records import ClusterSettings, ControldRegistration
from corefleet.messages.wire import PeerSuspected
from corefleet.metrics import Metrics
from corefleet.store import Changes, Compare, Delete, Put
from corefleet.subjects import CONTROLDS, PEERS, Layout, controld_key
from corefleet.tls import TlsFiles
from tests.servers.authority import Authority

CLOCK = SystemClock()
DEAD = ControldRegistration(controld="c2", address="10.0.0.2:7070", started_ms=1)


def failed(error: BaseException) -> None:
    raise AssertionError(error)


class Reach:
    """Peers that live until `kill`; a frozen one's kernel still accepts."""

    def __init__(self, refuses: bool) -> None:
        self._refuses = refuses
        self.dead = asyncio.Event()
        self.asked = asyncio.Event()

    async def until_gone(self, address: str) -> None:
        await self.dead.wait()

    async def refused(self, address: str) -> bool:
        self.asked.set()
        return self._refuses


class Setting:
    """One controld's peers, on a bus and a store in memory."""

    def __init__(self, reach: Reach) -> None:
        self.background = Background(failed)
        self.store = MemoryStore(CLOCK)
        self.bus = MemoryBus(MemoryServer(CLOCK), failed)
        self.cluster = Cluster(
            "c1", ClusterSettings(), Layout(16, 2), self.bus, None, self.store, CLOCK  # type: ignore[arg-type]
        )  # fmt: skip
        self.registry = Registry(self.store, self.background)
        self.told: asyncio.Queue[PeerSuspected] = asyncio.Queue()
        self.peers = Peers(
            self.cluster, self.background, self.registry, make_gauges(Metrics()), reach
        )

    async def start(self) -> None:
        await self.store.commit(
            [Compare(controld_key("c2"), 0)], [Put(controld_key("c2"), encode(DEAD))]
        )
        await self.bus.subscribe(PEERS, self._hear)
        await self.registry.start()
        await self.peers.start()

    async def close(self) -> None:
        await self.peers.close()
        await self.registry.close()
        await self.background.close()
        await self.bus.close()
        await self.store.close()

    def _hear(self, message: Incoming) -> None:
        self.told.put_nowait(decode(message.payload, PeerSuspected))


@pytest.fixture
async def setting(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Setting, Reach]]:
    reach = Reach(request.param)
    made = Setting(reach)
    await made.start()
    yield made, reach
    await made.close()


@pytest.mark.parametrize("setting", [True], indirect=True)
async def test_a_dead_peers_registration_is_removed_and_told(
    setting: tuple[Setting, Reach],
) -> None:
    made, reach = setting
    reach.dead.set()
    async with asyncio.timeout(5):
        assert await made.told.get() == PeerSuspected(controld="c2", by="c1")
    assert await made.store.get(controld_key("c2")) is None


@pytest.mark.parametrize("setting", [False], indirect=True)
async def test_a_peer_whose_port_still_answers_keeps_its_registration(
    setting: tuple[Setting, Reach],
) -> None:
    made, reach = setting
    reach.dead.set()
    async with asyncio.timeout(5):
        await reach.asked.wait()
        reach.asked.clear()
        reach.dead.clear()
        reach.dead.set()
        await reach.asked.wait()
    assert await made.store.get(controld_key("c2")) is not None
    assert made.told.empty()


async def test_a_port_without_a_listener_refuses_and_ends_the_connection_at_once() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    reach = GrpcReach()
    async with asyncio.timeout(5):
        assert not await reach.refused(f"{host}:{port}")
        server.close()
        await server.wait_closed()
        assert await reach.refused(f"{host}:{port}")
        await reach.until_gone(f"{host}:{port}")


async def test_a_peer_with_a_certificate_of_a_foreign_ca_is_told_of(tmp_path: Path) -> None:
    foreign = Authority("foreign").write(tmp_path / "peer", Identity("controld", "c2"))
    ours = Authority().write(tmp_path / "ours", Identity("controld", "c1"))
    server = grpc.aio.server()
    port = server.add_secure_port(
        "127.0.0.1:0", server_credentials(TlsFiles(foreign.ca, foreign.cert, foreign.key))
    )
    await server.start()
    with capture_logs() as logs:
        async with asyncio.timeout(20):
            await GrpcReach(TlsFiles.of(ours)).until_gone(f"127.0.0.1:{port}")
    await server.stop(None)
    assert [log["reason"] for log in logs] == [
        f"the certificate of 127.0.0.1:{port} is not signed by {ours.ca}"
    ]


def membership(
    store: MemoryStore, background: Background, address: str, started: int
) -> Membership:
    cluster = Cluster(
        "c1", ClusterSettings(), Layout(16, 2), None, None, store, CLOCK  # type: ignore[arg-type]
    )  # fmt: skip
    registration = ControldRegistration(controld="c1", address=address, started_ms=started)
    return Membership(cluster, background, registration, 60.0)


async def test_who_was_removed_though_alive_stops_and_registers_anew() -> None:
    background, store = Background(failed), MemoryStore(CLOCK)
    member = membership(store, background, "a:1", 1)
    lost = asyncio.Event()
    await member.join(lost.set)
    first = member.revision
    member.removed(first - 1)
    assert member.valid_until() > 0.0, "that was an earlier registration of ours"
    watch = store.peer().watch(CONTROLDS, 0)
    done = await store.commit([Compare(controld_key("c1"), first)], [Delete(controld_key("c1"))])
    member.removed(done.revision)
    async with asyncio.timeout(5):
        await lost.wait()
        async for item in watch:
            assert isinstance(item, Changes)
            if item.revision > done.revision:
                break
    assert isinstance(item, Changes)
    assert item.events[-1].value is not None
    await watch.aclose()
    await member.leave()
    await background.close()
    await store.close()


async def test_a_restart_takes_its_former_selfs_place_without_waiting_for_the_lease() -> None:
    background, store = Background(failed), MemoryStore(CLOCK)
    former = membership(store, background, "a:1", 1)
    await former.join(lambda: None)
    again = membership(store.peer(), background, "a:1", 2)
    async with asyncio.timeout(5):
        await again.join(lambda: None)
    assert again.revision > former.revision
    await again.leave()
    await former.leave()
    await background.close()
    await store.close()
