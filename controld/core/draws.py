"""Random samples of a pool's open slots, drawn and scored: one by one, or many in advance.

A deck is a stack of samples that were drawn and scored with a few array operations, one
for each of the next decisions. A decision takes the top one and looks again only at what
may have changed: whether the slot is still open, and whether we placed there meanwhile.
Digests make a deck old: the next has as many samples as were used since one grew old before,
and each that is used up sooner is followed by one twice as large.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from controld.core.columns import Floats
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

MOST_AHEAD = 256
_OPEN_FOR_DECK = 64
"""With fewer open slots each placement changes too much of what was drawn in advance."""

_SHARE_OF_RACKS = 4
"""A deck is old once this part of the pool's racks sent digests."""

_BEST = 3
"""Candidates of a sample that are kept, best first."""

Drawn = tuple[int, float, int]
"""Row of the best slot (NOWHERE: none), its cost, and how many were compared."""


def deck_of(offers: Offers, kind: str, pool_class: str) -> Deck:
    """Return the samples of a pool for a task kind and class."""
    key = (kind, pool_class)
    deck = offers.decks.get(key)
    if deck is None:
        deck = offers.decks[key] = Deck(kind_row(kind), class_factor(pool_class))
    return deck


def draw(offers: Offers, deck: Deck, size: int, avoid: str, rng: Rng) -> Drawn:
    """Return the best of a random sample of `size` open slots."""
    if offers.count < _OPEN_FOR_DECK or avoid:
        return _draw_one(offers, deck, size, avoid, rng)
    at = deck.at
    old = offers.node_columns.version > deck.good_until
    if old or at == len(deck.best):
        deck.served += at
        if old:
            deck.ahead, deck.served = max(FEWEST_AHEAD, min(MOST_AHEAD, deck.served)), 0
        else:
            deck.ahead = min(MOST_AHEAD, 2 * deck.ahead)
        _fill(deck, offers, size, rng)
        at = 0
    deck.at = at + 1
    best = deck.best[at]
    slots = offers.slot_columns
    if slots.cost_v[best] == deck.own_costs[at] and slots.position_v[best] >= 0:
        return best, deck.costs[at], deck.compared[at]
    rows = [row for row in (best, *deck.others[at]) if slots.position_v[row] >= 0]
    if not rows:
        return _draw_one(offers, deck, size, avoid, rng)
    best, cost = _cheapest(offers, rows, deck)
    return best, cost, deck.compared[at]


def _cheapest(offers: Offers, rows: list[int], deck: Deck) -> tuple[int, float]:
    nodes, slots = offers.node_columns, offers.slot_columns
    costs = [slot_cost(nodes, slots, row, deck.kind, deck.factor) for row in rows]
    least = min(costs)
    return rows[costs.index(least)], least


def _draw_one(offers: Offers, deck: Deck, size: int, avoid: str, rng: Rng) -> Drawn:
    sample = _sample(offers, size, avoid, rng)
    nodes, slots = offers.node_columns, offers.slot_columns
    doubt = _DOUBT * offers.surprise
    best, best_cost = NOWHERE, 0.0
    for row in sample:
        chance = rng.random()
        steepness = 1.0 + slots.cost_v[row]
        cost = slot_cost(nodes, slots, row, deck.kind, deck.factor) * (1.0 + BLUR * chance)
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


def _fill(deck: Deck, offers: Offers, size: int, rng: Rng) -> None:
    """Draw and score `deck.ahead` samples, by the same rules as one: (draws, samples) arrays."""
    nodes, slots = offers.node_columns, offers.slot_columns
    spare = size if offers.uneven else 0
    draws, samples = size + _SPARE + spare, deck.ahead
    chances = _chances(rng, draws * samples).reshape(2, draws, samples)
    drawn = chances[0] * offers.count
    at = drawn.astype(np.intp)
    rows = offers.rows_at(at)
    racks = nodes.rack[slots.node[rows]]
    total = slots.total[rows]
    a_rack = -(-size // len(offers.racks))
    good = ~_again(racks, a_rack)
    if a_rack > 1:
        good &= ~_again(rows, 1)
    if offers.uneven:
        good &= (drawn - at) * offers.most < total
    found = np.cumsum(good, axis=0, dtype=np.int16)
    good &= found <= size
    good[0] |= found[-1] == 0
    own = slots.cost[rows]
    costs = slot_costs(nodes, slots, rows, deck.kind, deck.factor)
    costs *= 1.0 + BLUR * chances[1]
    doubt = _DOUBT * offers.surprise * total
    costs += chances[1] * (BLUR / 2 + doubt * (1.0 + own) ** 2)
    costs[~good] = np.inf
    order = np.argsort(costs.T.copy(), axis=1)[:, :_BEST].T * samples + np.arange(samples)
    first = order[0]
    deck.good_until = nodes.version + len(offers.racks) // _SHARE_OF_RACKS
    deck.at = 0
    deck.best = rows.ravel()[first].tolist()
    deck.others = rows.ravel()[order[1:]].T.tolist()
    deck.costs = costs.ravel()[first].tolist()
    deck.own_costs = own.ravel()[first].tolist()
    deck.compared = np.clip(found[-1], 1, size).tolist()


def _again(values: NDArray[Any], times: int) -> NDArray[np.bool_]:
    """Return whether each element is equal to `times` or more of those above it."""
    if times == 1:
        found = np.zeros(values.shape, np.bool_)
        for apart in range(1, len(values)):
            found[apart:] |= values[apart:] == values[:-apart]
        return found
    counts = np.zeros(values.shape, np.uint8)
    for apart in range(1, len(values)):
        counts[apart:] += values[apart:] == values[:-apart]
    return counts >= times


def _chances(rng: Rng, pairs: int) -> Floats:
    """Return 2 * `pairs` floats in [0, 1) from one draw of `rng`.

    They are the halves of splitmix64's numbers (Steele et al., OOPSLA 2014).
    """
    state = np.arange(1, pairs + 1, dtype=np.uint64)
    state *= np.uint64(0x9E3779B97F4A7C15)
    state += np.uint64(int(rng.random() * 2**53))
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    chances: Floats = np.multiply(state.view(np.uint32), 2.0**-32, dtype=np.float64)
    return chances
