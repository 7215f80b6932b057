"""The stores that the contract is held against, and how a test waits on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from typing import Protocol

from etcd.api.etcdserverpb import rpc_pb2, rpc_pb2_grpc

from corefleet.adapters.etcd_store import EtcdStore
from corefleet.adapters.memory_store import MemoryStore
from corefleet.clock import ManualClock, SystemClock
from corefleet.config import EtcdConfig, TlsConfig
from corefleet.grpc_tls import open_channel
from corefleet.store import Change, Changes, Lease, Resync, Store
from corefleet.tls import TlsFiles


class Backend(Protocol):
    """A running store, and what a test may do to it behind the clients' back."""

    async def client(self) -> Store: ...

    def now(self) -> float: ...

    async def compact(self, revision: int) -> None: ...

    async def revoke(self, lease: int) -> None: ...

    async def elapse(self, seconds: float, lease: Lease) -> None:
        """Let time pass, or less of it if the lease is lost."""


class MemoryBackend:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)

    async def client(self) -> Store:
        return self.store.peer()

    def now(self) -> float:
        return self.clock.monotonic()

    async def compact(self, revision: int) -> None:
        self.store.compact(revision)

    async def revoke(self, lease: int) -> None:
        self.store._tables.revoke(lease)

    async def elapse(self, seconds: float, lease: Lease) -> None:
        self.clock.advance(seconds)
        self.store.settle()


class EtcdBackend:
    def __init__(self, endpoint: str, stack: AsyncExitStack, tls: TlsConfig | None = None) -> None:
        self.endpoint = endpoint
        self.stack = stack
        self.tls = tls
        files = TlsFiles.of(tls)
        self.channel = open_channel(endpoint, files.current() if files else None, ())
        stack.push_async_callback(self.channel.close, None)

    async def client(self) -> Store:
        store = await EtcdStore.connect(EtcdConfig(endpoints=(self.endpoint,), tls=self.tls))
        self.stack.push_async_callback(store.close)
        return store

    def now(self) -> float:
        return SystemClock().monotonic()

    async def compact(self, revision: int) -> None:
        request = rpc_pb2.CompactionRequest(revision=revision, physical=True)
        await rpc_pb2_grpc.KVStub(self.channel).Compact(request)

    async def revoke(self, lease: int) -> None:
        await rpc_pb2_grpc.LeaseStub(self.channel).LeaseRevoke(rpc_pb2.LeaseRevokeRequest(ID=lease))

    async def elapse(self, seconds: float, lease: Lease) -> None:
        await returns_within(seconds, lease.lost())


async def returns_within(seconds: float, waiting: Awaitable[object]) -> bool:
    try:
        await asyncio.wait_for(waiting, seconds)
    except TimeoutError:
        return False
    return True


async def calls_have_ended() -> None:
    """Wait for the tasks that grpc.aio ends a moment after the calls they belong to."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=1)


async def take(watch: AsyncIterator[Changes | Resync], count: int) -> list[Change]:
    """Return the next `count` events; a Resync or an end of the watch is a failure."""
    events: list[Change] = []
    while len(events) < count:
        item = await asyncio.wait_for(anext(watch), 20)
        assert isinstance(item, Changes), item
        assert item.revision == item.events[-1].mod_revision
        events += item.events
    return events
