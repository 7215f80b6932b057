"""The store in memory: the semantics of etcd for tests and for one process.

Leases are kept alive as long as the handle that granted them is open, and end by the
clock after its `close()` or `stop_keepalives()`. With a clock that moves only when told
to, `settle()` after moving it does what is due; every call does so too.
"""

from __future__ import annotations

import asyncio
import bisect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from corefleet.clock import Clock
from corefleet.errors import InvalidInput, NotFound, Unavailable
from corefleet.store import Change, Changes, Committed, Compare, Delete, KeyValue, Put, Resync

MARGIN = 0.1
"""Part of the TTL by which the holder gives up earlier than the store."""
MOST_OPERATIONS = 128
"""Of one commit, as etcd's --max-txn-ops has it."""


@dataclass(slots=True)
class _Grant:
    """A lease in the tables. While `held`, it is as if a keep-alive had just been answered."""

    ttl_s: float
    ended: asyncio.Event
    held: bool = True
    sent: float = 0.0
    keys: set[str] = field(default_factory=set)

    def valid_until(self, now: float) -> float:
        return (now if self.held else self.sent) + self.ttl_s * (1 - MARGIN)

    def expires(self, now: float) -> float:
        return (now if self.held else self.sent) + self.ttl_s


class _Tables:
    """What all handles share: the keys, their history, and the leases."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.revision = 1
        self.compacted = 0
        self.values: dict[str, KeyValue] = {}
        self.history: list[tuple[int, tuple[Change, ...]]] = []
        self.grants: dict[int, _Grant] = {}
        self.last_lease = 0
        self.watches: weakref.WeakValueDictionary[int, MemoryWatch] = weakref.WeakValueDictionary()
        self.last_watch = 0
        self._timer: asyncio.TimerHandle | None = None

    def apply(self, operations: Sequence[Put | Delete]) -> int:
        """Do all operations at one new revision; return how many changed something."""
        revision = self.revision + 1
        changes: list[Change] = []
        for operation in operations:
            before = self.values.get(operation.key)
            if isinstance(operation, Put):
                self._attach(operation.key, before.lease if before else 0, operation.lease)
                self.values[operation.key] = KeyValue(
                    operation.key,
                    operation.value,
                    revision,
                    before.create_revision if before else revision,
                    operation.lease,
                )
                changes.append(Change(operation.key, operation.value, revision))
            elif before is not None:
                self._attach(operation.key, before.lease, 0)
                del self.values[operation.key]
                changes.append(Change(operation.key, None, revision))
        if changes:
            self.revision = revision
            self.history.append((revision, tuple(changes)))
            for watch in list(self.watches.values()):
                watch.wake()
        return len(changes)

    def _attach(self, key: str, old: int, new: int) -> None:
        if old in self.grants:
            self.grants[old].keys.discard(key)
        if new:
            self.grants[new].keys.add(key)

    def check(self, operations: Sequence[Put | Delete]) -> None:
        """Raise for what etcd refuses as well: InvalidInput, or NotFound for a lease."""
        if len(operations) > MOST_OPERATIONS:
            raise InvalidInput("operations", len(operations), f"at most {MOST_OPERATIONS}")
        seen: set[str] = set()
        put: set[str] = set()
        for operation in operations:
            if not operation.key:
                raise InvalidInput("key", operation.key, "a key that is not empty")
            if isinstance(operation, Put):
                if operation.lease and operation.lease not in self.grants:
                    raise NotFound(f"lease {operation.lease:x} does not exist")
                put.add(operation.key)
            if operation.key in seen and operation.key in put:
                raise InvalidInput("operations", operation.key, "a key that is written once")
            seen.add(operation.key)

    def settle(self) -> None:
        """End the leases that are due by the clock."""
        now = self.clock.monotonic()
        for lease, grant in list(self.grants.items()):
            if grant.valid_until(now) <= now:
                grant.ended.set()
            if grant.expires(now) <= now:
                self.revoke(lease)

    def revoke(self, lease: int) -> bool:
        """End a lease and delete its keys at one revision; False if there is no such lease."""
        grant = self.grants.get(lease)
        if grant is None:
            return False
        self.apply([Delete(key) for key in sorted(grant.keys)])
        del self.grants[lease]
        grant.held, grant.sent = False, self.clock.monotonic() - grant.ttl_s
        grant.ended.set()
        return True

    def arm(self) -> None:
        """See to it that what is due next is done then, on the running loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self.clock.monotonic()
        due = [
            grant.expires(now) if grant.ended.is_set() else grant.valid_until(now)
            for grant in self.grants.values()
            if not grant.held
        ]
        if due:
            delay = max(0.001, min(due) - now)
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self.settle()
        self.arm()


class MemoryLease:
    """Implements corefleet.store.Lease."""

    def __init__(self, tables: _Tables, lease_id: int, grant: _Grant) -> None:
        self._tables = tables
        self._id = lease_id
        self._grant = grant

    @property
    def id(self) -> int:
        return self._id

    def valid_until(self) -> float:
        return self._grant.valid_until(self._tables.clock.monotonic())

    async def lost(self) -> None:
        await self._grant.ended.wait()

    async def revoke(self) -> None:
        self._tables.revoke(self._id)

    def release(self) -> None:
        """End the keep-alives and let `lost()` return, as closing the store does."""
        self.stop()
        self._grant.ended.set()

    def stop(self) -> None:
        """End the keep-alives, as if the holder's process were frozen."""
        if self._grant.held:
            self._grant.held, self._grant.sent = False, self._tables.clock.monotonic()
            self._tables.arm()


class MemoryWatch:
    """Iterator over what changes under `prefix` from revision `start` on; 0 is from now on."""

    def __init__(self, tables: _Tables, prefix: str, start: int) -> None:
        self._tables = tables
        self._prefix = prefix
        self._next = start if start > 0 else tables.revision + 1
        self._ended = False
        self._waker = asyncio.Event()
        tables.last_watch += 1
        tables.watches[tables.last_watch] = self

    def __aiter__(self) -> MemoryWatch:
        return self

    async def __anext__(self) -> Changes | Resync:
        while not self._ended:
            if self._next < self._tables.compacted:
                await self.aclose()
                return Resync(self._tables.compacted)
            history = self._tables.history
            first = bisect.bisect_left(history, self._next, key=lambda entry: entry[0])
            events = tuple(
                change
                for _, changes in history[first:]
                for change in changes
                if change.key.startswith(self._prefix)
            )
            self._next = max(self._next, self._tables.revision + 1)
            if events:
                return Changes(events, events[-1].mod_revision)
            self._waker.clear()
            await self._waker.wait()
        raise StopAsyncIteration

    def wake(self) -> None:
        """Look at the history again, because it has grown."""
        self._waker.set()

    async def aclose(self) -> None:
        """End the iteration. Idempotent."""
        self._ended = True
        self._waker.set()


class MemoryStore:
    """Implements corefleet.store.Store. Handles of one store are made by `peer`."""

    def __init__(self, clock: Clock, tables: _Tables | None = None) -> None:
        self._tables = tables or _Tables(clock)
        self._closed = False
        self._leases: list[MemoryLease] = []
        self._watches: weakref.WeakSet[MemoryWatch] = weakref.WeakSet()

    def peer(self) -> MemoryStore:
        """Return another client of the same store, with leases and watches of its own."""
        return MemoryStore(self._tables.clock, self._tables)

    async def get(self, key: str) -> KeyValue | None:
        return self._open().values.get(key)

    async def range(self, prefix: str) -> tuple[list[KeyValue], int]:
        tables = self._open()
        keys = sorted(key for key in tables.values if key.startswith(prefix))
        return [tables.values[key] for key in keys], tables.revision

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        tables = self._open()
        operation = Put(key, value, lease)
        tables.check([operation])
        tables.apply([operation])
        return tables.revision

    async def delete(self, key: str) -> bool:
        tables = self._open()
        tables.check([Delete(key)])
        return bool(tables.apply([Delete(key)]))

    async def commit(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete]
    ) -> Committed:
        tables = self._open()
        tables.check(operations)
        for compare in compares:
            value = tables.values.get(compare.key)
            if (value.mod_revision if value else 0) != compare.mod_revision:
                return Committed(False, tables.revision)
        tables.apply(operations)
        return Committed(True, tables.revision)

    async def lease(self, ttl_s: float) -> MemoryLease:
        tables = self._open()
        if ttl_s <= 0:
            raise InvalidInput("ttl_s", ttl_s, "seconds above 0")
        tables.last_lease += 1
        grant = _Grant(ttl_s, asyncio.Event())
        tables.grants[tables.last_lease] = grant
        lease = MemoryLease(tables, tables.last_lease, grant)
        self._leases.append(lease)
        return lease

    def watch(self, prefix: str, start: int) -> MemoryWatch:
        """Yield what changes under `prefix` from revision `start` on; 0 is from now on."""
        watch = MemoryWatch(self._open(), prefix, start)
        self._watches.add(watch)
        return watch

    async def close(self) -> None:
        self._closed = True
        for lease in self._leases:
            lease.release()
        for watch in list(self._watches):
            await watch.aclose()

    def compact(self, revision: int) -> None:
        """Forget what happened before `revision`: watches from there get a Resync."""
        tables = self._open()
        if not tables.compacted < revision <= tables.revision:
            raise InvalidInput(
                "revision", revision, f"above {tables.compacted}, at most {tables.revision}"
            )
        tables.compacted = revision
        tables.history = [entry for entry in tables.history if entry[0] >= revision]

    def stop_keepalives(self) -> None:
        """Let this handle's leases run out, as if its process were frozen."""
        for lease in self._leases:
            lease.stop()

    def settle(self) -> None:
        """End the leases that are due by the clock."""
        self._tables.settle()

    def _open(self) -> _Tables:
        if self._closed:
            raise Unavailable("memory store: it is closed")
        self._tables.settle()
        return self._tables
