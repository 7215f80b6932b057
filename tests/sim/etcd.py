"""A simulated etcd: the tables of MemoryStore behind routes, leases that end by its clock.

Leases on the client's side are the real EtcdLease: only the calls beneath it are simulated.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from corefleet.adapters.etcd_lease import EtcdLease
from corefleet.adapters.memory_store import _Grant, _Tables
from corefleet.clock import Clock
from corefleet.errors import CorefleetError, Timeout, Unavailable
from corefleet.store import Change, Changes, Committed, Compare, Delete, KeyValue, Put, Resync
from tests.sim.loop import Process, SimClock, World
from tests.sim.nats import Reply
from tests.sim.wires import Route

T = TypeVar("T")

CALL_S = 2.0
ATTEMPT_S = 0.7
_RETRY_S = 0.05
_LEASES_EVERY_S = 0.1
LATE_SHARE = 0.3
"""Of what is asked of an etcd without a leader: done once there is one, unanswered."""

Changed = Callable[[tuple[Change, ...]], None]


class _WatchedTables(_Tables):
    """Tells of every change."""

    def __init__(self, clock: Clock, changed: Changed) -> None:
        super().__init__(clock)
        self._changed = changed

    def apply(self, operations: Sequence[Put | Delete]) -> int:
        done = super().apply(operations)
        if done:
            self._changed(self.history[-1][1])
        return done


class EtcdServer:
    """One etcd for all; `up` is false while it has no leader."""

    def __init__(self, world: World, changed: Changed) -> None:
        self._world = world
        self._rng = world.rng("etcd")
        self._told = changed
        self._watches: list[SimWatch] = []
        self._late: list[Callable[[_Tables], Any]] = []
        self.up = True
        process = Process(world, "etcd", "etcd")
        self.tables = _WatchedTables(SimClock(process), self._changed)
        world.after(_LEASES_EVERY_S, self._settle)
        world.buried.append(process)

    def lose_leader(self, for_s: float) -> None:
        """Answer nobody for so long; leases then get their whole time again, as etcd does it."""
        self.up = False
        self._world.after(for_s, self._elected)

    def _elected(self) -> None:
        self.up = True
        for grant in self.tables.grants.values():
            grant.sent = self._world.now
        late, self._late = self._late, []
        for work in late:
            self.serve(work, lambda answer: None)

    def serve(self, work: Callable[[_Tables], Any], reply: Reply) -> None:
        """Do `work` and answer; without a leader perhaps do it later, and never answer."""
        if not self.up:
            if self._rng.random() < LATE_SHARE:
                self._late.append(work)
            return
        self.tables.settle()
        try:
            answer = work(self.tables)
        except CorefleetError as error:
            answer = error
        reply(answer)

    def grant(self, ttl_s: float) -> int:
        self.tables.last_lease += 1
        lease = self.tables.last_lease
        self.tables.grants[lease] = _Grant(ttl_s, asyncio.Event(), False, self._world.now)
        return lease

    def keep_alive(self, lease: int) -> float:
        """Return the lease's TTL, 0 when there is no such lease."""
        grant = self.tables.grants.get(lease)
        if grant is None:
            return 0.0
        grant.sent = self._world.now
        return grant.ttl_s

    def watch(self, watch: SimWatch) -> None:
        self._watches.append(watch)
        watch.pump()

    def unwatch(self, watch: SimWatch) -> None:
        if watch in self._watches:
            self._watches.remove(watch)

    def _settle(self) -> None:
        if self.up:
            self.tables.settle()
        self._world.after(_LEASES_EVERY_S, self._settle)

    def _changed(self, changes: tuple[Change, ...]) -> None:
        self._told(changes)
        for watch in list(self._watches):
            watch.pump()


class SimStore:
    """Implements corefleet.store.Store for one process."""

    def __init__(self, server: EtcdServer, process: Process) -> None:
        self.server = server
        self.process = process
        self.up = Route(process.world, f"{process.name} to etcd")
        self.down = Route(process.world, f"etcd to {process.name}")
        self._clock = SimClock(process)
        self._leases: list[EtcdLease] = []
        self._watches: list[SimWatch] = []
        self._closed = False

    async def get(self, key: str) -> KeyValue | None:
        found: KeyValue | None = await self._call(lambda tables: tables.values.get(key), True)
        return found

    async def range(self, prefix: str) -> tuple[list[KeyValue], int]:
        def work(tables: _Tables) -> tuple[list[KeyValue], int]:
            keys = sorted(key for key in tables.values if key.startswith(prefix))
            return [tables.values[key] for key in keys], tables.revision

        found: tuple[list[KeyValue], int] = await self._call(work, True)
        return found

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        return (await self.commit((), (Put(key, value, lease),))).revision

    async def delete(self, key: str) -> bool:
        def work(tables: _Tables) -> bool:
            return bool(tables.apply([Delete(key)]))

        return bool(await self._call(work, False))

    async def commit(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete]
    ) -> Committed:
        def work(tables: _Tables) -> Committed:
            tables.check(operations)
            for compare in compares:
                value = tables.values.get(compare.key)
                if (value.mod_revision if value else 0) != compare.mod_revision:
                    return Committed(False, tables.revision)
            tables.apply(operations)
            return Committed(True, tables.revision)

        done: Committed = await self._call(work, False)
        return done

    async def lease(self, ttl_s: float) -> EtcdLease:
        sent = self._clock.monotonic()
        granted = float(math.ceil(ttl_s))
        number: int = await self._call(lambda tables: self.server.grant(granted), False)
        lease = EtcdLease(_Endpoints(self), self._clock, number, granted, sent)  # type: ignore[arg-type]
        self._leases.append(lease)
        return lease

    def watch(self, prefix: str, start: int) -> SimWatch:
        watch = SimWatch(self, prefix, start)
        self._watches.append(watch)
        return watch

    async def close(self) -> None:
        self._closed = True
        for watch in self._watches:
            await watch.aclose()
        await asyncio.gather(*(lease.stop() for lease in self._leases))

    def gone(self) -> None:
        """The process died."""
        self.up.reset()
        self.down.reset()
        for watch in self._watches:
            self.server.unwatch(watch)

    def cut(self, up: bool, down: bool) -> None:
        self.up.cut = self.up.cut or up
        self.down.cut = self.down.cut or down

    def heal(self) -> None:
        self.up.heal()
        self.down.heal()

    async def once(self, work: Callable[[_Tables], Any], timeout_s: float) -> Any:
        """Ask once. Raises Timeout."""
        if self._closed:
            raise Unavailable("sim: the store is closed")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def answered(answer: Any) -> None:
            if future.done():
                return
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

        def reply(answer: Any) -> None:
            self.down.send("rpc", self.process.deliver, answered, answer, sure=True)

        self.up.send("rpc", self.server.serve, work, reply, sure=True)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise Timeout(f"sim: etcd did not answer in {timeout_s:.1f} s") from None

    async def _call(self, work: Callable[[_Tables], Any], repeat: bool) -> Any:
        if not repeat:
            return await self.once(work, CALL_S)
        give_up = self._clock.monotonic() + CALL_S
        while True:
            try:
                return await self.once(work, ATTEMPT_S)
            except Timeout:
                if self._clock.monotonic() + ATTEMPT_S > give_up:
                    raise
                await asyncio.sleep(_RETRY_S)


@dataclass(slots=True)
class _Answer:
    TTL: float


class _Endpoints:
    """What EtcdLease needs of Endpoints."""

    def __init__(self, store: SimStore) -> None:
        self._store = store

    async def call(
        self,
        what: str,
        send: Callable[[Any, float], Awaitable[T]],
        *,
        repeat: bool,
        timeout_s: float = CALL_S,
        attempt_s: float = ATTEMPT_S,
    ) -> T:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + timeout_s
        while True:
            left = give_up - loop.time()
            try:
                return await send(_Member(self._store), min(attempt_s, max(0.001, left)))
            except Timeout:
                if not repeat or loop.time() >= give_up:
                    raise
                await asyncio.sleep(min(_RETRY_S, max(0.0, give_up - loop.time())))


class _Member:
    """One member as EtcdLease calls it."""

    def __init__(self, store: SimStore) -> None:
        self._store = store
        self.lease = self

    async def LeaseKeepAlive(  # noqa: N802 - as etcd spells it
        self, requests: Any, timeout: float, metadata: Any
    ) -> AsyncIterator[_Answer]:
        lease = next(requests).ID
        server = self._store.server
        yield _Answer(await self._store.once(lambda tables: server.keep_alive(lease), timeout))

    async def LeaseRevoke(self, request: Any, timeout: float, metadata: Any) -> None:  # noqa: N802
        lease = request.ID
        await self._store.once(lambda tables: tables.revoke(lease), timeout)


class SimWatch:
    """Implements the iterator of Store.watch."""

    def __init__(self, store: SimStore, prefix: str, start: int) -> None:
        self._store = store
        self._prefix = prefix
        self._next = start
        self._known: list[Changes] = []
        self._more = asyncio.Event()
        self._ended = False
        store.up.send("watch", store.server.watch, self, sure=True)

    def __aiter__(self) -> SimWatch:
        return self

    async def __anext__(self) -> Changes | Resync:
        while not self._known:
            if self._ended:
                raise StopAsyncIteration
            self._more.clear()
            await self._more.wait()
        return self._known.pop(0)

    async def aclose(self) -> None:
        self._ended = True
        self._more.set()
        self._store.server.unwatch(self)

    def pump(self) -> None:
        """Send what is new; called by the server."""
        tables = self._store.server.tables
        if self._next <= 0:
            self._next = tables.revision + 1
        first = len(tables.history)
        while first > 0 and tables.history[first - 1][0] >= self._next:
            first -= 1
        events = tuple(
            change
            for _, changes in tables.history[first:]
            for change in changes
            if change.key.startswith(self._prefix)
        )
        self._next = tables.revision + 1
        if events:
            changes = Changes(events, events[-1].mod_revision)
            self._store.down.send(
                "watch", self._store.process.deliver, self._take, changes, sure=True
            )

    def _take(self, changes: Changes) -> None:
        self._known.append(changes)
        self._more.set()
