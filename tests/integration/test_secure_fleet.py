"""A fleet whose every channel is TLS, and whose CA is replaced while tasks go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentctl.local.certificates import Pair
from agentctl.local.fleet import FleetPlan, LocalFleet
from corefleet.adapters.etcd_store import EtcdStore
from corefleet.adapters.nats_bus import NatsBus
from corefleet.client import Client
from corefleet.config import EtcdConfig, NatsConfig, TlsConfig, load_pools
from corefleet.errors import Unavailable
from corefleet.identity import Identity
from corefleet.pki import CertificateAuthority
from corefleet.tls import TlsFiles
from tests.contract.log_backends import Errors
from tests.servers.authority import Authority

HERE = Path(__file__).resolve().parent
BETWEEN = 5
"""Tasks that must end between two steps of a rotation."""
REFUSED_S = 1.0


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority.create(tmp_path / "ca")


@pytest.fixture
async def fleet(authority: CertificateAuthority, tmp_path: Path) -> AsyncIterator[LocalFleet]:
    pools = tuple(pool for pool in load_pools(HERE / "pools.toml") if pool.name == "counter")
    plan = FleetPlan(data=tmp_path / "fleet", nodes=1, port=0, pools=pools, tls=authority)
    async with LocalFleet(plan) as running:
        yield running


class Work:
    """One task of a session after the other; each answers how many were before it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._ended = asyncio.Event()
        self._enough = asyncio.Event()
        self.outputs: list[str] = []

    async def run(self) -> None:
        while not self._enough.is_set():
            async for event in self._client.run("counter", "task", session="one"):
                if event.HasField("finished"):
                    self.outputs.append(event.finished.output)
            self._ended.set()

    async def goes_on(self) -> None:
        """Return when BETWEEN more tasks have ended."""
        wanted = len(self.outputs) + BETWEEN
        async with asyncio.timeout(60):
            while len(self.outputs) < wanted:
                self._ended.clear()
                await self._ended.wait()

    def end(self) -> None:
        self._enough.set()


async def test_a_ca_is_replaced_while_tasks_go_on_and_the_old_one_is_refused(
    fleet: LocalFleet, authority: CertificateAuthority, tmp_path: Path
) -> None:
    left_over = authority.issue(Identity("controld", "c3"), ["127.0.0.1"])
    foreign = Authority("foreign CA").issue(Identity("controld", "c4"))
    strangers: tuple[Pair, ...] = (left_over, foreign)
    async with fleet.client() as client:
        work = Work(client)
        working = asyncio.create_task(work.run())
        await work.goes_on()
        await rotate(fleet, authority, work)
        # Every connection to NATS is made anew with what the files hold now.
        await fleet.restart_nats()
        await work.goes_on()
        work.end()
        await working
    assert work.outputs == [f"task {number}" for number in range(len(work.outputs))]

    for number, pair in enumerate(strangers):
        strange = written(tmp_path / f"strange-{number}", pair, authority.bundle_pem)
        with pytest.raises(Unavailable, match=r"refuses us|closes the connection"):
            await call(fleet, strange)
        with pytest.raises(Unavailable, match="refuses us"):
            await NatsBus.connect(
                NatsConfig(servers=(fleet.nats_url,), tls=strange), "stranger", Errors()
            )
        with pytest.raises(Unavailable, match="refuses us"):
            await EtcdStore.connect(EtcdConfig(endpoints=(fleet.etcd_endpoint,), tls=strange))
    with pytest.raises(Unavailable, match="speaks TLS, and no certificates are named"):
        await call(fleet, None)


async def rotate(fleet: LocalFleet, authority: CertificateAuthority, work: Work) -> None:
    """Trust both, reissue, drop the old. etcd learns of a CA by a restart only."""
    certificates = fleet.certificates
    assert certificates is not None
    authority.rotate("begin")
    certificates.trust(authority)
    fleet.reload_nats()
    await fleet.restart_etcd()
    await work.goes_on()
    authority.rotate("switch")
    certificates.reissue(authority)
    fleet.reload_nats()
    await work.goes_on()
    # One certificate of the old CA is left over, which is what this is to make useless.
    authority.rotate("finish", force=True)
    certificates.trust(authority)
    fleet.reload_nats()
    await fleet.restart_etcd()
    await work.goes_on()


def written(directory: Path, pair: Pair, ca: bytes) -> TlsConfig:
    """Write what a stranger shows, who believes the fleet."""
    directory.mkdir()
    contents = {"ca.pem": ca, "own.pem": pair.cert_pem, "own.key": pair.key_pem}
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    paths = [str(directory / name) for name in contents]
    return TlsConfig(ca=paths[0], cert=paths[1], key=paths[2])


async def call(fleet: LocalFleet, tls: TlsConfig | None) -> None:
    async with Client(fleet.addresses, tls=TlsFiles.of(tls), timeout_s=REFUSED_S) as client:
        await client.nodes()
