"""A model of one memory domain: a victim that waits for memory, batch that floods it.

It is a model, not a machine. What is measured by others is the latency at each load (CURVES);
what is assumed is how victim and batch slow down with it (Demand, `solve`).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Curve:
    """Latency over idle latency at each share of the peak bandwidth."""

    name: str
    source: str
    idle_ns: float
    points: tuple[tuple[float, float], ...]
    """(GB/s, ns), bandwidth rising, from a table of loaded latencies."""

    loads: tuple[float, ...] = field(init=False)
    """The measured points as shares of the peak, from 0."""
    ratios: tuple[float, ...] = field(init=False)
    """Latency over idle latency at `loads`."""

    def __post_init__(self) -> None:
        """Work out the shares."""
        points = ((0.0, self.idle_ns), *self.points)
        object.__setattr__(self, "loads", tuple(gb / self.peak_gb_per_s for gb, _ in points))
        object.__setattr__(self, "ratios", tuple(ns / self.idle_ns for _, ns in points))

    @property
    def peak_gb_per_s(self) -> float:
        return self.points[-1][0]

    def ratio(self, utilisation: float) -> float:
        """Return the latency over the idle one; straight lines between the measured points."""
        if utilisation >= 1.0:
            return self.ratios[-1]
        at = max(1, bisect_left(self.loads, utilisation))
        low, high = self.loads[at - 1], self.loads[at]
        part = (utilisation - low) / (high - low)
        return self.ratios[at - 1] + part * (self.ratios[at] - self.ratios[at - 1])


CURVES = {
    "skylake-mlc": Curve(
        "skylake-mlc",
        "Intel MLC v3.5 --loaded_latency, read-only, 2 x Xeon Skylake, both nodes together: "
        "FD.io CSIT test report, 'Calibration Data - Skylake'. Rows of 20000 down to 0 ns of "
        "delay; of the five rows at the peak the first and the highest bandwidth are used.",
        81.4,
        (
            (2.5419, 81.40),
            (4.6840, 81.46),
            (7.7882, 82.00),
            (10.7157, 89.00),
            (21.1787, 89.34),
            (27.3964, 90.11),
            (35.2648, 91.03),
            (49.7422, 92.27),
            (68.7173, 94.46),
            (85.0197, 95.48),
            (111.5874, 101.21),
            (160.2429, 121.92),
            (215.0750, 227.05),
            (216.6430, 275.25),
        ),
    ),
    "graviton3-mess": Curve(
        "graviton3-mess",
        "Mess (Esmaili-Dokht et al., MICRO 2024), all reads, AWS Graviton3 with DDR5: "
        "bsc-mem/Mess-simulator, memory_curve/graviton3-ddr5/bwlat_100.txt; every second or third "
        "row, rounded, the rows below 10 GB/s and the bend back above 284.5 GB/s left out.",
        98.1,
        (
            (10.12, 98.6),
            (28.37, 99.9),
            (49.17, 101.5),
            (67.09, 102.8),
            (90.11, 104.9),
            (121.45, 108.7),
            (165.02, 117.7),
            (205.73, 129.5),
            (219.74, 134.7),
            (231.26, 140.2),
            (240.76, 146.5),
            (252.69, 160.0),
            (263.33, 175.4),
            (271.31, 188.8),
            (277.26, 213.2),
            (282.43, 241.3),
            (284.11, 260.3),
            (284.52, 282.4),
        ),
    ),
    "skylake-mess": Curve(
        "skylake-mess",
        "Mess, 78 % reads, Intel Skylake with six channels of DDR4-2666: bsc-mem/Mess-simulator, "
        "memory_curve/skylake-ddr4/bwlat_78.txt (the part outside the core); every second to "
        "fourth row, rounded, without the bend back above 101 GB/s.",
        65.6,
        (
            (4.99, 68.4),
            (10.35, 70.6),
            (15.0, 72.4),
            (21.07, 74.0),
            (31.39, 76.5),
            (41.01, 78.6),
            (51.56, 81.7),
            (59.18, 82.4),
            (65.37, 86.3),
            (69.88, 91.4),
            (74.82, 98.5),
            (79.59, 104.8),
            (84.17, 113.2),
            (90.61, 122.8),
            (94.16, 130.7),
            (95.89, 137.5),
            (97.38, 151.8),
            (98.73, 160.4),
            (99.78, 169.0),
            (100.47, 179.2),
            (100.91, 190.3),
            (101.01, 196.8),
        ),
    ),
}


VICTIM_STALL = 0.4
"""Share of its time at idle latency that the victim waits for memory: assumed. Its time per unit
of work is (1 - s) + s * latency ratio, the usual CPI stack with one memory term."""
BATCH_STALL = 0.2
"""The same of batch: streams have prefetchers and many misses in flight, so they hardly slow."""


class Demand(NamedTuple):
    """What is asked for, as shares of the peak, if memory were always as fast as when idle."""

    victim: float
    batch: float
    """At batch share 1; above 1 it floods the domain."""
    stall: float = VICTIM_STALL


class Load(NamedTuple):
    victim: float
    batch: float
    """Bandwidth got, as shares of the peak."""
    latency: float
    """Over the idle latency."""
    slowdown: float
    """Time the victim needs over the time with idle memory."""

    @property
    def utilisation(self) -> float:
        return self.victim + self.batch


def solve(curve: Curve, demand: Demand, share: float) -> Load:
    """Return the point where latency and bandwidth agree, at batch share `share`.

    Both classes are closed loops: they ask for less as latency rises. Past the last measured
    point the latency stays there and the bandwidth is split in proportion, which flatters the
    machine without a regulator, not the one with it.
    """
    low, high = 1.0, curve.ratios[-1]
    for _ in range(16):
        ratio = (low + high) / 2
        victim, batch = _wanted(demand, share, ratio)
        if curve.ratio(victim + batch) > ratio:
            low = ratio
        else:
            high = ratio
    ratio = (low + high) / 2
    victim, batch = _wanted(demand, share, ratio)
    over = max(1.0, victim + batch)
    return Load(victim / over, batch / over, ratio, 1 + demand.stall * (ratio - 1))


def _wanted(demand: Demand, share: float, ratio: float) -> tuple[float, float]:
    return (
        demand.victim / (1 + demand.stall * (ratio - 1)),
        share * demand.batch / (1 + BATCH_STALL * (ratio - 1)),
    )
