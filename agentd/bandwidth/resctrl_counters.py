"""What resctrl's monitoring files say: counters that wrap, and words instead of numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

MOST_BYTES_PER_S = 4e12
"""More than any memory of one domain moves; a larger step is no traffic."""

# Widths of the counters behind the files: Intel's 24 bits and AMD's 44 in steps of the scale,
# MPAM's 31, 44 and 63 bits; 32, 62 and 64 bits as kernels keep them.
_SCALED_BITS = (24, 32, 44)
_BYTE_BITS = (31, 32, 44, 62, 63, 64)


def reading(text: str | None) -> int | None:
    """Return the number in a monitoring file.

    None if it is gone, or for `Unavailable`, `Error` and `Unassigned`.
    """
    stripped = (text or "").strip()
    return int(stripped) if stripped.isascii() and stripped.isdigit() else None


def advance(old: int, new: int, elapsed_s: float, ends: Iterable[int]) -> int | None:
    """Return the bytes between two readings, None if no traffic explains them.

    A counter that went back wrapped at the first of `ends` (ascending) that makes a possible
    speed of it; else it began anew.
    """
    if elapsed_s <= 0:
        return None
    most = MOST_BYTES_PER_S * elapsed_s
    if new >= old:
        return new - old if new - old <= most else None
    return next((end - old + new for end in ends if end > old and end - old + new <= most), None)


class CounterWidth:
    """Learns from every reading where the machine's counters can wrap.

    Every reading is a multiple of the hardware's step (Intel's is no power of two), and no
    reading reaches the end.
    """

    def __init__(self) -> None:
        self._step = 0
        self._most = 0

    def learn(self, value: int) -> None:
        self._step = math.gcd(self._step, value)
        self._most = max(self._most, value)

    def ends(self) -> list[int]:
        """Return the values at which a counter may begin again at 0, ascending."""
        found = {1 << bits for bits in _BYTE_BITS}
        found.update((1 << bits) * self._step for bits in _SCALED_BITS if self._step > 1)
        return sorted(end for end in found if end > self._most)
