"""Where an attempt runs: `place(view, request, rng) -> Decision`, and why.

No clock and no I/O: the same code runs in controld, in simulations and for `explain`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from controld.core.eligibility import NOWHERE, Offers, Slot, why_not
from controld.core.rng import Rng
from controld.core.score import slot_cost
from corefleet.messages.wire import CandidateLine

HOME_LIMIT = 0.9
"""A home with a resource above this utilisation is no home."""

MAX_BONUS = 4.0
"""Most that affinity is worth: what a slot with four of five places taken costs."""

_BLUR = 0.1
"""Costs are blurred by this share and half this amount, since many owners decide on the same
digests at once."""


class FleetView(Protocol):
    """What placement sees of the fleet."""

    sample_size: int

    def offers(self, pool: str) -> Offers | None:
        """Return the pool's slots, None when no node ever offered it."""


@dataclass(slots=True, frozen=True)
class PlacementRequest:
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


@dataclass(slots=True, frozen=True)
class Decision:
    """Where to; `slot` is None when nothing fits, and `why` then says what is missing."""

    slot: Slot | None
    why: str


def place(view: FleetView, request: PlacementRequest, rng: Rng) -> Decision:
    """Choose a slot: home if it passes, else the best of a random sample."""
    offers = view.offers(request.pool)
    if offers is None or not offers.open:
        return Decision(None, waiting_reason(request.pool, offers))
    home, home_cost = _home(offers, request)
    if home is not None and home_cost <= 0.0:
        # No candidate costs less than nothing, so there is no need to look at any.
        return Decision(home, _home_line(home, home_cost))
    sample = _sample(offers, view.sample_size, request.avoid, rng)
    best: Slot | None = None
    best_cost = 0.0
    random = rng.random
    for slot in sample:
        blur = _BLUR * random()
        cost = slot_cost(slot, request.pool_class, request.kind) * (1.0 + blur) + blur / 2
        if best is None or cost < best_cost:
            best, best_cost = slot, cost
    if home is not None and (best is None or home_cost <= best_cost):
        return Decision(home, _home_line(home, home_cost))
    if best is None:
        best = offers.open[int(random() * len(offers.open))]
        best_cost = slot_cost(best, request.pool_class, request.kind)
    return Decision(
        best,
        f"best of {len(sample)} of {len(offers.open)} open: cost {best_cost:.2f}, "
        f"{best.taken} of {best.total} taken",
    )


def explain(
    view: FleetView, request: PlacementRequest, limit: int = 64
) -> tuple[CandidateLine, ...]:
    """Return one line for each of up to `limit` slots, home and best first."""
    offers = view.offers(request.pool)
    if offers is None:
        return ()
    seen = list(offers.nodes.get(request.home_node, ()))
    seen += [slot for slot in offers.open[:limit] if slot.node.name != request.home_node]
    for slots in offers.nodes.values():
        if len(seen) >= limit:
            break
        seen += [s for s in slots if s.position == NOWHERE and s.node.name != request.home_node]
    lines = [_line(slot, request) for slot in seen[:limit]]
    lines.sort(key=lambda line: (not line.eligible, line.score))
    return tuple(lines)


def waiting_reason(pool: str, offers: Offers | None) -> str:
    """Say why a pool's task cannot be placed now; '' when it can."""
    if offers is None or not offers.nodes:
        return f"no node offers pool {pool}"
    if offers.open:
        return ""
    if offers.eligible:
        places = "place" if offers.eligible == 1 else "places"
        return f"all {offers.eligible} eligible {places} (node and domain) are full"
    total = 0
    reasons: dict[str, int] = {}
    for slots in offers.nodes.values():
        for slot in slots:
            why = why_not(slot) or "no workers"
            reasons[why] = reasons.get(why, 0) + 1
            total += 1
    listed = ", ".join(f"{count} {why}" for why, count in sorted(reasons.items()))
    return f"no node can take pool {pool} now: {listed}"


def _home(offers: Offers, request: PlacementRequest) -> tuple[Slot | None, float]:
    """Return the best slot of the home node and its cost less the bonus."""
    if not request.home_node or request.home_node == request.avoid:
        return None, 0.0
    best: Slot | None = None
    best_cost = 0.0
    bonus = min(request.move_cost, MAX_BONUS)
    for slot in offers.nodes.get(request.home_node, ()):
        if slot.position == NOWHERE or slot.node.worst >= HOME_LIMIT:
            continue
        cost = slot_cost(slot, request.pool_class, request.kind)
        cost -= bonus if slot.domain == request.home_domain else bonus / 2
        if best is None or cost < best_cost:
            best, best_cost = slot, cost
    return best, best_cost


def _sample(offers: Offers, size: int, avoid: str, rng: Rng) -> list[Slot]:
    """Draw open slots at random, spread over racks; of more than two never all."""
    slots = offers.open
    count = len(slots)
    if count <= 2:
        return [slot for slot in slots if slot.node.name != avoid]
    wanted = min(size, (count + 1) // 2)
    a_rack = -(-wanted // len(offers.racks))
    random = rng.random
    chosen: list[Slot] = []
    by_rack: dict[str, int] = {}
    for _ in range(3 * wanted):
        slot = slots[int(random() * count)]
        rack = slot.node.rack
        drawn = by_rack.get(rack, 0)
        if drawn >= a_rack or slot.node.name == avoid or slot in chosen:
            continue
        by_rack[rack] = drawn + 1
        chosen.append(slot)
        if len(chosen) == wanted:
            break
    return chosen


def _home_line(slot: Slot, cost: float) -> str:
    return f"home of the session: cost {cost:.2f} with bonus, {slot.taken} of {slot.total} taken"


def _line(slot: Slot, request: PlacementRequest) -> CandidateLine:
    name = slot.node.name
    why = why_not(slot)
    if not why and slot.taken >= slot.total:
        why = f"full: {slot.taken} of {slot.total} taken" if slot.total else "no workers"
    if why:
        return CandidateLine(node=name, domain=slot.domain, eligible=False, line=why)
    cost = slot_cost(slot, request.pool_class, request.kind)
    load = slot.node.load
    line = (
        f"cost {cost:.2f}: {slot.taken} of {slot.total} taken, cpu {load.cpu:.0%}, "
        f"memory bandwidth {load.memory_bandwidth:.0%}, memory {load.memory:.0%}"
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
