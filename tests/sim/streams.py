"""The simulated streams: what MemoryStream decides, behind disks, leaders and lost answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from corefleet.adapters.memory_stream import MemoryStream, subject_matches
from corefleet.bus import Entry, Stored
from corefleet.errors import CorefleetError, NotFound, Unavailable
from corefleet.messages.records import ClusterSettings
from corefleet.subjects import Layout, stream_name, stream_name_of
from tests.sim.loop import Process, World
from tests.sim.nats import Reply, SimBus

DISK_S = 0.0003
LATE_SHARE = 0.3
"""Of what is sent to a stream without a leader: stored once there is one, unanswered."""

Committed = Callable[[Process, Sequence[Stored]], None]


class StreamServer:
    """All streams, with the faults that they are told to have."""

    def __init__(self, world: World, committed: Committed) -> None:
        self._world = world
        self._rng = world.rng("streams")
        self._committed = committed
        self.streams: dict[str, MemoryStream] = {}
        self._leaderless: dict[str, float] = {}
        self._late: dict[str, list[tuple[Process, Sequence[Entry]]]] = {}
        self._busy_until: dict[str, float] = {}
        self._consumers: dict[str, list[_Consumer]] = {}
        self.disk_s = DISK_S
        self.lost_acks = 0.0

    def ensure(self, settings: ClusterSettings) -> None:
        for number in range(Layout(settings.shards, settings.streams).streams):
            name = stream_name(number)
            if name not in self.streams:
                self.streams[name] = MemoryStream(name, lambda: self._world.now)

    # Faults.

    def lose_leader(self, name: str, for_s: float) -> None:
        """Let appends to the stream go unanswered for so long."""
        self._leaderless[name] = self._world.now + for_s
        self._world.after(for_s, self._elected, name)

    def _elected(self, name: str) -> None:
        if self._leaderless.get(name, 0.0) > self._world.now + 1e-9:
            return
        self._leaderless.pop(name, None)
        for process, entries in self._late.pop(name, []):
            self._store(process, name, entries)
        for consumer in list(self._consumers.get(name, ())):
            consumer.pump()

    def has_leader(self, name: str) -> bool:
        return name not in self._leaderless

    # What clients ask.

    def append(self, process: Process, entries: Sequence[Entry], reply: Reply) -> None:
        name = stream_name_of(entries[0].subject)
        if name not in self.streams:
            reply(Unavailable(f"sim: there is no stream {name}"))
            return
        if not self.has_leader(name):
            if self._rng.random() < LATE_SHARE:
                self._late.setdefault(name, []).append((process, entries))
            return
        delay = self._rng.expovariate(1 / self.disk_s)
        when = max(self._world.now + delay, self._busy_until.get(name, 0.0))
        self._busy_until[name] = when
        self._world.at(when, self._write, process, name, entries, reply)

    def _write(self, process: Process, name: str, entries: Sequence[Entry], reply: Reply) -> None:
        if not self.has_leader(name):
            # It was on its way to the disk when the leader went.
            if self._rng.random() < LATE_SHARE:
                self._late.setdefault(name, []).append((process, entries))
            return
        answer = self._store(process, name, entries)
        if not self.lost_acks or self._rng.random() >= self.lost_acks:
            reply(answer)

    def _store(self, process: Process, name: str, entries: Sequence[Entry]) -> Any:
        stream = self.streams[name]
        first = stream.last_sequence + 1
        try:
            last = stream.append(entries)
        except CorefleetError as error:
            return error
        stored = [
            Stored(entry.subject, entry.payload, first + number)
            for number, entry in enumerate(entries)
        ]
        self._committed(process, stored)
        for consumer in list(self._consumers.get(name, ())):
            consumer.pump()
        return last

    def last(self, subject: str, reply: Reply) -> None:
        name = stream_name_of(subject)
        if self.has_leader(name):
            reply(self.streams[name].last(subject))

    def read(self, subject: str, through: int, reply: Reply) -> None:
        name = stream_name_of(subject)
        if not self.has_leader(name):
            return
        found = [m for m in self.streams[name].of(subject) if m.sequence <= through]
        if not found or found[-1].sequence != through:
            reply(NotFound(f"{subject}: no message with sequence {through} is left"))
        else:
            reply(found)

    def consume(self, name: str, consumer: _Consumer, reply: Reply) -> None:
        if self.has_leader(name):
            self._consumers.setdefault(name, []).append(consumer)
            reply(None)
            consumer.pump()

    def unconsume(self, name: str, consumer: _Consumer) -> None:
        kept = self._consumers.get(name, [])
        if consumer in kept:
            kept.remove(consumer)


class _Consumer:
    """The server's side of a follower: sends what matches, in order."""

    def __init__(self, stream: MemoryStream, follower: SimFollower, start: int) -> None:
        self._stream = stream
        self._follower = follower
        self._next = start
        self.open = True

    def pump(self) -> None:
        if not self.open:
            return
        for message in self._stream.since(self._next):
            self._next = message.sequence + 1
            if self._follower.wants(message.subject):
                bus = self._follower.bus
                bus.down.send(
                    f"follow {id(self._follower)}",
                    bus.deliver,
                    self._follower.receive,
                    self,
                    message,
                    sure=True,
                )


class SimLog:
    """Implements corefleet.bus.Log over a SimBus."""

    def __init__(self, server: StreamServer, bus: SimBus) -> None:
        self._server = server
        self._bus = bus
        self._appending: dict[asyncio.Task[None], None] = {}

    async def ensure(self, settings: ClusterSettings) -> None:
        def serve(reply: Reply) -> None:
            self._server.ensure(settings)
            reply(None)

        await self._bus.call("api", serve, 5.0)

    async def append(self, entry: Entry, timeout_s: float) -> int:
        return await self.append_batch((entry,), timeout_s)

    def append_soon(
        self, entry: Entry, timeout_s: float, done: Callable[[int | CorefleetError], None]
    ) -> None:
        async def work() -> None:
            try:
                outcome: int | CorefleetError = await self.append(entry, timeout_s)
            except CorefleetError as error:
                outcome = error
            done(outcome)

        task = asyncio.get_running_loop().create_task(work(), name="append soon")
        self._appending[task] = None
        task.add_done_callback(self._appending.pop)

    async def append_batch(self, entries: Sequence[Entry], timeout_s: float) -> int:
        process, server = self._bus.process, self._server
        sequence = await self._bus.call(
            "append", lambda reply: server.append(process, tuple(entries), reply), timeout_s
        )
        return int(sequence)

    async def last(self, subject: str, timeout_s: float) -> Stored | None:
        found: Stored | None = await self._bus.call(
            "api", lambda reply: self._server.last(subject, reply), timeout_s
        )
        return found

    async def read(self, subject: str, through: int, timeout_s: float) -> list[Stored]:
        found: list[Stored] = await self._bus.call(
            "api", lambda reply: self._server.read(subject, through, reply), timeout_s
        )
        return found

    async def follow(
        self,
        stream: int,
        filters: Sequence[str],
        handler: Callable[[Stored], Awaitable[None] | None],
        start: int = 1,
    ) -> SimFollower:
        follower = SimFollower(self._server, self._bus, stream_name(stream), filters, handler)
        follower.last = start - 1
        await follower.begin()
        return follower

    async def usage(self, stream: int, timeout_s: float) -> float:
        return 0.0


class SimFollower:
    """Implements corefleet.bus.Follower: goes on behind what it delivered, whatever breaks."""

    def __init__(
        self,
        server: StreamServer,
        bus: SimBus,
        name: str,
        filters: Sequence[str],
        handler: Callable[[Stored], Awaitable[None] | None],
    ) -> None:
        self.bus = bus
        self.last = 0
        self._server = server
        self._name = name
        self._filters = [each.split(".") for each in filters]
        self._handler = handler
        self._consumer: _Consumer | None = None
        self._closed = False
        self._making: asyncio.Task[None] | None = None

    def wants(self, subject: str) -> bool:
        return not self._filters or any(subject_matches(each, subject) for each in self._filters)

    async def begin(self) -> None:
        """Start delivery. Raises Unavailable when the stream does not answer."""
        await self._make()
        self.bus.on_connection(self._changed)

    async def close(self) -> None:
        self._closed = True
        if self._making is not None:
            self._making.cancel()
        self._discard()

    def receive(self, consumer: _Consumer, message: Stored) -> None:
        if self._closed or consumer is not self._consumer or message.sequence <= self.last:
            return
        self.last = message.sequence
        self._handler(message)

    def _changed(self, connected: bool) -> None:
        if self._closed:
            return
        self._discard()
        if connected:
            self._making = asyncio.create_task(self._again(), name=f"follow {self._name} again")

    async def _again(self) -> None:
        while not self._closed:
            try:
                await self._make()
                return
            except Unavailable:
                if not self.bus.connected:
                    return
                await asyncio.sleep(0.25)

    async def _make(self) -> None:
        stream = self._server.streams.get(self._name)
        if stream is None:
            raise Unavailable(f"sim: there is no stream {self._name}")
        self._discard()
        consumer = self._consumer = _Consumer(stream, self, self.last + 1)
        await self.bus.call(
            "api", lambda reply: self._server.consume(self._name, consumer, reply), 2.0
        )

    def _discard(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.open = False
            self._server.unconsume(self._name, consumer)
