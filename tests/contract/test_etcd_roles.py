"""What a certificate may do in etcd, held against the real server: docs/security.md."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentctl.etcd_auth import set_up
from corefleet.adapters.etcd_store import EtcdStore
from corefleet.config import EtcdConfig
from corefleet.errors import Conflict, CorefleetError
from corefleet.etcd_roles import KEYS, ROOT, USERS, Found, Step, plan
from corefleet.identity import Identity, Role
from corefleet.pki import CertificateAuthority
from corefleet.store import Compare, Put
from corefleet.subjects import NODES, POOLS, node_key, pool_key
from corefleet.tls import TlsFiles
from tests.servers.secured import SecuredEtcd, write_tls


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority.create(tmp_path_factory.mktemp("authority") / "ca")


@pytest.fixture(scope="module")
def server(
    authority: CertificateAuthority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SecuredEtcd]:
    with SecuredEtcd(tmp_path_factory.mktemp("etcd"), authority) as running:
        yield running


class Doors:
    """Opens the store with a certificate of any role."""

    def __init__(
        self, server: SecuredEtcd, authority: CertificateAuthority, directory: Path
    ) -> None:
        self.server = server
        self._authority = authority
        self._directory = directory
        self._stores: list[EtcdStore] = []

    def files(self, role: Role) -> TlsFiles:
        made = TlsFiles.of(write_tls(self._authority, self._directory / role, Identity(role, "x")))
        assert made is not None
        return made

    async def store(self, role: Role) -> EtcdStore:
        tls = write_tls(self._authority, self._directory / role, Identity(role, "x"))
        config = EtcdConfig(endpoints=(self.server.endpoint,), timeout_s=20, tls=tls)
        store = await EtcdStore.connect(config)
        self._stores.append(store)
        return store

    async def close(self) -> None:
        for store in self._stores:
            await store.close()


@pytest.fixture
async def doors(
    server: SecuredEtcd, authority: CertificateAuthority, tmp_path: Path
) -> AsyncIterator[Doors]:
    made = Doors(server, authority, tmp_path)
    await set_up(server.endpoint, made.files("operator"), dry_run=False)
    yield made
    await made.close()


async def test_a_second_run_finds_nothing_to_do(doors: Doors) -> None:
    assert await set_up(doors.server.endpoint, doors.files("operator"), dry_run=False) == []


async def test_controld_can_do_all_that_it_does(doors: Doors) -> None:
    store = await doors.store("controld")
    await store.put(pool_key("p"), b"1")
    committed = await store.commit([Compare(node_key("n"), 0)], [Put(node_key("n"), b"1")])
    assert committed.succeeded
    assert [each.key for each in (await store.range(POOLS))[0]] == [pool_key("p")]
    lease = await store.lease(5)
    revision = await store.put(node_key("m"), b"2", lease.id)
    watch = store.watch(NODES, revision)
    assert await anext(watch) is not None
    assert await store.delete(node_key("n"))


async def test_controld_reaches_no_key_of_others_and_changes_no_user(doors: Doors) -> None:
    store = await doors.store("controld")

    with pytest.raises(CorefleetError, match="permission denied"):
        await store.put("/others/key", b"1")
    with pytest.raises(Conflict, match="permission denied"):
        await set_up(doors.server.endpoint, doors.files("controld"), dry_run=True)


@pytest.mark.parametrize("role", ["agentd", "client", "monitor", "nats"])
async def test_no_other_certificate_reads_or_writes(doors: Doors, role: Role) -> None:
    async def read() -> None:
        await (await doors.store(role)).get(pool_key("p"))

    async def write() -> None:
        await (await doors.store(role)).put(pool_key("q"), b"1")

    for attempt in (read, write):
        with pytest.raises(CorefleetError, match=r"permission denied|PERMISSION_DENIED|user name"):
            await attempt()


def test_the_switch_is_thrown_last() -> None:
    steps = plan(Found())

    assert steps[-1] == Step("enable")
    assert Step("grant role", "root", ROOT) in steps[:-1]


roles = st.frozensets(st.sampled_from([KEYS, ROOT, "other"]))


@given(
    st.builds(
        Found,
        st.booleans(),
        st.dictionaries(st.sampled_from([*USERS, "guest"]), roles.map(tuple)),
        roles,
        st.booleans(),
    )
)
def test_from_anywhere_the_plan_leads_to_the_users_as_they_must_be(found: Found) -> None:
    users = {name: set(has) for name, has in found.users.items()}
    known = set(found.roles)
    for step in plan(found):
        match step.verb:
            case "add role":
                assert step.role not in known
                known.add(step.role)
            case "add user":
                assert step.user not in users
                users[step.user] = set()
            case "grant role":
                assert step.role in known
                users[step.user].add(step.role)
            case "revoke role":
                users[step.user].remove(step.role)

    assert {name: users[name] for name in USERS} == {name: {role} for name, role in USERS.items()}
    assert users.get("guest") == (set(found.users["guest"]) if "guest" in found.users else None)
    after = Found(True, {n: tuple(r) for n, r in users.items()}, frozenset(known), True)
    assert plan(after) == []
