"""The queue of a shard: a view of its tasks, ordered by session, pool and class."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Mapping
from typing import Literal

from controld.core.task import Task

CLASSES = ("online", "batch")


class Session:
    """The live tasks of one session in create order; only the first may start."""

    __slots__ = ("busy", "ended_at", "key", "order")

    def __init__(self, key: tuple[str, str]) -> None:
        self.key = key
        self.order: list[Task] = []
        self.busy = 0
        """Tasks in a busy state: 0 or 1, unless the records themselves are wrong."""
        self.ended_at = 0
        """Sequence of the newest end of a task here while its head may still be on its way."""


class PoolQueue:
    """Ready tasks of one class and pool, oldest create first."""

    __slots__ = ("blocked", "heap", "in_ring", "name", "parked", "ring", "served", "weight")

    def __init__(self, name: str, weight: int, ring: deque[PoolQueue]) -> None:
        self.name = name
        self.weight = weight
        self.ring = ring
        """Where it takes turns with the other pools of its class."""
        self.heap: list[_Entry] = []
        self.parked: dict[str, list[_Entry]] = {}
        """Tasks out of the way of other tenants' while their own tenant has its limit."""
        self.served = 0
        self.in_ring = False
        self.blocked: Block = ""
        """What keeps the pool from a place: skipped until `unblock`."""


_Entry = tuple[int, str, Task]
Block = Literal["", "place", "turn", "limit"]


class ReadyQueue:
    """Online before batch, weighted round-robin between pools, create order in a session.

    Of `batch_every` placements one is batch's while both classes have something to place.
    """

    def __init__(self, batch_every: int = 20) -> None:
        self._batch_every = batch_every
        self._weights: dict[str, int] = {}
        self.sessions: dict[tuple[str, str], Session] = {}
        self.counts: dict[str, int] = {}
        """Queued tasks by pool."""
        self._pools: dict[tuple[str, str], PoolQueue] = {}
        self._rings: dict[str, deque[PoolQueue]] = {name: deque() for name in CLASSES}
        self._online = self._rings["online"]
        self._batch = self._rings["batch"]
        self._online_run = 0
        """Online placements in a row while batch waited."""
        self._blocked: list[PoolQueue] = []

    def set_weights(self, weights: Mapping[str, int]) -> None:
        """Give each pool its turns in the round-robin; 1 when not named."""
        self._weights = dict(weights)
        for pool in self._pools.values():
            pool.weight = self._weight(pool.name)

    def session_of(self, task: Task) -> Session:
        record = task.record
        return self.sessions[(record.pool, record.session)]

    def add(self, task: Task) -> None:
        """Take in a task in state queued."""
        record = task.record
        key = (record.pool, record.session)
        session = self.sessions.get(key)
        if session is None:
            session = self.sessions[key] = Session(key)
        order = session.order
        if not order or order[-1].seq < task.seq:
            order.append(task)
        else:
            insort(order, task, key=_seq)
        self.counts[record.pool] = self.counts.get(record.pool, 0) + 1
        self._refresh(session)

    def occupy(self, task: Task) -> None:
        """`task` left the state queued and keeps its session busy."""
        self.withdraw(task)
        task.occupies = True
        self.session_of(task).busy += 1

    def withdraw(self, task: Task) -> None:
        """`task` left the state queued to be ended: those behind it wait for that."""
        task.ready = False
        self.counts[task.record.pool] -= 1

    def free(self, task: Task) -> None:
        """`task` is queued again."""
        session = self.session_of(task)
        session.busy -= 1
        task.occupies = False
        pool = task.record.pool
        self.counts[pool] = self.counts.get(pool, 0) + 1
        self._refresh(session)

    def drop(self, task: Task) -> None:
        """`task` ended, being no longer queued; the next of its session may start."""
        session = self.session_of(task)
        if task.occupies:
            task.occupies = False
            session.busy -= 1
        order = session.order
        if order[0] is task:
            del order[0]
        else:
            order.remove(task)
        if order:
            self._refresh(session)
        else:
            del self.sessions[session.key]

    def delay(self, task: Task) -> None:
        """Let `task` back off: it keeps its place, and its session waits with it."""
        task.delayed = True
        task.ready = False

    def wake(self, task: Task) -> None:
        """The back-off is over."""
        task.delayed = False
        self._refresh(self.session_of(task))

    def next_pool(self) -> PoolQueue | None:
        """Return the pool whose turn it is and that has a ready task."""
        rings = (self._online, self._batch)
        if self._online_run >= self._batch_every - 1:
            rings = (self._batch, self._online)
        for ring in rings:
            while ring:
                pool = ring[0]
                if self.peek(pool) is not None:
                    return pool
                ring.popleft()
                pool.in_ring = False
        return None

    def peek(self, pool: PoolQueue) -> Task | None:
        """Return the pool's first ready task."""
        heap = pool.heap
        while heap:
            task = heap[0][2]
            if task.ready:
                return task
            heapq.heappop(heap)
        return None

    def serve(self, pool: PoolQueue) -> None:
        """Take the pool's first task out, and pass the turn on when its share is used."""
        task = heapq.heappop(pool.heap)[2]
        task.ready = False
        if pool.ring is self._batch:
            self._online_run = 0
        elif self._batch:
            self._online_run += 1
        if pool.parked:
            self._unpark_one(pool, task.record.tenant)
        pool.served += 1
        if pool.served >= pool.weight:
            pool.served = 0
            pool.ring.rotate(-1)

    def block(self, pool: PoolQueue, by: Block) -> None:
        """Skip the pool, whose turn it is, until `unblock`."""
        pool.ring.popleft()
        pool.in_ring = False
        pool.served = 0
        pool.blocked = by
        self._blocked.append(pool)

    def unblock(self) -> None:
        """The fleet changed: all pools may try again."""
        blocked, self._blocked = self._blocked, []
        for pool in blocked:
            pool.blocked = ""
            self._enter(pool)

    def park(self, pool: PoolQueue) -> None:
        """Put the pool's first task aside until `unpark`: its tenant has its limit."""
        entry = heapq.heappop(pool.heap)
        heapq.heappush(pool.parked.setdefault(entry[2].record.tenant, []), entry)

    def behind_parked(self, pool: PoolQueue, task: Task) -> bool:
        """Return whether an earlier task of the tenant is parked."""
        lane = pool.parked.get(task.record.tenant) if pool.parked else None
        return bool(lane) and lane is not None and lane[0][0] < task.seq

    def unpark(self, name: str, tenant: str) -> None:
        """The tenant has room: its first parked task tries again, and draws the next."""
        for pool_class in CLASSES:
            pool = self._pools.get((pool_class, name))
            if pool is not None and tenant in pool.parked:
                self._unpark_one(pool, tenant)
                if not pool.blocked:
                    self._enter(pool)

    def unpark_all(self) -> None:
        """Let the first parked task of each tenant try again."""
        for pool in self._pools.values():
            for tenant in tuple(pool.parked):
                self.unpark(pool.name, tenant)

    def waiting_for_place(self) -> list[PoolQueue]:
        """Return the online pools that found no place."""
        return [p for p in self._blocked if p.blocked == "place" and p.ring is self._online]

    def first_ready(self, pool: PoolQueue, most: int) -> list[Task]:
        """Return up to `most` ready tasks of the pool: the oldest create and some of the next."""
        near = sorted(pool.heap[: 2 * most])
        return [task for _, _, task in near if task.ready][:most]

    def content(self) -> dict[str, list[str]]:
        """Return the queued tasks of each pool in create order, for comparison."""
        found: dict[str, list[Task]] = {}
        for session in self.sessions.values():
            for task in session.order:
                if task.state == "queued":
                    found.setdefault(task.record.pool, []).append(task)
        return {
            pool: [task.id for task in sorted(tasks, key=_seq)] for pool, tasks in found.items()
        }

    def _refresh(self, session: Session) -> None:
        order = session.order
        first = order[0]
        if len(order) > 1:
            order[1].ready = False
        if session.busy or first.ready or first.delayed or first.state != "queued":
            return
        first.ready = True
        record = first.record
        key = (record.pool_class, record.pool)
        pool = self._pools.get(key)
        if pool is None:
            ring = self._rings[record.pool_class]
            pool = self._pools[key] = PoolQueue(record.pool, self._weight(record.pool), ring)
        heapq.heappush(pool.heap, (first.seq, first.id, first))
        if not pool.in_ring and not pool.blocked:
            pool.in_ring = True
            pool.ring.append(pool)

    def _enter(self, pool: PoolQueue) -> None:
        if not pool.in_ring and self.peek(pool) is not None:
            pool.in_ring = True
            pool.ring.append(pool)

    def _unpark_one(self, pool: PoolQueue, tenant: str) -> None:
        lane = pool.parked.get(tenant)
        while lane:
            entry = heapq.heappop(lane)
            if entry[2].ready:
                heapq.heappush(pool.heap, entry)
                break
        if lane is not None and not lane:
            del pool.parked[tenant]

    def _weight(self, pool: str) -> int:
        return max(1, self._weights.get(pool, 1))


def _seq(task: Task) -> int:
    return task.seq
