"""What a placement did to its session's home: kept it, left it, or found none."""

from __future__ import annotations

from typing import Literal

from controld.core.eligibility import NOWHERE, Offers
from controld.core.score import HOME_LIMIT
from corefleet.messages.records import TaskRecord

Affinity = Literal["", "hit", "moved", "missed", "new"]
"""hit     on the session's home node
moved   another node, though the home had room: what the home costs outweighed it
missed  another node, since the home could not take it: full, gone, draining, overloaded,
        or the attempt before had left it
new     the session had no home yet"""


def affinity(offers: Offers | None, home: str, placed: TaskRecord) -> Affinity:
    """Return what `placed`, a record that places an attempt, did to its session's `home`."""
    if not home:
        return "new"
    if placed.node == home:
        return "hit"
    if placed.past and placed.past[-1].node == home:
        return "missed"
    slots = offers.nodes.get(home, ()) if offers is not None else ()
    if any(slot.position != NOWHERE and slot.node.worst < HOME_LIMIT for slot in slots):
        return "moved"
    return "missed"
