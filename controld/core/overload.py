"""What a controld lets in while it has too little CPU: batch is shed first, then online less.

Additive increase, multiplicative decrease (Chiu and Jain 1989) of the rate of online
submissions, on samples of the share of CPU in use, every SAMPLE_S:

- above the limit, or the event loop late, PATIENCE samples in a row: batch is shed wholly; if
  it goes on, online is held to 0.8 of what was let in, again with each sample, never below
  FLOOR_PER_S;
- below the limit by more than a band: online rises by a part of where it was first lowered,
  until it is as free as it was; then batch comes back in steps;
- between, all stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SAMPLE_S = 0.5
PATIENCE = 3
"""Samples in a row above the limit before anything is shed: a spike is none of them."""
BAND = 0.1
"""So far below the limit, as a share of CPU, is low enough to let more in."""
FLOOR_PER_S = 50.0
_DECREASE = 0.8
_INCREASE = 0.05
_FREE = 1.5
"""Online is free again when its limit is so many times where it was first lowered."""
_BATCH_STEP = 0.1
_RETRY_S = 2.0
_DEPTH_S = 0.1
"""Seconds of the limit that may be let in at once."""


@dataclass(slots=True, frozen=True)
class Shed:
    """Why one is shed, and when to come again."""

    reason: str
    retry_after_s: float


@dataclass(slots=True, frozen=True)
class OverloadLimits:
    """`cpu`: share of CPU in use; `loop_lag_s`: how late the event loop's timers are."""

    cpu: float = 0.85
    loop_lag_s: float = 0.5


class Overload:
    """Holds back what one controld lets in, by what it is told of its own load."""

    def __init__(self, limits: OverloadLimits | None = None) -> None:
        self._limits = limits or OverloadLimits()
        self.batch_share = 1.0
        """Share of batch submissions that is let in."""
        self.online_per_s: float | None = None
        """Most online submissions a second; None: no limit."""
        self._lowered_from = 0.0
        self._hot = 0
        self._cpu = 0.0
        self._lag_s = 0.0
        self._credit = 0.0
        self._tokens = 0.0
        self._at = 0.0
        self._let_in = 0
        self._sampled_at: float | None = None

    def sample(self, cpu: float, loop_lag_s: float, now: float) -> None:
        """Take the share of CPU in use (1.0: all of it) and the loop's lag of SAMPLE_S."""
        self._cpu, self._lag_s = cpu, loop_lag_s
        dt = SAMPLE_S if self._sampled_at is None else max(1e-3, now - self._sampled_at)
        let_in_per_s, self._let_in, self._sampled_at = self._let_in / dt, 0, now
        limits = self._limits
        if cpu > limits.cpu or loop_lag_s > limits.loop_lag_s:
            self._hot += 1
            if self._hot >= PATIENCE:
                self._lower(let_in_per_s)
            return
        self._hot = 0
        if cpu < limits.cpu - BAND and loop_lag_s < limits.loop_lag_s / 2:
            self._raise()

    def admit(self, batch: bool, now: float) -> Shed | None:
        """Return None and count one in, or why it is shed."""
        if batch:
            if not self._batch():
                what = "is shed" if self.batch_share == 0.0 else "is let in again in steps"
                return Shed(f"controld is at {self.why()}: batch {what}", _RETRY_S)
        elif self.online_per_s is not None:
            wait_s = self._take(self.online_per_s, now)
            if wait_s > 0.0:
                return Shed(
                    f"controld is at {self.why()}: it takes {self.online_per_s:.0f} "
                    "submissions a second",
                    wait_s,
                )
        self._let_in += not batch
        return None

    def state(self) -> Literal["free", "batch shed", "online lowered"]:
        """Return what is held back now."""
        if self.online_per_s is not None:
            return "online lowered"
        return "free" if self.batch_share == 1.0 else "batch shed"

    def _lower(self, let_in_per_s: float) -> None:
        if self.batch_share > 0.0:
            self.batch_share = self._credit = 0.0
            return
        if self.online_per_s is None:
            self._lowered_from = max(FLOOR_PER_S, let_in_per_s)
            self.online_per_s = self._lowered_from
            self._tokens = 0.0
        self.online_per_s = max(FLOOR_PER_S, self.online_per_s * _DECREASE)

    def _raise(self) -> None:
        if self.online_per_s is not None:
            self.online_per_s += self._lowered_from * _INCREASE
            if self.online_per_s >= self._lowered_from * _FREE:
                self.online_per_s = None
        elif self.batch_share < 1.0:
            self.batch_share = min(1.0, round(self.batch_share + _BATCH_STEP, 6))

    def _batch(self) -> bool:
        if self.batch_share == 1.0:
            return True
        self._credit += self.batch_share
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True

    def _take(self, rate: float, now: float) -> float:
        depth = max(1.0, rate * _DEPTH_S)
        self._tokens = min(depth, self._tokens + (now - self._at) * rate)
        self._at = now
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        return (1.0 - self._tokens) / rate

    def why(self) -> str:
        """Return what the newest sample found, in words."""
        if self._cpu > self._limits.cpu or self._lag_s <= self._limits.loop_lag_s:
            return f"{self._cpu:.0%} CPU"
        return f"{self._lag_s:.1f} s of delay"
