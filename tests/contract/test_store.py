"""The contract of corefleet.store, held by etcd and by memory."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest

from corefleet.adapters.memory_store import MemoryStore
from corefleet.clock import SystemClock
from corefleet.errors import InvalidInput, NotFound, Unavailable
from corefleet.store import Change, Changes, Compare, Delete, Put, Resync, Store
from tests.contract.conftest import Secured
from tests.contract.store_backends import (
    Backend,
    EtcdBackend,
    MemoryBackend,
    calls_have_ended,
    returns_within,
    take,
)
from tests.servers.etcd import EtcdServer

_prefixes = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """An etcd that no test harms."""
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture(params=["memory", "etcd", "etcd over TLS"])
async def backend(
    request: pytest.FixtureRequest, server: EtcdServer, secure_etcd: Secured
) -> AsyncIterator[Backend]:
    async with AsyncExitStack() as stack:
        stack.push_async_callback(calls_have_ended)
        if request.param == "memory":
            yield MemoryBackend()
        elif request.param == "etcd":
            yield EtcdBackend(server.endpoint, stack)
        else:
            yield EtcdBackend(secure_etcd.address, stack, secure_etcd.tls)


@pytest.fixture
async def store(backend: Backend) -> AsyncIterator[Store]:
    client = await backend.client()
    yield client
    await client.close()


@pytest.fixture
def prefix() -> str:
    """Keys that no other test uses."""
    return f"t{next(_prefixes)}/"


# Keys and commits


async def test_reads_what_was_put(store: Store, prefix: str) -> None:
    assert await store.get(f"{prefix}a") is None
    first = await store.put(f"{prefix}a", b"one")
    second = await store.put(f"{prefix}a", b"two")
    found = await store.get(f"{prefix}a")
    assert found is not None
    assert (found.value, found.create_revision, found.mod_revision, found.lease) == (
        *(b"two", first, second),
        0,
    )
    assert second == first + 1
    assert await store.delete(f"{prefix}a")
    assert not await store.delete(f"{prefix}a")
    assert await store.get(f"{prefix}a") is None


async def test_range_is_ordered_and_whole(store: Store, prefix: str) -> None:
    names = [f"{prefix}{number:04}" for number in range(1203)]
    for start in range(0, len(names), 100):
        await store.commit([], [Put(name, b"v") for name in reversed(names[start : start + 100])])
    last = await store.put(f"{prefix[:-1]}0", b"the first key after the prefix")
    found, revision = await store.range(prefix)
    assert [each.key for each in found] == names
    assert revision == last
    assert await store.range(f"{prefix}none/") == ([], revision)


async def test_commit_does_all_or_nothing(store: Store, prefix: str) -> None:
    a, b, c = (f"{prefix}{name}" for name in "abc")
    first = await store.commit([Compare(a, 0), Compare(b, 0)], [Put(a, b"1"), Put(b, b"1")])
    assert first.succeeded
    refused = await store.commit([Compare(a, first.revision), Compare(b, 0)], [Put(c, b"1")])
    assert (refused.succeeded, refused.revision) == (False, first.revision)
    assert await store.get(c) is None
    second = await store.commit([Compare(a, first.revision)], [Delete(a), Put(c, b"2")])
    assert (second.succeeded, second.revision) == (True, first.revision + 1)
    assert [each.key for each in (await store.range(prefix))[0]] == [b, c]
    nothing = await store.commit([Compare(a, 0)], [Delete(a)])
    assert (nothing.succeeded, nothing.revision) == (True, second.revision)


async def test_what_cannot_be_committed_is_refused(store: Store, prefix: str) -> None:
    key = f"{prefix}a"
    twice: list[list[Put | Delete]] = [
        [Put(key, b""), Put(key, b"")],
        [Put(key, b""), Delete(key)],
    ]
    for operations in twice:
        with pytest.raises(InvalidInput):
            await store.commit([], operations)
    with pytest.raises(InvalidInput):
        await store.commit([], [Put(f"{key}{number}", b"") for number in range(129)])
    with pytest.raises(InvalidInput):
        await store.put("", b"")
    with pytest.raises(InvalidInput):
        await store.lease(0)
    with pytest.raises(NotFound):
        await store.put(key, b"", lease=987654321)
    with pytest.raises(NotFound):
        await store.commit([], [Put(key, b"", lease=987654321)])
    assert await store.get(key) is None


async def test_every_epoch_has_one_winner(backend: Backend, prefix: str) -> None:
    key = f"{prefix}owner"
    epochs = 12
    wins: Counter[int] = Counter()

    async def contend(name: str) -> None:
        client = await backend.client()
        while True:
            held = await client.get(key)
            epoch = int(held.value.split()[0]) if held else 0
            if epoch == epochs:
                break
            fence = Compare(key, held.mod_revision if held else 0)
            done = await client.commit([fence], [Put(key, f"{epoch + 1} {name}".encode())])
            if done.succeeded:
                wins[epoch + 1] += 1
        await client.close()

    await asyncio.gather(*(contend(f"c{number}") for number in range(16)))
    assert wins == Counter(range(1, epochs + 1))


# Leases


async def test_lease_outlives_its_ttl_while_held(
    backend: Backend, store: Store, prefix: str
) -> None:
    lease = await store.lease(1)
    await store.put(f"{prefix}a", b"mine", lease=lease.id)
    before = lease.valid_until()
    await backend.elapse(3.2, lease)
    assert lease.valid_until() >= before + 2
    assert backend.now() < lease.valid_until() < backend.now() + 1
    found = await store.get(f"{prefix}a")
    assert found is not None
    assert found.lease == lease.id


async def test_keys_go_when_the_holder_is_gone(backend: Backend, store: Store, prefix: str) -> None:
    holder = await backend.client()
    lease = await holder.lease(1)
    await holder.commit([], [Put(f"{prefix}{name}", b"mine", lease.id) for name in "ba"])
    revision = await store.put(f"{prefix}c", b"not mine")
    lost = asyncio.create_task(lease.lost())
    await holder.close()
    await lost
    assert lease.valid_until() > backend.now(), "closing ends the keep-alives, not the lease"
    watch = store.watch(prefix, revision + 1)
    if isinstance(backend, MemoryBackend):
        await backend.elapse(1, lease)
    gone = await take(watch, 2)
    assert [(each.key, each.value) for each in gone] == [
        (f"{prefix}a", None),
        (f"{prefix}b", None),
    ]
    assert gone[0].mod_revision == gone[1].mod_revision
    assert backend.now() > lease.valid_until(), "the holder gives up before the store does"


async def test_revoking_takes_the_keys_along(backend: Backend, store: Store, prefix: str) -> None:
    lease = await store.lease(60)
    await store.put(f"{prefix}a", b"1", lease=lease.id)
    await store.put(f"{prefix}b", b"1", lease=lease.id)
    await store.put(f"{prefix}b", b"2")
    await lease.revoke()
    await asyncio.wait_for(lease.lost(), 5)
    assert lease.valid_until() <= backend.now()
    assert [each.key for each in (await store.range(prefix))[0]] == [f"{prefix}b"]
    await lease.revoke()


async def test_loss_is_noticed_when_revoked_elsewhere(backend: Backend, store: Store) -> None:
    lease = await store.lease(1)
    assert not await returns_within(0.01, lease.lost())
    await backend.revoke(lease.id)
    await asyncio.wait_for(lease.lost(), 5)
    assert lease.valid_until() <= backend.now()
    await lease.revoke()


async def test_memory_leases_end_by_a_clock_that_runs() -> None:
    store = MemoryStore(SystemClock())
    holder = store.peer()
    lease = await holder.lease(0.05)
    revision = await holder.put("a", b"mine", lease=lease.id)
    assert not await returns_within(0.1, lease.lost()), "held beyond its TTL"
    holder.stop_keepalives()
    await asyncio.wait_for(lease.lost(), 5)
    (gone,) = await take(store.watch("a", revision + 1), 1)
    assert gone.value is None
    await holder.close()
    await store.close()


# Watches


async def test_watch_yields_changes_in_order_from_its_start(store: Store, prefix: str) -> None:
    before = await store.put(f"{prefix}a", b"before")
    first = await store.put(f"{prefix}a", b"1")
    watch = store.watch(prefix, before + 1)
    assert await take(watch, 1) == [Change(f"{prefix}a", b"1", first)]
    await store.put(f"other-{prefix}", b"")
    done = await store.commit([], [Put(f"{prefix}c", b"2"), Delete(f"{prefix}a")])
    last = await store.put(f"{prefix}c", b"3")
    assert await take(watch, 3) == [
        Change(f"{prefix}c", b"2", done.revision),
        Change(f"{prefix}a", None, done.revision),
        Change(f"{prefix}c", b"3", last),
    ]


async def test_watch_goes_on_after_its_reader_stopped_waiting(store: Store, prefix: str) -> None:
    revision = await store.put(f"{prefix}a", b"1")
    watch = store.watch(prefix, revision + 1)
    for value in (b"2", b"3"):
        assert not await returns_within(0.05, anext(watch))
        revision = await store.put(f"{prefix}a", value)
        assert await take(watch, 1) == [Change(f"{prefix}a", value, revision)]


async def test_compacted_start_is_a_resync(backend: Backend, store: Store, prefix: str) -> None:
    start = await store.put(f"{prefix}a", b"1")
    await store.put(f"{prefix}a", b"2")
    newest = await store.put(f"{prefix}a", b"3")
    await backend.compact(newest)
    watch = store.watch(prefix, start)
    assert await asyncio.wait_for(anext(watch), 5) == Resync(newest)
    with pytest.raises(StopAsyncIteration):
        await anext(watch)
    assert await take(store.watch(prefix, newest), 1) == [Change(f"{prefix}a", b"3", newest)]


async def test_closing_ends_watches_and_tasks(backend: Backend, prefix: str) -> None:
    mine = asyncio.all_tasks()
    client = await backend.client()
    lease = await client.lease(1)
    revision = await client.put(f"{prefix}a", b"1", lease=lease.id)
    idle = client.watch(prefix, revision + 1)
    used = client.watch(prefix, revision)
    await take(used, 1)

    async def rest() -> list[Changes | Resync]:
        return [item async for item in used]

    waiting = asyncio.create_task(rest())
    assert not await returns_within(0.01, asyncio.shield(waiting))
    await client.close()
    with pytest.raises(StopAsyncIteration):
        await anext(idle)
    assert await asyncio.wait_for(waiting, 5) == []
    await client.close()
    await calls_have_ended()
    assert asyncio.all_tasks() == mine
    with pytest.raises(Unavailable):
        await client.get(f"{prefix}a")
