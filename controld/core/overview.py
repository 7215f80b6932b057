"""What a controld shows of itself and of the fleet: counts of its pools, nodes summed up."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from controld.core.affinity import Affinity
from controld.core.eligibility import Node
from corefleet.messages.wire import PoolCounts
from corefleet.metrics import LATENCY_BUCKETS_S

_SERVING = ("ready", "suspect")
"""States in which a node's places count as capacity."""


class PoolTally:
    """What happened in one pool since the process began. Grows only."""

    __slots__ = ("finished", "home", "not_admitted", "placed", "requeued", "waits")

    def __init__(self) -> None:
        self.placed = 0
        self.finished = 0
        self.not_admitted = 0
        self.home: dict[str, int] = {}
        self.requeued: dict[str, int] = {}
        self.waits = [0] * (len(LATENCY_BUCKETS_S) + 1)

    def count_placed(self, home: Affinity, waited_s: float | None) -> None:
        """A placement is durable; `waited_s` since its task's creation, None but for the first."""
        self.placed += 1
        self.home[home] = self.home.get(home, 0) + 1
        if waited_s is not None:
            self.waits[bisect_left(LATENCY_BUCKETS_S, waited_s)] += 1

    def count_left(self, cause: str) -> None:
        """An attempt was given up."""
        self.requeued[cause] = self.requeued.get(cause, 0) + 1


class Tallies:
    """The tallies of all pools."""

    def __init__(self) -> None:
        self._pools: dict[str, PoolTally] = {}

    def of(self, pool: str) -> PoolTally:
        """Return the pool's tally."""
        found = self._pools.get(pool)
        if found is None:
            found = self._pools[pool] = PoolTally()
        return found

    def counts(
        self, queued: Mapping[str, int], in_flight: Mapping[str, int]
    ) -> tuple[PoolCounts, ...]:
        """Return what is to be told of each pool that anything is known of, by name."""
        names = self._pools.keys() | queued.keys() | in_flight.keys()
        nothing = PoolTally()
        told = []
        for name in sorted(names):
            tally = self._pools.get(name, nothing)
            told.append(
                PoolCounts(
                    pool=name,
                    queued=queued.get(name, 0),
                    in_flight=in_flight.get(name, 0),
                    placed=tally.placed,
                    finished=tally.finished,
                    not_admitted=tally.not_admitted,
                    home=dict(tally.home),
                    requeued=dict(tally.requeued),
                    waits=tuple(tally.waits),
                )
            )
        return tuple(told)


@dataclass(slots=True)
class Places:
    """Places of a set of nodes, with the moments of each node's share in use."""

    nodes: int = 0
    used: int = 0
    total: int = 0
    _sum: float = 0.0
    _squares: float = 0.0

    def add(self, used: int, total: int) -> None:
        """Count one node with `total` places; one without any has no share in the balance."""
        if total <= 0:
            return
        share = used / total
        self.nodes += 1
        self.used += used
        self.total += total
        self._sum += share
        self._squares += share * share

    @property
    def balance(self) -> float:
        """Coefficient of variation of the nodes' shares in use: 0 is even, or all idle.

        The standard deviation over all nodes (not a sample's), divided by the mean.
        """
        if not self.nodes or not self._sum:
            return 0.0
        mean = self._sum / self.nodes
        variance = max(0.0, self._squares / self.nodes - mean * mean)
        return math.sqrt(variance) / mean


@dataclass(slots=True)
class FleetTally:
    """Nodes summed up; fed in portions, since there may be thousands."""

    states: dict[str, int] = field(default_factory=dict)
    places: Places = field(default_factory=Places)
    pools: dict[str, Places] = field(default_factory=dict)

    def add(self, nodes: Iterable[Node]) -> None:
        """Count more nodes."""
        for node in nodes:
            state = node.shown_state
            self.states[state] = self.states.get(state, 0) + 1
            if state in _SERVING:
                self._add_places(node)

    def _add_places(self, node: Node) -> None:
        used: dict[str, int] = {}
        total: dict[str, int] = {}
        for slot in node.slots.values():
            pool = slot.pool
            used[pool] = used.get(pool, 0) + max(0, slot.taken)
            total[pool] = total.get(pool, 0) + slot.total
        for pool, places in total.items():
            found = self.pools.get(pool)
            if found is None:
                found = self.pools[pool] = Places()
            found.add(used[pool], places)
        self.places.add(sum(used.values()), sum(total.values()))
