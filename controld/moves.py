"""Shards and racks that change hands, counted by why."""

from __future__ import annotations

from controld.core.ownership_io import Claim, OwnershipAction, Start, Stop
from controld.gauges import Gauges

_REASONS = {
    "is the unit's rightful owner": "given",
    "our lease is over": "lease",
    "owned by ": "taken",
    "claimed anew": "anew",
    "the unit is no more": "removed",
}
"""What a Stop's reason contains, and the word for it."""


class Moves:
    """Counts what an OwnershipCore decides, action by action."""

    def __init__(self, gauges: Gauges) -> None:
        self._gauges = gauges
        self._dead: dict[str, str] = {}

    def count(self, action: OwnershipAction) -> None:
        """Count an action that is being carried out."""
        kind = action.unit.partition("/")[0]
        match action:
            case Claim():
                self._dead[action.unit] = action.dead
            case Start():
                source = "dead" if self._dead.pop(action.unit, "") else "free"
                self._gauges.units_won(kind, source).inc()
            case Stop():
                self._gauges.units_left(kind, _word(action.reason)).inc()


def _word(reason: str) -> str:
    for part, word in _REASONS.items():
        if part in reason:
            return word
    return "other"
