"""Whole controlds in the test's process, on a server and a store in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from controld.cluster import Cluster
from controld.parts import Parts
from controld.registry import Registry
from corefleet.adapters.memory_bus import MemoryBus, MemoryServer
from corefleet.adapters.memory_log import MemoryLog
from corefleet.adapters.memory_store import MemoryStore
from corefleet.background import Background
from corefleet.bus import Bus, Log
from corefleet.clock import SystemClock
from corefleet.codec import encode
from corefleet.config import AuthConfig, ControldConfig, LivenessConfig
from corefleet.messages.records import ClusterSettings, PoolSpec
from corefleet.subjects import Layout, pool_key
from corefleet.tls import TlsFiles

SETTINGS = ClusterSettings(shards=8, streams=2)
POOL = PoolSpec(name="p", agent="some:Agent", slots=64)


@dataclass(frozen=True, slots=True)
class Running:
    """One controld that runs in this process."""

    address: str
    store: MemoryStore
    log: MemoryLog
    parts: Parts
    stack: AsyncExitStack

    async def stop(self) -> None:
        """Drain it."""
        await self.stack.aclose()


class Plane:
    """One server, one store, and the controlds and nodes on them."""

    def __init__(self) -> None:
        self.clock = SystemClock()
        self.server = MemoryServer(self.clock)
        self.store = MemoryStore(self.clock)
        self.failures: list[BaseException] = []

    async def controld(
        self,
        name: str,
        lease_ttl_s: float = 1.0,
        liveness: LivenessConfig | None = None,
        auth: AuthConfig | None = None,
        tls: TlsFiles | None = None,
    ) -> Running:
        """Start a controld; what one of its parts dies of is kept in `failures`."""
        config = ControldConfig(
            id=name,
            listen="127.0.0.1:0",
            lease_ttl_s=lease_ttl_s,
            cluster=SETTINGS,
            liveness=liveness or LivenessConfig(),
            auth=auth or AuthConfig(),
        )
        stack = AsyncExitStack()
        background = Background(self.failures.append)
        stack.push_async_callback(background.close)
        store = self.store.peer()
        stack.push_async_callback(store.close)
        buses = [MemoryBus(self.server, self._failed) for _ in range(2)]
        for bus in buses:
            stack.push_async_callback(bus.close)
        log = MemoryLog(self.server)
        await log.ensure(SETTINGS)
        cluster = Cluster(
            name, SETTINGS, Layout(SETTINGS.shards, SETTINGS.streams), buses[0], log, store,
            self.clock,
        )  # fmt: skip
        registry = Registry(store, background)
        stack.push_async_callback(registry.close)
        await registry.start()
        parts = Parts(config, cluster, background, registry, buses[1], tls)
        address = await parts.start(stack)
        return Running(address, store, log, parts, stack)

    def connect(self) -> Callable[[str, Callable[[Exception], None]], Awaitable[tuple[Bus, Log]]]:
        """Return what connects fake nodes to this server."""

        async def connect(name: str, on_error: Callable[[Exception], None]) -> tuple[Bus, Log]:
            return MemoryBus(self.server, on_error), MemoryLog(self.server)

        return connect

    def _failed(self, error: Exception) -> None:
        self.failures.append(error)


@asynccontextmanager
async def plane_of(pool: PoolSpec) -> AsyncIterator[Plane]:
    """Yield a plane with one pool; afterwards no part of it may have failed."""
    made = Plane()
    await made.store.put(pool_key(pool.name), encode(pool))
    yield made
    await made.store.close()
    assert made.failures == []
