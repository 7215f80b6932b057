"""What the contracts of bus and log are held by: NATS and memory, behind one face."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from corefleet.adapters.memory_bus import MemoryBus, MemoryServer
from corefleet.adapters.memory_log import MemoryLog
from corefleet.adapters.nats_bus import NatsBus
from corefleet.adapters.nats_log import NatsLog
from corefleet.bus import Bus, Log
from corefleet.config import NatsConfig, TlsConfig

T = TypeVar("T")


class Backend(Protocol):
    async def bus(self, on_error: Callable[[Exception], None] | None = None) -> Bus:
        """A client of its own, closed with the backend; errors fail the test unless taken."""

    async def log(self, max_bytes: int = -1) -> Log:
        """A log over a client of its own; streams that it creates hold `max_bytes`."""

    async def close(self) -> None: ...


class Errors:
    """Takes a bus's errors, which a test must expect or fail on."""

    def __init__(self) -> None:
        self.seen: list[Exception] = []

    def __call__(self, error: Exception) -> None:
        self.seen.append(error)


class MemoryBackend:
    def __init__(self) -> None:
        self.server = MemoryServer()
        self._buses: list[MemoryBus] = []
        self._errors = Errors()

    async def bus(self, on_error: Callable[[Exception], None] | None = None) -> MemoryBus:
        bus = MemoryBus(self.server, on_error or self._errors)
        self._buses.append(bus)
        return bus

    async def log(self, max_bytes: int = -1) -> MemoryLog:
        return MemoryLog(self.server, max_bytes=max_bytes)

    async def close(self) -> None:
        for bus in self._buses:
            await bus.close()
        assert self._errors.seen == []


class NatsBackend:
    def __init__(self, url: str, tls: TlsConfig | None = None) -> None:
        self._url = url
        self._tls = tls
        self._buses: list[NatsBus] = []
        self._errors = Errors()

    async def bus(self, on_error: Callable[[Exception], None] | None = None) -> NatsBus:
        bus = await connect(self._url, on_error or self._errors, self._tls)
        self._buses.append(bus)
        return bus

    async def log(self, max_bytes: int = -1) -> NatsLog:
        return NatsLog(await self.bus(), max_bytes)

    async def close(self) -> None:
        for bus in self._buses:
            await bus.close()
        assert self._errors.seen == []


async def connect(
    url: str, on_error: Callable[[Exception], None], tls: TlsConfig | None = None
) -> NatsBus:
    return await NatsBus.connect(NatsConfig(servers=(url,), tls=tls), "contract test", on_error)


class Collected(Generic[T]):
    """Collects what a handler is given; a test waits for how many there must be."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self._more = asyncio.Event()

    def __call__(self, item: T) -> None:
        self.items.append(item)
        self._more.set()

    async def until(self, right: Callable[[list[T]], bool], timeout_s: float = 20.0) -> list[T]:
        """Return the items once they are `right`; raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not self.items or not right(self.items):
                self._more.clear()
                await self._more.wait()
        return self.items

    async def at_least(self, count: int, timeout_s: float = 20.0) -> list[T]:
        """Return the items once there are `count`; raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while len(self.items) < count:
                self._more.clear()
                await self._more.wait()
        return self.items
