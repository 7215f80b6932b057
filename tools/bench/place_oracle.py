"""Replays arrivals through the real placement and through an oracle, and compares them.

The real side is what runs in production: several owners, each with a Fleet of its own that
hears of nodes by digests four times a second, and decides without asking the others. Nodes
refuse what does not fit. The oracle is one owner that knows the exact state of every node
at every moment and scans all of them for the least cost, by the same costs and the same
affinity.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

import numpy as np

from controld.core.columns import Floats
from controld.core.eligibility import Slot
from controld.core.fleet import Fleet
from controld.core.placement import MAX_BONUS, PlacementRequest, place
from controld.core.score import HOME_LIMIT, crowd_costs, load_costs, place_costs
from corefleet.messages.records import DomainInfo, NodeRegistration, PoolSpec
from corefleet.messages.wire import LoadVector, NodeView, RackDigest, SlotUse

DIGEST_S = 0.25
TICK_S = 0.05
NODES_A_RACK = 40
_REFUSED_AGAIN_S = 0.005
_MIXED = 3


@dataclass(slots=True, frozen=True)
class Arrival:
    """One task of a session; `work_s` is how long it runs."""

    at_s: float
    work_s: float
    session: int
    pool: str = "chat"


@dataclass(slots=True)
class Quality:
    """How well tasks were placed. Times in seconds."""

    load_cv: float
    """Mean over time of the coefficient of variation of taken places a place, over nodes."""
    affinity_hit_rate: float
    """Of the tasks whose session ran before: placed where it ran last."""
    wait_mean_s: float
    wait_p99_s: float
    placed: int
    refused: int
    idle_while_queued: float
    """Share of the samples in which a node was idle though a task had waited a digest."""


@dataclass(slots=True)
class _Task:
    arrival: Arrival
    owner: int = 0
    avoid: str = ""
    node: int = -1
    slot: Slot | None = None


@dataclass(slots=True)
class Plant:
    """The nodes themselves: exact, shared by all."""

    sizes: list[int]
    """Places of each pool in each node: the node's CPUs."""
    pools: tuple[str, ...] = ("chat",)
    running: dict[str, Floats] = field(init=False)
    homes: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.running = {pool: np.zeros(len(self.sizes)) for pool in self.pools}

    def used(self) -> Floats:
        """Return the share of each node's places in use."""
        total: Floats = np.sum([self.running[pool] for pool in self.pools], axis=0)
        share: Floats = total / np.array(self.sizes)
        return share

    def start(self, task: _Task, node: int) -> bool:
        """Run a task on a node; False when the node has no place for it."""
        running = self.running[task.arrival.pool]
        if running[node] >= self.sizes[node]:
            return False
        running[node] += 1
        task.node = node
        return True

    def load(self, node: int) -> LoadVector:
        used = float(min(1.0, sum(self.running[p][node] for p in self.pools) / self.sizes[node]))
        return LoadVector(cpu=0.9 * used, memory_bandwidth=0.6 * used, memory=0.3 + 0.3 * used)


class Scheduler(Protocol):
    """Who decides."""

    refused: int

    def submit(self, task: _Task, now: float) -> None:
        """A task arrived."""

    def ended(self, task: _Task, now: float) -> None:
        """A task is over."""

    def beat(self, now: float) -> None:
        """Time passed: called every TICK_S."""

    def waiting(self) -> int:
        """Return how many tasks wait for a place."""


Started = Callable[[_Task, float], None]


class Owners:
    """The real placement: owners that share nothing but the nodes."""

    def __init__(self, plant: Plant, owners: int, started: Started, sample_size: int = 8) -> None:
        self.plant = plant
        self.refused = 0
        self._started = started
        self._random = Random(11)
        self._fleets = [Fleet(sample_size) for _ in range(owners)]
        self._queues: list[deque[_Task]] = [deque() for _ in range(owners)]
        self._number = 0
        self._ticks = 0
        self._racks = [
            range(first, min(first + NODES_A_RACK, len(plant.sizes)))
            for first in range(0, len(plant.sizes), NODES_A_RACK)
        ]
        for fleet in self._fleets:
            fleet.set_pools({pool: PoolSpec(name=pool) for pool in plant.pools})
            for node, size in enumerate(plant.sizes):
                slots = dict.fromkeys(plant.pools, size)
                domain = DomainInfo(domain=0, cpus="0", slots=slots)
                rack = f"r{node // NODES_A_RACK}"
                fleet.registered(
                    NodeRegistration(node=f"n{node}", epoch=1, rack=rack, domains=(domain,)), 0.0
                )
        for number in range(len(self._racks)):
            self._digest(number, 0.0)

    def submit(self, task: _Task, now: float) -> None:
        task.owner = int(self._random.random() * len(self._fleets))
        queue = self._queues[task.owner]
        queue.append(task)
        if len(queue) == 1:
            self._serve(task.owner, now)

    def ended(self, task: _Task, now: float) -> None:
        if task.slot is not None:
            self._fleets[task.owner].gave_back(task.slot, now)
        self._serve(task.owner, now)

    def beat(self, now: float) -> None:
        """Racks send their digests one after the other, each every DIGEST_S."""
        a_digest = round(DIGEST_S / TICK_S)
        for rack in range(self._ticks % a_digest, len(self._racks), a_digest):
            self._digest(rack, now)
        self._ticks += 1
        for owner, fleet in enumerate(self._fleets):
            fleet.tick(now)
            self._serve(owner, now)

    def waiting(self) -> int:
        return sum(map(len, self._queues))

    def _serve(self, owner: int, now: float) -> None:
        queue, fleet, plant = self._queues[owner], self._fleets[owner], self.plant
        for _ in range(len(queue)):
            task = queue.popleft()
            home = plant.homes.get(task.arrival.session)
            request = PlacementRequest(
                task.arrival.pool,
                home_node="" if home is None else f"n{home}",
                home_domain=0,
                avoid=task.avoid,
            )
            slot = place(fleet, request, self._random).slot
            if slot is None:
                queue.appendleft(task)
                return
            fleet.took(slot, now)
            if plant.start(task, int(slot.node.name[1:])):
                task.slot = slot
                fleet.accepted(slot)
                self._started(task, now)
            else:
                self.refused += 1
                fleet.refused(slot, now)
                fleet.gave_back(slot, now)
                task.avoid = slot.node.name
                queue.append(task)

    def _digest(self, rack: int, now: float) -> None:
        self._number += 1
        plant = self.plant
        views = tuple(
            NodeView(
                node=f"n{node}",
                epoch=1,
                load=plant.load(node),
                running=int(sum(plant.running[pool][node] for pool in plant.pools)),
                slots=tuple(
                    SlotUse(pool, 0, plant.sizes[node], int(plant.running[pool][node]))
                    for pool in plant.pools
                ),
                beat_age_s=0.1,
            )
            for node in self._racks[rack]
        )
        digest = RackDigest(
            rack=f"r{rack}", controld="c0", epoch=1, number=self._number, nodes=views
        )
        # The beat is as old as it says, so what was done since is still to be counted.
        for fleet in self._fleets:
            fleet.digest(digest, now + 0.1)


class Oracle:
    """Sees everything exactly, and scans all nodes for each decision."""

    def __init__(self, plant: Plant, started: Started) -> None:
        self.plant = plant
        self.refused = 0
        self._started = started
        self._queue: deque[_Task] = deque()
        self._sizes = np.array(plant.sizes, np.float64)
        self._places = self._sizes * len(plant.pools)

    def submit(self, task: _Task, now: float) -> None:
        self._queue.append(task)
        self._serve(now)

    def ended(self, task: _Task, now: float) -> None:
        self._serve(now)

    def beat(self, now: float) -> None:
        self._serve(now)

    def waiting(self) -> int:
        return len(self._queue)

    def _serve(self, now: float) -> None:
        blocked: list[_Task] = []
        full: set[str] = set()
        while self._queue:
            task = self._queue.popleft()
            node = -1 if task.arrival.pool in full else self._choose(task)
            if node < 0:
                full.add(task.arrival.pool)
                blocked.append(task)
                if len(full) == len(self.plant.pools):
                    break
                continue
            self.plant.start(task, node)
            self._started(task, now)
        self._queue.extendleft(reversed(blocked))

    def _choose(self, task: _Task) -> int:
        plant = self.plant
        used = np.minimum(plant.used(), 1.0)
        loads = np.zeros((len(used), 5))
        loads[:, 0], loads[:, 1], loads[:, 2] = 0.9 * used, 0.6 * used, 0.3 + 0.3 * used
        running = plant.running[task.arrival.pool]
        taken: Floats = np.sum([plant.running[pool] for pool in plant.pools], axis=0)
        costs = load_costs(loads)[_MIXED] + crowd_costs(taken, self._places)
        costs = costs + place_costs(running, self._sizes, np.zeros(len(used)))
        costs[running >= self._sizes] = np.inf
        best = int(np.argmin(costs))
        home = plant.homes.get(task.arrival.session)
        if home is not None and loads[home].max() < HOME_LIMIT:
            bonus = min(PlacementRequest("").move_cost, MAX_BONUS)
            if costs[home] - bonus <= costs[best] and np.isfinite(costs[home]):
                return home
        return best if np.isfinite(costs[best]) else -1


def replay(
    arrivals: list[Arrival],
    plant: Plant,
    make: Callable[[Plant, Started], Scheduler],
    warm_s: float = 1.0,
) -> Quality:
    """Run all arrivals to their ends. Figures count from `warm_s` to the last arrival."""
    waits: list[float] = []
    hits: list[bool] = []
    spread: list[float] = []
    idle: list[bool] = []
    ends: list[tuple[float, int, _Task]] = []
    count = 0

    def started(task: _Task, now: float) -> None:
        nonlocal count
        count += 1
        arrival = task.arrival
        if arrival.at_s >= warm_s:
            waits.append(now - arrival.at_s)
            home = plant.homes.get(arrival.session)
            if home is not None:
                hits.append(home == task.node)
        plant.homes[arrival.session] = task.node
        heapq.heappush(ends, (now + arrival.work_s, count, task))

    scheduler = make(plant, started)
    last = arrivals[-1].at_s
    next_beat, queued_beats = 0.0, 0
    for now, arrival in _moments(arrivals, ends):
        while next_beat <= now:
            scheduler.beat(next_beat)
            queued_beats = queued_beats + 1 if scheduler.waiting() else 0
            if warm_s <= next_beat <= last:
                used = plant.used()
                spread.append(float(used.std() / max(used.mean(), 1e-9)))
                idle.append(queued_beats > DIGEST_S / TICK_S and bool((used == 0).any()))
            next_beat += TICK_S
        if arrival is not None:
            scheduler.submit(_Task(arrival), now)
        else:
            _, _, task = heapq.heappop(ends)
            plant.running[task.arrival.pool][task.node] -= 1
            scheduler.ended(task, now)
    return Quality(
        load_cv=float(np.mean(spread)),
        affinity_hit_rate=float(np.mean(hits)) if hits else 0.0,
        wait_mean_s=float(np.mean(waits)),
        wait_p99_s=float(np.quantile(waits, 0.99)),
        placed=count,
        refused=scheduler.refused,
        idle_while_queued=float(np.mean(idle)),
    )


def _moments(
    arrivals: list[Arrival], ends: list[tuple[float, int, _Task]]
) -> Iterator[tuple[float, Arrival | None]]:
    """Yield arrivals and (None: take the first of `ends`) ends in the order of time."""
    at = 0
    while at < len(arrivals) or ends:
        if at < len(arrivals) and (not ends or arrivals[at].at_s <= ends[0][0]):
            yield arrivals[at].at_s, arrivals[at]
            at += 1
        else:
            yield ends[0][0], None
