"""The source of chance that the cores are given."""

from __future__ import annotations

from typing import Protocol


class Rng(Protocol):
    """What a core needs of a random number generator, as `random.Random` offers it."""

    def random(self) -> float:
        """Return a float in [0, 1)."""


def between(rng: Rng, low: float, high: float) -> float:
    """Return a float drawn evenly from [low, high)."""
    return low + (high - low) * rng.random()
