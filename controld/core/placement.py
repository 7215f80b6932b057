"""Where an attempt runs: `place(view, request, rng) -> Decision`, and why.

No clock and no I/O: the same code runs in controld, in simulations and for `explain`.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from controld.core.deck import Deck
from controld.core.draws import deck_of, draw
from controld.core.eligibility import NOWHERE, Offers, Slot, why_not
from controld.core.rng import Rng
from controld.core.score import HOME_LIMIT, class_factor, kind_row, node_cost, slot_cost
from corefleet.messages.wire import CandidateLine

MAX_BONUS = 4.0
"""Most that affinity is worth: what a slot with four of five places taken costs."""


class FleetView(Protocol):
    """What placement sees of the fleet."""

    sample_size: int

    def offers(self, pool: str) -> Offers | None:
        """Return the pool's slots, None when no node ever offered it."""


class PlacementRequest(msgspec.Struct, frozen=True):
    """One attempt to be placed."""

    pool: str
    pool_class: str = "online"
    kind: str = "mixed"
    home_node: str = ""
    home_domain: int = -1
    move_cost: float = 1.0
    """What leaving the home costs, in the unit of scores; bounded by MAX_BONUS."""
    avoid: str = ""
    """A node to take only if there is no other."""


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Where to; `slot` is None when nothing fits, and `why` then says what is missing."""

    slot: Slot | None
    why: str


def place(view: FleetView, request: PlacementRequest, rng: Rng) -> Decision:
    """Choose a slot: home if it passes, else the best of a random sample."""
    offers = view.offers(request.pool)
    if offers is None or not offers.count:
        return Decision(None, waiting_reason(request.pool, offers))
    deck = deck_of(offers, request.kind, request.pool_class)
    home, home_cost = None, 0.0
    if request.home_node:
        home, home_cost = _home(offers, request, deck)
        if home is not None and home_cost <= 0.0:
            # No candidate costs less than nothing, so there is no need to look at any.
            return Decision(home, _home_line(home, home_cost))
    best, best_cost, compared = draw(offers, deck, view.sample_size, request.avoid, rng)
    if home is not None and (best < 0 or home_cost <= best_cost):
        return Decision(home, _home_line(home, home_cost))
    slots = offers.slot_columns
    if best < 0:
        best = offers.open_v[int(rng.random() * offers.count)]
        best_cost = slot_cost(offers.node_columns, slots, best, deck.kind, deck.factor)
    return Decision(
        offers.handles[best],
        f"best of {compared} of {offers.count} open: cost {best_cost:.2f}, "
        f"{slots.taken_v[best]} of {slots.total_v[best]} taken",
    )


def explain(
    view: FleetView, request: PlacementRequest, limit: int = 64
) -> tuple[CandidateLine, ...]:
    """Return one line for each of up to `limit` slots, home and best first."""
    offers = view.offers(request.pool)
    if offers is None:
        return ()
    seen = list(offers.nodes.get(request.home_node, ()))
    for row in offers.open_rows()[:limit].tolist():
        slot = offers.handles[row]
        if slot is not None and slot.node.name != request.home_node:
            seen.append(slot)
    for slots in offers.nodes.values():
        if len(seen) >= limit:
            break
        seen += [s for s in slots if s.position == NOWHERE and s.node.name != request.home_node]
    lines = [_line(offers, slot, request) for slot in seen[:limit]]
    lines.sort(key=lambda line: (not line.eligible, line.score))
    return tuple(lines)


def waiting_reason(pool: str, offers: Offers | None) -> str:
    """Say why a pool's task cannot be placed now; '' when it can."""
    if offers is None or not offers.nodes:
        return f"no node offers pool {pool}"
    if offers.count:
        return ""
    if offers.eligible:
        places = "place" if offers.eligible == 1 else "places"
        return f"all {offers.eligible} eligible {places} (node and domain) are full"
    reasons: dict[str, int] = {}
    for slots in offers.nodes.values():
        for slot in slots:
            why = why_not(slot, offers.spec) or "no workers"
            reasons[why] = reasons.get(why, 0) + 1
    listed = ", ".join(f"{count} {why}" for why, count in sorted(reasons.items()))
    return f"no node can take pool {pool} now: {listed}"


def _home(offers: Offers, request: PlacementRequest, deck: Deck) -> tuple[Slot | None, float]:
    """Return the best slot of the home node and its cost less the bonus."""
    found = offers.nodes.get(request.home_node)
    if found is None or request.home_node == request.avoid:
        return None, 0.0
    nodes, node = offers.node_columns, found[0].node.row
    if nodes.worst_v[node] >= HOME_LIMIT:
        return None, 0.0
    best: Slot | None = None
    best_cost = 0.0
    bonus = request.move_cost
    if bonus > MAX_BONUS:
        bonus = MAX_BONUS
    shared = node_cost(nodes, node, deck.kind, deck.factor)
    slots = offers.slot_columns
    for slot in found:
        row = slot.row
        if slots.position_v[row] < 0:
            continue
        cost = shared + slots.cost_v[row]
        cost -= bonus if slot.domain == request.home_domain else bonus / 2
        if best is None or cost < best_cost:
            best, best_cost = slot, cost
    return best, best_cost


def _home_line(slot: Slot, cost: float) -> str:
    slots, row = slot.columns, slot.row
    return (
        f"home of the session: cost {cost:.2f} with bonus, "
        f"{slots.taken_v[row]} of {slots.total_v[row]} taken"
    )


def _line(offers: Offers, slot: Slot, request: PlacementRequest) -> CandidateLine:
    name = slot.node.name
    why = why_not(slot, offers.spec)
    if not why and slot.taken >= slot.total:
        why = f"full: {slot.taken} of {slot.total} taken" if slot.total else "no workers"
    if why:
        return CandidateLine(node=name, domain=slot.domain, eligible=False, line=why)
    cost = slot_cost(
        offers.node_columns,
        offers.slot_columns,
        slot.row,
        kind_row(request.kind),
        class_factor(request.pool_class),
    )
    load = slot.node.load
    line = (
        f"cost {cost:.2f}: {slot.taken} of {slot.total} taken, cpu {load.cpu:.0%}, "
        f"memory bandwidth {load.memory_bandwidth:.0%}, memory {load.memory:.0%}, "
        f"network {load.network:.0%}, storage {load.storage:.0%}, {slot.node.queued} queued"
    )
    if name == request.home_node:
        bonus = min(request.move_cost, MAX_BONUS)
        if slot.node.worst >= HOME_LIMIT:
            line += "; home, but above its limit"
        else:
            bonus = bonus if slot.domain == request.home_domain else bonus / 2
            cost -= bonus
            line += f"; home, bonus {bonus:.2f}"
    if name == request.avoid:
        line += "; avoided: the attempt before left it"
    return CandidateLine(node=name, domain=slot.domain, eligible=True, score=cost, line=line)
