"""Bus, log and store over TLS, against real servers: whom they believe, and certificates that
are replaced while they work (docs/security.md, "Channels")."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from corefleet.adapters.etcd_store import EtcdStore
from corefleet.adapters.nats_bus import NatsBus
from corefleet.adapters.nats_log import NatsLog
from corefleet.bus import Incoming
from corefleet.config import EtcdConfig, NatsConfig, TlsConfig
from corefleet.errors import Unavailable
from corefleet.identity import Identity
from corefleet.messages.records import ClusterSettings
from corefleet.store import Compare, Put
from tests.contract.log_backends import Collected, Errors
from tests.contract.store_backends import calls_have_ended, take
from tests.servers.authority import Authority
from tests.servers.etcd import EtcdServer
from tests.servers.nats import NatsServer

NATS, ETCD = Identity("nats", "s1"), Identity("etcd", "e1")
US = Identity("controld", "c1")


@dataclass(frozen=True, slots=True)
class Certificates:
    """What a server and its client go by; `authority` signed all of it."""

    directory: Path
    authority: Authority
    nats: TlsConfig
    etcd: TlsConfig
    ours: TlsConfig

    def trust(self, *authorities: Authority) -> None:
        """Have servers and client believe these, and nobody else, once they read it."""
        ca = b"".join(each.bundle_pem for each in authorities)
        for files in (self.nats, self.etcd, self.ours):
            _replace(Path(files.ca), ca)

    def reissue(self, authority: Authority) -> None:
        for files, identity in ((self.nats, NATS), (self.etcd, ETCD), (self.ours, US)):
            issued = authority.issue(identity)
            _replace(Path(files.key), issued.key_pem)
            _replace(Path(files.cert), issued.cert_pem)

    def of(self, authority: Authority, name: str, *trusted: Authority) -> TlsConfig:
        """Return certificates of another client, which believes `trusted`."""
        return authority.write(self.directory / name, US, trusted=trusted or (self.authority,))


def _replace(path: Path, content: bytes) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    os.replace(new, path)


@pytest.fixture(scope="module")
def foreign() -> Authority:
    return Authority("foreign CA")


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    authority = Authority()
    return Certificates(
        tmp_path,
        authority,
        authority.write(tmp_path / "nats", NATS),
        authority.write(tmp_path / "etcd", ETCD),
        authority.write(tmp_path / "ours", US),
    )


@pytest.fixture
def nats(certificates: Certificates, tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path, tls=certificates.nats) as running:
        yield running


@pytest.fixture
def etcd(certificates: Certificates, tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path, tls=certificates.etcd) as running:
        yield running


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as made:
        made.push_async_callback(calls_have_ended)
        yield made


async def connect(nats: NatsServer, tls: TlsConfig | None, errors: Errors) -> NatsBus:
    config = NatsConfig(servers=(nats.url,), tls=tls)
    return await NatsBus.connect(config, "contract test", errors)


async def reconnected(nats: NatsServer, bus: NatsBus) -> None:
    """Restart the server, and return when the bus is connected again."""
    told = Collected[bool]()
    bus.on_connection(told)
    await asyncio.to_thread(nats.kill)
    await asyncio.to_thread(nats.restart)
    await told.until(lambda seen: seen[-1])
    bus.forget_listener(told)


async def test_a_bus_and_a_log_work_over_tls_and_through_a_restart(
    nats: NatsServer, certificates: Certificates, stack: AsyncExitStack
) -> None:
    bus = await connect(nats, certificates.ours, Errors())
    stack.push_async_callback(bus.close)
    seen = Collected[Incoming]()
    await bus.subscribe("large", seen)
    sent = [os.urandom(300_000) for _ in range(40)]
    for payload in sent:
        bus.publish("large", payload)
    assert [each.payload for each in await seen.at_least(40)] == sent
    settings = ClusterSettings(shards=2, streams=1)
    log = NatsLog(bus)
    await log.ensure(settings)
    await reconnected(nats, bus)
    await log.ensure(settings)
    bus.publish("large", b"after")
    assert (await seen.at_least(41))[-1].payload == b"after"


async def test_nats_and_its_clients_say_whose_certificate_is_wrong(
    nats: NatsServer, certificates: Certificates, foreign: Authority, tmp_path: Path
) -> None:
    with pytest.raises(Unavailable, match=r"asks for TLS, and `nats\.tls` is not set"):
        await connect(nats, None, Errors())
    with pytest.raises(Unavailable, match=r"refuses us: .*our certificate .*strange"):
        await connect(nats, certificates.of(foreign, "strange"), Errors())
    trusting = certificates.of(certificates.authority, "trusting", foreign)
    with pytest.raises(Unavailable, match=r"certificate of 127.* is not signed by .*trusting"):
        await connect(nats, trusting, Errors())
    plain = tmp_path / "plain"
    plain.mkdir()
    with (
        NatsServer(plain) as unsafe,
        pytest.raises(Unavailable, match=r"does not speak TLS, and `nats\.tls` is set"),
    ):
        await connect(unsafe, certificates.ours, Errors())


async def test_a_bus_outlives_the_change_of_the_ca_of_nats(
    nats: NatsServer,
    certificates: Certificates,
    stack: AsyncExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trust both, reissue, drop the old: at each step a new connection is made."""
    monkeypatch.setattr("corefleet.tls.LOOK_EVERY_S", 0.0)
    old, new = certificates.authority, Authority("new CA")
    bus = await connect(nats, certificates.ours, Errors())
    stack.push_async_callback(bus.close)
    certificates.trust(old, new)
    await reconnected(nats, bus)
    certificates.reissue(new)
    await reconnected(nats, bus)
    certificates.trust(new)
    await reconnected(nats, bus)
    left_over = certificates.of(old, "left-over", new)
    with pytest.raises(Unavailable, match="refuses us"):
        await connect(nats, left_over, Errors())


async def open_store(etcd: EtcdServer, tls: TlsConfig | None, timeout_s: float = 2.0) -> EtcdStore:
    config = EtcdConfig(endpoints=(etcd.endpoint,), timeout_s=timeout_s, tls=tls)
    return await EtcdStore.connect(config)


async def test_etcd_and_its_clients_say_whose_certificate_is_wrong(
    etcd: EtcdServer, certificates: Certificates, foreign: Authority, stack: AsyncExitStack
) -> None:
    with pytest.raises(Unavailable, match=r"refuses us: .*our certificate .*strange"):
        await open_store(etcd, certificates.of(foreign, "strange"))
    with pytest.raises(Unavailable, match=r"certificate of 127.* is not signed by .*trusting"):
        await open_store(etcd, certificates.of(certificates.authority, "trusting", foreign))


async def test_a_store_takes_up_new_certificates_and_misses_no_change(
    etcd: EtcdServer,
    certificates: Certificates,
    stack: AsyncExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The leaves of etcd are read at each connection; of its CA it learns by a restart."""
    monkeypatch.setattr("corefleet.tls.LOOK_EVERY_S", 0.0)
    monkeypatch.setattr("corefleet.adapters.etcd_endpoints._LET_GO_S", 0.2)
    old, new = certificates.authority, Authority("new CA")
    store = await open_store(etcd, certificates.ours, 20.0)
    stack.push_async_callback(store.close)
    watch = store.watch("k/", 1)
    taking = asyncio.create_task(take(watch, 40))
    lease = await store.lease(60.0)

    async def write(step: int) -> None:
        for number in range(10):
            key = f"k/{step}-{number}"
            while True:
                try:
                    await store.commit([Compare(key, 0)], [Put(key, b"v")])
                    break
                except Unavailable:
                    continue

    await write(0)
    certificates.trust(old, new)
    await asyncio.to_thread(etcd.stop)
    await asyncio.to_thread(etcd.restart)
    await write(1)
    certificates.reissue(new)
    await write(2)
    certificates.trust(new)
    await asyncio.to_thread(etcd.stop)
    await asyncio.to_thread(etcd.restart)
    await write(3)
    keys = [each.key for each in await taking]
    assert keys == [f"k/{step}-{number}" for step in range(4) for number in range(10)]
    assert not lease.ended
    with pytest.raises(Unavailable, match="refuses us"):
        await open_store(etcd, certificates.of(old, "left-over", new))
