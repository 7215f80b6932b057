"""The log over a MemoryServer, with faults on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from corefleet.adapters.memory_bus import MemoryServer
from corefleet.adapters.memory_stream import MemoryStream, subject_matches
from corefleet.bus import Entry, Stored
from corefleet.errors import (
    CorefleetError,
    InvalidInput,
    NoResponders,
    NotFound,
    StoreFull,
    Timeout,
    Unavailable,
)
from corefleet.messages.records import ClusterSettings
from corefleet.subjects import Layout, stream_name, stream_name_of

Fault = Literal["lose_ack", "drop", "late", "refuse", "full"]
"""What happens to an append: stored but the answer lost; lost; stored only at
`release_late()` with the answer lost; refused; refused for want of room."""


class MemoryLog:
    """The Log protocol over a MemoryServer.

    `fault` is asked before every append what is to go wrong with it. Every call gives
    way to other coroutines before and after it takes effect, and needs no event loop
    for it, so that a test may step coroutines by hand.
    """

    def __init__(
        self,
        server: MemoryServer,
        fault: Callable[[Sequence[Entry]], Fault | None] | None = None,
        max_bytes: int = -1,
    ) -> None:
        self._server = server
        self._max_bytes = max_bytes
        self.fault = fault
        self._late: list[tuple[Entry, ...]] = []

    async def ensure(self, settings: ClusterSettings) -> None:
        layout = Layout(settings.shards, settings.streams)
        self._reach()
        for stream in range(layout.streams):
            name = layout.stream_name(stream)
            if name not in self._server.streams:
                self._server.streams[name] = MemoryStream(
                    name, self._server.clock.monotonic, self._max_bytes
                )

    async def append(self, entry: Entry, timeout_s: float) -> int:
        return await self._append((entry,))

    def append_soon(
        self, entry: Entry, timeout_s: float, done: Callable[[int | CorefleetError], None]
    ) -> None:
        loop = asyncio.get_running_loop()

        def arrive() -> None:
            try:
                self._reach()
                outcome = self._store((entry,))
            except CorefleetError as error:
                outcome = error
            loop.call_soon(done, outcome)

        loop.call_soon(arrive)

    async def append_batch(self, entries: Sequence[Entry], timeout_s: float) -> int:
        if len({stream_name_of(entry.subject) for entry in entries}) != 1:
            subjects = [entry.subject for entry in entries]
            raise InvalidInput("entries", subjects, "one or more entries of one stream")
        return await self._append(tuple(entries))

    async def last(self, subject: str, timeout_s: float) -> Stored | None:
        await self._way()
        found = self._stream(stream_name_of(subject)).last(subject)
        await asyncio.sleep(0)
        return found

    async def read(self, subject: str, through: int, timeout_s: float) -> list[Stored]:
        await self._way()
        found = self._stream(stream_name_of(subject)).of(subject)
        await asyncio.sleep(0)
        messages = [message for message in found if message.sequence <= through]
        if not messages or messages[-1].sequence != through:
            raise NotFound(f"{subject}: no message with sequence {through} is left")
        return messages

    async def follow(
        self,
        stream: int,
        filters: Sequence[str],
        handler: Callable[[Stored], Awaitable[None] | None],
        start: int = 1,
    ) -> MemoryFollower:
        await self._way()
        return MemoryFollower(self._stream(stream_name(stream)), filters, handler, start)

    async def usage(self, stream: int, timeout_s: float) -> float:
        await self._way()
        return self._stream(stream_name(stream)).usage()

    def release_late(self) -> None:
        """Let the appends that were late arrive now, each if its expectations hold."""
        late, self._late = self._late, []
        for entries in late:
            try:
                self._stream(stream_name_of(entries[0].subject)).append(entries)
            except CorefleetError:
                # Nobody waits for this answer any more.
                continue

    async def _append(self, entries: tuple[Entry, ...]) -> int:
        await self._way()
        outcome = self._store(entries)
        await asyncio.sleep(0)
        if isinstance(outcome, CorefleetError):
            raise outcome
        return outcome

    def _store(self, entries: tuple[Entry, ...]) -> int | CorefleetError:
        """Take an append as it arrives; return its answer."""
        stream = self._stream(stream_name_of(entries[0].subject))
        fault = self.fault(entries) if self.fault is not None else None
        subject = entries[-1].subject
        if fault == "refuse":
            return Unavailable(f"{subject}: refused on demand")
        if fault == "full":
            return StoreFull(f"{subject}: full on demand")
        if fault in ("drop", "late"):
            if fault == "late":
                self._late.append(entries)
            return Timeout(f"{subject}: lost on demand")
        sequence = stream.append(entries)
        if fault == "lose_ack":
            return Timeout(f"{subject}: answer lost on demand")
        return sequence

    async def _way(self) -> None:
        await asyncio.sleep(0)
        self._reach()

    def _reach(self) -> None:
        if not self._server.up:
            raise Unavailable("memory server: not connected")

    def _stream(self, name: str) -> MemoryStream:
        stream = self._server.streams.get(name)
        if stream is None:
            raise NoResponders(f"memory server: there is no stream {name}")
        return stream


class MemoryFollower:
    """Delivers a MemoryStream's messages from a task of its own."""

    def __init__(
        self,
        stream: MemoryStream,
        filters: Sequence[str],
        handler: Callable[[Stored], Awaitable[None] | None],
        start: int,
    ) -> None:
        self._stream = stream
        self._filters = [each.split(".") for each in filters]
        self._handler = handler
        self._next = start
        self._more = asyncio.Event()
        self._more.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self._unwatch = stream.watch(self._more.set)
        self._task = asyncio.create_task(self._deliver(), name=f"follow {stream.name}")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._unwatch()
        await self._idle.wait()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _deliver(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            for message in self._stream.since(self._next):
                self._next = message.sequence + 1
                if self._closed or not self._wanted(message.subject):
                    continue
                await self._hand_on(message)

    async def _hand_on(self, message: Stored) -> None:
        self._idle.clear()
        try:
            result = self._handler(message)
            if result is not None:
                await result
        except Exception as error:  # noqa: BLE001 - one bad message must not end the rest
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"follower of {self._stream.name}", "exception": error}
            )
        finally:
            self._idle.set()

    def _wanted(self, subject: str) -> bool:
        return not self._filters or any(subject_matches(each, subject) for each in self._filters)
