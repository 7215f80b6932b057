"""Samples that were drawn in advance: see draws."""

from __future__ import annotations

FEWEST_AHEAD = 4


class Deck:
    """Samples for the next decisions of one task kind and class."""

    def __init__(self) -> None:
        self.version = 0
        self.ahead = FEWEST_AHEAD
        self.at = 0
        self.rows: list[list[int]] = []
        self.costs: list[float] = []
        self.own_costs: list[float] = []
        """What `SlotColumns.cost` said of the best ones."""
        self.compared: list[int] = []
