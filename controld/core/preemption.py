"""Slots of online pools that batch attempts of ours are in the way of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from controld.core.columns import Bools, Rows
from controld.core.eligibility import Offers, Slot
from controld.core.places import Places
from controld.core.rng import Rng
from controld.core.score import HOME_LIMIT
from corefleet.messages.records import PoolSpec


@dataclass(slots=True, frozen=True)
class _Found:
    """What a look at all slots found, true until something it read has changed."""

    changes: int
    digests: int
    rows: list[int]


class Preemption:
    """Finds slots that a yield of batch may open.

    Many shards ask in one tick: what was found for one holds for the others.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._found: dict[str, _Found] = {}

    def slot(self, pool: str, rng: Rng) -> Slot | None:
        """Return a slot of an online pool that batch attempts of ours are in the way of.

        That is one whose node runs batch of our shards and which is held by what runs
        there, full, or on a node above its limit: those that a yield opens first. None
        when there is no such slot, or an open one on a node below its limit.
        """
        places = self._places
        offers = places.offers.get(pool)
        if offers is None or is_batch(offers.spec):
            return None
        found = self._found.get(pool)
        changes, digests = places.changes, places.nodes.version
        if found is None or found.changes != changes or found.digests != digests:
            found = self._found[pool] = _Found(changes, digests, self._look(offers).tolist())
        if not found.rows:
            return None
        return places.handles[found.rows[int(rng.random() * len(found.rows))]]

    def _look(self, offers: Offers) -> Rows:
        slots, nodes = self._places.slots, self._places.nodes
        rows = slots.of_pool(offers.number)
        node_of = slots.node[rows]
        busy = nodes.worst[node_of] >= HOME_LIMIT
        if np.any((slots.position[rows] >= 0) & ~busy):
            return rows[:0]
        usable = slots.fits[rows] & nodes.ready[node_of] & (slots.total[rows] > 0)
        usable &= ~slots.cooling[rows] & self._runs_batch()[node_of]
        held = rows[usable & slots.held[rows]]
        return held if len(held) else rows[usable]

    def _runs_batch(self) -> Bools:
        """Return of each node whether it runs batch of ours."""
        slots, nodes = self._places.slots, self._places.nodes
        batch = np.array([is_batch(other.spec) for other in self._places.by_number])
        ours = np.flatnonzero(slots.own[: slots.size] > 0)
        ours = ours[batch[slots.pool[ours]]]
        runs = np.zeros(nodes.size, np.bool_)
        runs[slots.node[ours]] = True
        return runs


def is_batch(spec: PoolSpec | None) -> bool:
    """Return whether a pool is of the batch class; one that nobody described is not."""
    return spec is not None and spec.pool_class == "batch"
