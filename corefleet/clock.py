"""Clocks: what the shells read and hand to the pure cores as `now`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def monotonic(self) -> float:
        """Seconds that never step and go on during suspend; for deadlines in a process."""

    def wall_ms(self) -> int:
        """Milliseconds since the epoch; for people and for time to live of records."""


class SystemClock:
    """The machine's clocks. Monotonic time is CLOCK_BOOTTIME (docs/architecture.md, rule 7)."""

    def monotonic(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


class ManualClock:
    """A clock that moves only when told to; for tests and simulation."""

    def __init__(self, monotonic: float = 1000.0, wall_ms: int = 1_700_000_000_000) -> None:
        self._monotonic = monotonic
        self._wall_ms = wall_ms

    def monotonic(self) -> float:
        return self._monotonic

    def wall_ms(self) -> int:
        return self._wall_ms

    def advance(self, seconds: float) -> None:
        """Move both clocks on by `seconds`."""
        self._monotonic += seconds
        self._wall_ms += int(seconds * 1000)
