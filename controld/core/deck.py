"""Samples that were drawn in advance: see draws."""

from __future__ import annotations

FEWEST_AHEAD = 4


class Deck:
    """Samples for the next decisions of one task kind and class."""

    __slots__ = (
        "ahead",
        "at",
        "best",
        "compared",
        "costs",
        "factor",
        "good_until",
        "kind",
        "others",
        "own_costs",
        "served",
    )

    def __init__(self, kind: int, factor: float) -> None:
        self.kind = kind
        """Row of `NodeColumns.costs`."""
        self.factor = factor
        """What the class multiplies a node's costs by."""
        self.good_until = 0
        """The last `NodeColumns.version` at which the samples are still good."""
        self.ahead = FEWEST_AHEAD
        self.at = 0
        self.served = 0
        """Samples used of the decks since one grew old."""
        self.best: list[int] = []
        """Rows of the best slots, one a sample."""
        self.others: list[list[int]] = []
        """Rows of the next best ones."""
        self.costs: list[float] = []
        self.own_costs: list[float] = []
        """What `SlotColumns.cost` said of the best ones."""
        self.compared: list[int] = []
