"""What the store on etcd owes beyond the contract: servers that die, freeze or vanish."""

from __future__ import annotations

import asyncio
import itertools
import socket
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest

from corefleet.adapters.etcd_store import EtcdStore
from corefleet.adapters.etcd_watch import Assembler
from corefleet.clock import SystemClock
from corefleet.config import EtcdConfig
from corefleet.errors import Incompatible, InvalidInput, Timeout, Unavailable
from corefleet.store import Change, Changes, Compare, Delete, Put, Resync, Store
from tests.contract.store_backends import EtcdBackend, calls_have_ended, returns_within, take
from tests.servers.etcd import EtcdServer
from tests.servers.relay import Relay
from tests.servers.scripted_etcd import ScriptedMember, response

_prefixes = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """An etcd that no test harms."""
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd that a test may kill."""
    with EtcdServer(tmp_path) as running:
        yield running


class Connect(Protocol):
    """Connects a store that is closed when the test ends."""

    async def __call__(self, *endpoints: str, timeout_s: float = 2.0) -> EtcdStore: ...


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    async with AsyncExitStack() as stack:
        stack.push_async_callback(calls_have_ended)

        async def new(*endpoints: str, timeout_s: float = 2.0) -> EtcdStore:
            store = await EtcdStore.connect(EtcdConfig(endpoints=endpoints, timeout_s=timeout_s))
            stack.push_async_callback(store.close)
            return store

        yield new


@pytest.fixture
def prefix() -> str:
    """Keys that no other test uses."""
    return f"t{next(_prefixes)}/"


# Watches


async def write_all(store: Store, prefix: str, count: int, third: asyncio.Event) -> None:
    """Create `count` keys, each once, through whatever happens to the server.

    Sets `third` when a third of them are there.
    """
    numbers = iter(range(count))

    async def lane() -> None:
        for number in numbers:
            key = f"{prefix}{number:05}"
            while True:
                try:
                    await store.commit([Compare(key, 0)], [Put(key, b"v")])
                    break
                except Unavailable:
                    continue
            if number > count // 3:
                third.set()

    await asyncio.gather(*(lane() for _ in range(16)))


async def assert_saw_all(store: Store, prefix: str, events: list[Change], count: int) -> None:
    found, _ = await store.range(prefix)
    assert len(found) == count
    found.sort(key=lambda each: each.mod_revision)
    assert [(e.key, e.mod_revision) for e in events] == [(f.key, f.mod_revision) for f in found]


async def test_3000_events_survive_a_kill_of_the_server(
    connect: Connect, victim: EtcdServer
) -> None:
    store = await connect(victim.endpoint)
    count = 3000
    live = store.watch("k/", 1)
    taking = asyncio.create_task(take(live, count))
    third = asyncio.Event()
    writing = asyncio.create_task(write_all(store, "k/", count, third))
    await third.wait()
    await asyncio.to_thread(victim.kill)
    assert not writing.done()
    await asyncio.to_thread(victim.restart)
    await writing
    events = await taking
    await assert_saw_all(store, "k/", events, count)

    late = store.watch("k/", 1)
    events = await take(late, 1)
    assert len(events) < count, "it must still be catching up"
    await asyncio.to_thread(victim.kill)
    await asyncio.to_thread(victim.restart)
    events += await take(late, count - len(events))
    await assert_saw_all(store, "k/", events, count)
    last = await store.put("k/last", b"")
    for watch in (live, late):
        assert await take(watch, 1) == [Change("k/last", b"", last)]


async def test_fragments_are_made_whole(connect: Connect, server: EtcdServer, prefix: str) -> None:
    store = await connect(server.endpoint)
    revisions = []
    for number in range(8):
        puts = [Put(f"{prefix}{number}/{name}", bytes(230_000)) for name in "abcde"]
        revisions.append((await store.commit([], puts)).revision)
    watch = store.watch(prefix, revisions[0])
    sizes: Counter[int] = Counter()
    while sizes.total() < 40:
        item = await asyncio.wait_for(anext(watch), 10)
        assert isinstance(item, Changes)
        here = Counter(event.mod_revision for event in item.events)
        assert set(here.values()) == {5}, "a revision came in two pieces"
        sizes += here
    assert sizes == Counter(dict.fromkeys(revisions, 5))


def test_assembler_holds_back_the_newest_revision_of_a_fragment() -> None:
    def change(key: str, revision: int) -> Change:
        return Change(key, b"", revision)

    assembler = Assembler()
    assert assembler.add([change("a", 1), change("b", 2)], fragment=True) == [change("a", 1)]
    assert assembler.add([change("c", 2)], fragment=True) == []
    assert assembler.add([change("d", 2), change("e", 3)], fragment=False) == [
        *(change("b", 2), change("c", 2), change("d", 2), change("e", 3))
    ]
    assert assembler.add([change("f", 4)], fragment=False) == [change("f", 4)]


CREATED = {"created": True}
PIECE = {"fragment": True}


async def collect(watch: AsyncIterator[Changes | Resync], events: list[Change]) -> None:
    async for item in watch:
        assert isinstance(item, Changes)
        events += item.events


@pytest.mark.parametrize(
    ("scripts", "starts", "revisions"),
    [
        pytest.param(
            [[response(900, **CREATED)], [response(900, **CREATED), response(900, 11, 12)]],
            [10, 10, 13],
            [11, 12],
            id="the store's revision is not what was seen",
        ),
        pytest.param(
            [
                [response(900, **CREATED), response(900, 11, 12, **PIECE)],
                [response(900, **CREATED), response(900, 12, 12, **PIECE), response(900, 12)],
            ],
            [10, 12, 13],
            [11, 12, 12, 12],
            id="a revision that was cut in two comes again",
        ),
        pytest.param(
            [[response(900, **CREATED), response(900, 11, watch_id=0), response(950)]],
            [10, 951],
            [11],
            id="progress of the watch counts",
        ),
        pytest.param(
            [[response(900, **CREATED), response(900, 11), response(950, watch_id=-1)]],
            [10, 12],
            [11],
            id="progress of the stream may overtake events",
        ),
        pytest.param(
            [
                [response(900, **CREATED), response(900, canceled=True, cancel_reason="no leader")],
                [response(900, **CREATED), response(900, 11)],
            ],
            [10, 10, 12],
            [11],
            id="a cancelled watch is made again",
        ),
    ],
)
async def test_watch_resumes_after_what_it_handed_out(
    connect: Connect, scripts: list[list[Any]], starts: list[int], revisions: list[int]
) -> None:
    member = ScriptedMember(*scripts)
    async with member.serving() as endpoint:
        store = await connect(endpoint)
        watch = store.watch("k/", 10)
        events: list[Change] = []
        with pytest.raises(Incompatible, match="end of the script"):
            await collect(watch, events)
        assert [event.mod_revision for event in events] == revisions
        assert member.starts == starts
        await store.close()


async def test_another_cluster_is_a_resync(connect: Connect) -> None:
    other = response(40, **CREATED)
    other.header.cluster_id = 8
    async with ScriptedMember([response(900, **CREATED)], [other]).serving() as endpoint:
        store = await connect(endpoint)
        assert [item async for item in store.watch("k/", 10)] == [Resync(40)]
        await store.close()


# Leases


async def test_lease_survives_a_restart_of_the_server(connect: Connect, victim: EtcdServer) -> None:
    store = await connect(victim.endpoint)
    lease = await store.lease(2)
    await store.put("k", b"mine", lease=lease.id)
    await asyncio.to_thread(victim.kill)
    await asyncio.to_thread(victim.restart)
    assert not await returns_within(2.5, lease.lost())
    assert lease.valid_until() > SystemClock().monotonic()
    assert await store.get("k") is not None


@pytest.mark.parametrize("how", ["kill", "freeze"])
async def test_lease_is_lost_at_its_end_when_no_server_answers(
    connect: Connect, victim: EtcdServer, how: str
) -> None:
    clock = SystemClock()
    store = await connect(victim.endpoint)
    lease = await store.lease(1)
    await asyncio.to_thread(victim.kill if how == "kill" else victim.freeze)
    end = lease.valid_until()
    await asyncio.wait_for(lease.lost(), 3)
    assert lease.valid_until() == end
    assert end <= clock.monotonic() < end + 0.3


# Members that do not answer


async def test_compaction_while_cut_off_is_a_resync(
    connect: Connect, server: EtcdServer, prefix: str
) -> None:
    key = f"{prefix}a"
    direct = await connect(server.endpoint)
    async with Relay(server.endpoint) as relay, AsyncExitStack() as stack:
        store = await connect(relay.endpoint)
        watch = store.watch(prefix, await store.put(key, b"1"))
        await take(watch, 1)
        await relay.refuse()
        await direct.put(key, b"2")
        newest = await direct.put(key, b"3")
        await EtcdBackend(server.endpoint, stack).compact(newest)
        assert not await returns_within(0.1, anext(watch))
        relay.accept()
        assert await asyncio.wait_for(anext(watch), 10) == Resync(newest)
        await store.close()


@pytest.mark.parametrize("how", ["answer withheld", "connection broken"])
async def test_commit_of_unknown_outcome_is_a_timeout_and_not_repeated(
    connect: Connect, server: EtcdServer, prefix: str, how: str
) -> None:
    direct = await connect(server.endpoint)
    _, revision = await direct.range(prefix)
    done = direct.watch(prefix, revision + 1)
    async with Relay(server.endpoint) as relay:
        store = await connect(relay.endpoint, server.endpoint, timeout_s=0.6)
        relay.withholds = True
        commit = asyncio.create_task(store.commit([], [Put(f"{prefix}a", b"1")]))
        (change,) = await take(done, 1)
        if how == "connection broken":
            await relay.refuse()
        with pytest.raises(Timeout, match="may have taken effect"):
            await commit
        last = await store.put(f"{prefix}b", b"1")
        assert last == change.mod_revision + 1, "something was done twice"
        await store.close()


async def test_read_is_repeated_on_another_member(
    connect: Connect, server: EtcdServer, prefix: str
) -> None:
    async with Relay(server.endpoint) as relay:
        store = await connect(relay.endpoint, server.endpoint, timeout_s=0.9)
        await store.put(f"{prefix}a", b"1")
        relay.withholds = True
        found = await store.get(f"{prefix}a")
        assert found is not None
        started = time.perf_counter()
        await store.get(f"{prefix}a")
        assert time.perf_counter() - started < 0.2, "the member that failed is asked no more"
        await store.close()


@pytest.mark.parametrize("dead", ["refuses", "silent"])
async def test_dead_member_costs_less_than_50_ms(
    connect: Connect, server: EtcdServer, dead: str
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if dead == "silent":
            listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        connecting, calling = [], []
        for _ in range(9):
            started = time.perf_counter()
            store = await connect(address, server.endpoint)
            connected = time.perf_counter()
            await store.get("a")
            connecting.append(connected - started)
            calling.append(time.perf_counter() - connected)
            await store.close()
    assert statistics.median(connecting) < 0.05
    assert statistics.median(calling) < 0.05


async def test_unreachable_server_is_unavailable_within_the_deadline(
    connect: Connect, victim: EtcdServer
) -> None:
    store = await connect(victim.endpoint, timeout_s=0.3)
    await asyncio.to_thread(victim.kill)
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: connect(victim.endpoint, timeout_s=0.3),
        lambda: store.get("a"),
        lambda: store.put("a", b""),
        lambda: store.commit([], [Put("a", b"")]),
        lambda: store.lease(1),
    ]
    for call in calls:
        started = time.perf_counter()
        with pytest.raises(Unavailable):
            await call()
        assert time.perf_counter() - started < 0.6
    await asyncio.to_thread(victim.restart)
    assert await store.get("a") is None


async def test_old_server_is_refused(connect: Connect) -> None:
    async with ScriptedMember(version="3.3.27").serving() as endpoint:
        with pytest.raises(Incompatible, match=r"3\.3\.27"):
            await connect(endpoint)


async def test_pages_of_a_range_are_of_one_revision(
    connect: Connect, server: EtcdServer, prefix: str
) -> None:
    store = await connect(server.endpoint)
    first, last = f"{prefix}0", f"{prefix}9"
    for start in range(1000, 2100, 100):
        await store.commit([], [Put(f"{prefix}{start + n}", b"") for n in range(100)])
    await store.put(first, b"")

    async def move(here: str, there: str) -> None:
        while True:
            await store.commit([], [Delete(here), Put(there, b"")])
            here, there = there, here

    moving = asyncio.create_task(move(first, last))
    try:
        for _ in range(20):
            found, revision = await store.range(prefix)
            assert len(found) == 1101
            assert sum(each.key in (first, last) for each in found) == 1
            assert max(each.mod_revision for each in found) <= revision
    finally:
        moving.cancel()
        await asyncio.wait({moving})


@pytest.mark.parametrize("endpoints", [(), ("http://127.0.0.1:2379",), ("localhost",)])
async def test_endpoints_are_host_and_port(connect: Connect, endpoints: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInput, match="endpoints"):
        await connect(*endpoints)
