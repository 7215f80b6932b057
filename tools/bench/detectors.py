"""Two failure detectors over recorded or made arrivals: a fixed deadline, and phi accrual."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

WINDOW_BEATS = 1000
"""Arrivals that phi estimates from, as in the paper."""

DAY_S = 86_400.0
MONTH_S = 30 * DAY_S


@dataclass(frozen=True, slots=True)
class Beats:
    """One node's beats, in seconds: when each was sent and when it arrived, in order."""

    sent: Floats
    arrived: Floats

    @property
    def gaps(self) -> Floats:
        """Silence before each beat but the first."""
        return np.diff(self.arrived)

    @property
    def months(self) -> float:
        return float(self.arrived[-1] - self.arrived[0]) / MONTH_S


def fixed(beats: Beats, deadline_s: float) -> Floats:
    """Return the deadline that holds after each beat but the last."""
    return np.full(len(beats.gaps), deadline_s)


def phi(beats: Beats, threshold: float, floor_s: float) -> Floats:
    """Return how long a silence may last after each beat until phi reaches `threshold`.

    Hayashibara, Defago, Yared, Katayama: The phi accrual failure detector (SRDS 2004): phi is
    -log10 of the probability that a beat comes later than now, of a normal distribution with
    mean and deviation of the last WINDOW_BEATS gaps. `floor_s` is the least deviation, which
    implementations add because a calm network leads to one near 0. Before two gaps are known
    there is no verdict.
    """
    gaps = beats.gaps
    # The deadline behind beat i stands on the gaps before it.
    sums = np.concatenate(([0.0], np.cumsum(gaps)))
    squares = np.concatenate(([0.0], np.cumsum(gaps * gaps)))
    upto = np.arange(len(gaps))
    since = np.maximum(upto - WINDOW_BEATS, 0)
    count = np.maximum(upto - since, 1)
    mean = (sums[upto] - sums[since]) / count
    variance = np.maximum((squares[upto] - squares[since]) / count - mean * mean, 0.0)
    deviation = np.maximum(np.sqrt(variance), floor_s)
    allowed = mean + NormalDist().inv_cdf(1.0 - 10.0**-threshold) * deviation
    allowed[:2] = np.inf
    return np.asarray(allowed, dtype=np.float64)


def false_alarms(beats: Beats, allowed: Floats) -> Floats:
    """Return the silences that outlasted what was allowed, though the beat came after all."""
    gaps = beats.gaps
    return np.asarray(gaps[gaps >= allowed], dtype=np.float64)


def detection_s(beats: Beats, allowed: Floats, rng: np.random.Generator, crashes: int) -> Floats:
    """Return the time from a crash until the alarm, for crashes anywhere between two beats."""
    known = np.flatnonzero(np.isfinite(allowed))
    last = rng.choice(known, crashes)
    interval = beats.sent[last + 1] - beats.sent[last]
    crashed = beats.sent[last] + rng.random(crashes) * interval
    late = np.maximum(beats.arrived[last] + allowed[last] - crashed, 0.0)
    return np.asarray(late, dtype=np.float64)
