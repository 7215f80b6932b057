"""Which of a domain's sensors can be believed, and how loaded they say it is. Pure.

Everything is turned into a level: the share of the domain's peak bandwidth in use, or what
corresponds to it. The best sensor that is believed counts; one that is caught lying is left
until it has behaved for a while.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["utilisation", "canary", "pressure"]
KINDS: tuple[Kind, ...] = ("utilisation", "canary", "pressure")
"""Best first."""

TRUSTED_AFTER = 3
"""So many good values in a row make a sensor believed, so many bad ones doubted."""
REPENTED_AFTER = 10
"""So many good values in a row make one believed again that was caught lying."""
FROZEN_AFTER = 20
FROZEN_MOVE = 0.25
FROZEN_LEAST = 0.05
"""FROZEN_AFTER equal values, above what a rounded idle counter repeats, while the share moved by
FROZEN_MOVE: the counter stands still."""
CONTRADICTED_AFTER = 5
"""So many new values of the canary in a row that say the opposite."""
CONTRADICTION = 0.3
"""Levels this far apart, on opposite sides of the band, are opposites. On no measured curve
(tools/bench/memory_system.py) are a true counter and a true canary on opposite sides."""
MOST_OF_PEAK = 1.5
"""A counter above this much of the peak, or a peak this wrong, is of no use."""
LEAST_LATENCY_RATIO = 0.5
MOST_LATENCY_RATIO = 50.0
"""Loaded memory is 3 to 6 times slower than idle memory; 50 is a canary that was not running."""
MOST_STEAL = 0.1
"""Share of CPU time taken by the hypervisor above which the canary's time is not memory's."""
SAME_AGAIN_S = 5.0
"""A value that repeats for so long was measured again, and is the same."""
SILENT_AFTER_S: dict[Kind, float] = {"utilisation": 3.0, "canary": 15.0, "pressure": 5.0}
"""The canary runs every few seconds only, and reports may repeat or omit it in between."""


class Sample(NamedTuple):
    level: float
    fresh: bool
    """False: the value before, once more; nothing new is known."""


def canary_level(ratio: float, ratio_at_high: float, high: float) -> float:
    """Return the utilisation at which memory is `ratio` times slower than idle.

    ratio = 1 + a * u / (1 - u), the waiting time of an M/M/1 queue; `a` is set so that
    `ratio_at_high` belongs to `high`.
    """
    a = (ratio_at_high - 1.0) * (1.0 - high) / high
    waiting = max(0.0, ratio - 1.0) / a
    return waiting / (1.0 + waiting)


@dataclass(slots=True)
class Judge:
    """Decides whether one sensor of one domain is believed."""

    kind: Kind
    trusted: bool = False
    good: int = 0
    bad: int = 0
    needed: int = TRUSTED_AFTER
    last: float | None = None
    last_at: float = -math.inf
    same: int = 0
    fresh_at: float = -math.inf
    """When a value last counted as new."""
    shares: list[float] = field(default_factory=list)
    """Least and greatest batch share since the value last changed."""
    opposed: int = 0

    def offer(self, value: float | None, share: float, now: float) -> str | None:
        """Take the next value; None: absent this time. Return what is wrong with it, "" if nothing.

        None: nothing was offered.
        """
        if value is None:
            return None
        wrong = _impossible(self.kind, value)
        if wrong:
            return wrong
        self.last_at = now
        if value == self.last:
            self.same += 1
            self.shares = [min(self.shares[0], share), max(self.shares[1], share)]
        else:
            self.same = 0
            self.shares = [share, share]
        self.last = value
        if self.same == 0 or now - self.fresh_at >= SAME_AGAIN_S:
            self.fresh_at = now
        moved = self.shares[1] - self.shares[0] >= FROZEN_MOVE
        stands = self.same >= FROZEN_AFTER and value >= FROZEN_LEAST
        if self.kind == "utilisation" and stands and moved:
            return f"frozen at {value:.3f} while the batch share moved"
        return ""

    def weigh(self, wrong: str | None, now: float) -> str:
        """Count the value; return why the sensor ceases to be believed now, "" otherwise."""
        if wrong is None:
            silent_s = now - self.last_at
            if self.trusted and silent_s > SILENT_AFTER_S[self.kind]:
                return self._distrust(f"silent for {silent_s:.1f} s", TRUSTED_AFTER)
            return ""
        if not wrong:
            self.bad = 0
            self.good += 1
            if self.good >= self.needed and self.opposed < CONTRADICTED_AFTER:
                self.trusted = True
            return ""
        self.good = 0
        self.bad += 1
        if self.trusted and (self.bad >= TRUSTED_AFTER or wrong.startswith("frozen")):
            return self._distrust(wrong, REPENTED_AFTER)
        return ""

    def contradict(self, level: float, other: float, low: float, high: float) -> str:
        """Hold `level` against the canary's `other`; return the doubt when it lasts, else ""."""
        opposite = abs(level - other) > CONTRADICTION and (
            (level < low and other > high) or (level > high and other < low)
        )
        self.opposed = self.opposed + 1 if opposite else 0
        if not self.trusted or self.opposed < CONTRADICTED_AFTER:
            return ""
        return self._distrust(
            f"says {level:.2f} of peak, the canary says {other:.2f}", REPENTED_AFTER
        )

    def retire(self) -> None:
        """Forget the values: nothing, or another counter, stands behind this sensor now."""
        self.trusted = False
        self.good = self.bad = self.same = self.opposed = 0
        self.last = None

    def _distrust(self, reason: str, needed: int) -> str:
        self.trusted = False
        self.good = 0
        self.needed = needed
        return reason


def _impossible(kind: Kind, value: float) -> str:
    if not math.isfinite(value):
        return f"not a number: {value}"
    if value < 0.0:
        return f"negative: {value:.3f}"
    if kind == "utilisation" and value > MOST_OF_PEAK:
        return f"{value:.2f} of peak; more than {MOST_OF_PEAK} is impossible"
    if kind == "canary" and not LEAST_LATENCY_RATIO <= value <= MOST_LATENCY_RATIO:
        return f"{value:.2f} times the idle latency is impossible"
    if kind == "pressure" and value > 1.0:
        return f"pressure {value:.2f}; a share is at most 1"
    return ""
