"""Random samples of a pool's open slots, drawn and scored: one by one, or many in advance.

A deck is a stack of samples that were drawn and scored with a few array operations, one
for each of the next decisions. A decision takes the top one and looks again only at what
may have changed: whether the slot is still open, and whether we placed there meanwhile.
Digests make a deck old; it grows while it is used up before that, and shrinks when not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from controld.core.columns import Floats, Rows
from controld.core.deck import FEWEST_AHEAD, Deck
from controld.core.eligibility import NOWHERE, Offers
from controld.core.rng import Rng
from controld.core.score import class_factor, kind_row, slot_cost, slot_costs

BLUR = 0.1
"""Costs are blurred by this share and half this amount, since many owners decide on the same
digests at once."""

_DOUBT = 4.0
"""Weight of what others may have placed on a slot since its beat. Where beats come as a
surprise, many place at once on what they believe is empty: the more, the less the differences
between slots are worth (Dahlin, "Interpreting Stale Load Information", 1999). A mean square of
changes is twice the arrivals between beats when they are independent, so that surprise times
places is their share of the slot's places; the factor is the best of 1, 2, 4 and 8 in the
replay of 20 owners (tools/bench/place_oracle.py)."""

_TRIES = 3
"""Draws for each candidate that is wanted, one by one."""

_SPARE = 4
"""Draws for a deck's sample beyond those wanted, for what is drawn twice."""

MOST_AHEAD = 128
_OPEN_FOR_DECK = 64
"""With fewer open slots each placement changes too much of what was drawn in advance."""

_SHARE_OF_RACKS = 4
"""A deck is old once this part of the pool's racks sent digests."""

_BEST = 3
"""Candidates of a sample that are kept, best first."""

Drawn = tuple[int, float, int]
"""Row of the best slot (NOWHERE: none), its cost, and how many were compared."""


def draw(offers: Offers, size: int, kind: str, pool_class: str, avoid: str, rng: Rng) -> Drawn:
    """Return the best of a random sample of `size` open slots."""
    if offers.count < _OPEN_FOR_DECK or avoid:
        return _draw_one(offers, size, kind, pool_class, avoid, rng)
    deck = offers.decks.get((kind, pool_class))
    if deck is None:
        deck = offers.decks[(kind, pool_class)] = Deck()
    at = deck.at
    old = offers.node_columns.version - deck.version > len(offers.racks) // _SHARE_OF_RACKS
    if old or at == len(deck.rows):
        deck.ahead = max(FEWEST_AHEAD, min(MOST_AHEAD, at if old else 2 * deck.ahead))
        _fill(deck, offers, size, kind_row(kind), class_factor(pool_class), rng)
        at = 0
    deck.at = at + 1
    rows = deck.rows[at]
    best = rows[0]
    slots = offers.slot_columns
    if slots.cost_v[best] == deck.own_costs[at] and slots.position_v[best] >= 0:
        return best, deck.costs[at], deck.compared[at]
    rows = [row for row in rows if slots.position_v[row] >= 0]
    if not rows:
        return _draw_one(offers, size, kind, pool_class, avoid, rng)
    best, cost = _cheapest(offers, rows, kind_row(kind), class_factor(pool_class))
    return best, cost, deck.compared[at]


def _cheapest(offers: Offers, rows: list[int], kind: int, factor: float) -> tuple[int, float]:
    nodes, slots = offers.node_columns, offers.slot_columns
    costs = [slot_cost(nodes, slots, row, kind, factor) for row in rows]
    least = min(costs)
    return rows[costs.index(least)], least


def _draw_one(offers: Offers, size: int, kind: str, pool_class: str, avoid: str, rng: Rng) -> Drawn:
    sample = _sample(offers, size, avoid, rng)
    nodes, slots = offers.node_columns, offers.slot_columns
    doubt = _DOUBT * offers.surprise
    row_of_kind, factor = kind_row(kind), class_factor(pool_class)
    best, best_cost = NOWHERE, 0.0
    for row in sample:
        chance = rng.random()
        steepness = 1.0 + slots.cost_v[row]
        cost = slot_cost(nodes, slots, row, row_of_kind, factor) * (1.0 + BLUR * chance)
        cost += chance * (BLUR / 2 + doubt * slots.total_v[row] * steepness * steepness)
        if best < 0 or cost < best_cost:
            best, best_cost = row, cost
    return best, best_cost, len(sample)


def _sample(offers: Offers, size: int, avoid: str, rng: Rng) -> list[int]:
    """Draw rows of open slots at random, spread over racks; of more than two never all.

    Slots are drawn in proportion to their places, so that a large one meets as many
    tasks a place as a small one.
    """
    nodes, slots = offers.node_columns, offers.slot_columns
    count, rows, node_of = offers.count, offers.open_v, slots.node_v
    avoided = offers.nodes.get(avoid) if avoid else None
    avoided_node = avoided[0].node.row if avoided else NOWHERE
    if count <= 2:
        return [row for row in rows[:count] if node_of[row] != avoided_node]
    wanted = min(size, (count + 1) // 2)
    a_rack = -(-wanted // len(offers.racks))
    chosen: list[int] = []
    racks: list[int] = []
    for _ in range(_TRIES * wanted):
        drawn = rng.random() * count
        at = int(drawn)
        row = rows[at]
        if offers.uneven and (drawn - at) * offers.most >= slots.total_v[row]:
            continue
        node = node_of[row]
        rack = nodes.rack_v[node]
        if node == avoided_node or row in chosen or racks.count(rack) >= a_rack:
            continue
        racks.append(rack)
        chosen.append(row)
        if len(chosen) == wanted:
            break
    return chosen


def _fill(deck: Deck, offers: Offers, size: int, kind: int, factor: float, rng: Rng) -> None:
    """Draw and score `deck.ahead` samples, by the same rules as one."""
    nodes, slots = offers.node_columns, offers.slot_columns
    spare = size if offers.uneven else 0
    shape = (deck.ahead, size + _SPARE + spare)
    chances = _chances(rng, 2 * shape[0] * shape[1]).reshape(2, *shape)
    drawn = chances[0] * offers.count
    at = drawn.astype(np.intp)
    rows: Rows = offers.open_rows()[at]
    racks = nodes.rack[slots.node[rows]]
    a_rack = -(-size // len(offers.racks))
    good = _earlier(racks) < a_rack
    if a_rack > 1:
        good &= _earlier(rows) == 0
    if offers.uneven:
        good &= (drawn - at) * offers.most < slots.total[rows]
    good &= np.cumsum(good, axis=1) <= size
    good[:, 0] |= ~good.any(axis=1)
    own = slots.cost[rows]
    blur = chances[1] * (BLUR / 2 + _DOUBT * offers.surprise * slots.total[rows] * (1.0 + own) ** 2)
    costs = slot_costs(nodes, slots, rows, kind, factor) * (1.0 + BLUR * chances[1]) + blur
    costs[~good] = np.inf
    order = np.argsort(costs, axis=1)[:, :_BEST]
    first = order[:, :1]
    deck.version = nodes.version
    deck.at = 0
    deck.rows = np.take_along_axis(rows, order, axis=1).tolist()
    deck.costs = np.take_along_axis(costs, first, axis=1)[:, 0].tolist()
    deck.own_costs = np.take_along_axis(own, first, axis=1)[:, 0].tolist()
    deck.compared = np.count_nonzero(good, axis=1).tolist()


def _earlier(values: NDArray[Any]) -> NDArray[Any]:
    """Return how many elements to its left in its row are equal to each element."""
    width = values.shape[1]
    same = values[:, :, None] == values[:, None, :]
    same &= np.tri(width, k=-1, dtype=np.bool_)
    counts: Rows = np.count_nonzero(same, axis=2)
    return counts


def _chances(rng: Rng, count: int) -> Floats:
    """Return floats in [0, 1) from one draw of `rng`: splitmix64 (Steele et al., OOPSLA 2014)."""
    state = np.arange(1, count + 1, dtype=np.uint64)
    state *= np.uint64(0x9E3779B97F4A7C15)
    state += np.uint64(int(rng.random() * 2**53))
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
