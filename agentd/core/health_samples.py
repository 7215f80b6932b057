"""What is sampled of a node's health, the limits, and the verdict. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from corefleet.errors import InvalidInput

Phase = Literal["ok", "watching", "draining"]


@dataclass(slots=True, frozen=True)
class HealthSettings:
    """Limits: bad from `..._bad` on, good below `..._good`; in between all stays as it is."""

    corrected_window_s: float = 86_400.0
    corrected_bad: float = 100.0
    corrected_good: float = 50.0
    """Corrected errors of one memory controller in the window."""
    throttle_window_s: float = 300.0
    throttle_bad_per_minute: float = 6.0
    throttle_good_per_minute: float = 1.0
    beats_window_s: float = 60.0
    beats_bad_share: float = 0.2
    beats_good_share: float = 0.05
    """Share of the beats that were due and did not go out."""
    disk_bad_share: float = 0.95
    disk_good_share: float = 0.90
    clock_bad_s: float = 0.5
    clock_good_s: float = 0.1
    drain_unsynchronised: bool = False
    """Whether a clock that nothing disciplines is worth a drain, or only a line."""
    drain_after_s: float = 60.0
    """So long a signal must be bad; errors that lose data, at once."""
    well_after_s: float = 300.0
    """So long a signal must be good."""

    def __post_init__(self) -> None:
        for name in ("corrected", "throttle", "beats", "disk", "clock"):
            keys = [k for k in self.__slots__ if k.startswith(name)]
            good = next(k for k in keys if "_good" in k)
            bad = next(k for k in keys if "_bad" in k)
            if not 0 <= getattr(self, good) < getattr(self, bad):
                raise InvalidInput(good, getattr(self, good), f"0 or more and less than `{bad}`")


# Samples. What a machine does not tell is left out.


@dataclass(slots=True, frozen=True)
class MemoryErrors:
    """A memory controller's counts since boot, or since they were reset."""

    controller: str
    corrected: int | None
    uncorrected: int | None


@dataclass(slots=True, frozen=True)
class Throttled:
    """A package's counts of thermal throttling by counter, e.g. `cpu3/core`; since boot."""

    package: str
    counts: Mapping[str, int]


@dataclass(slots=True, frozen=True)
class BeatsSent:
    """How many beats went out, ever, and how far apart they should be."""

    sent: int
    interval_s: float


@dataclass(slots=True, frozen=True)
class DiskState:
    """A directory's file system. `error`: it cannot be asked; `used`: 0 to 1, of space or
    inodes, whichever is scarcer."""

    name: str
    path: str
    used: float = 0.0
    read_only: bool = False
    error: str = ""


@dataclass(slots=True, frozen=True)
class ClockState:
    """The kernel's clock discipline. `error_s`: the larger of its offset and its estimate;
    `offset_s`: what it has yet to correct, above 0 if the clock is behind."""

    synchronised: bool
    error_s: float
    offset_s: float = 0.0


Sample = MemoryErrors | Throttled | BeatsSent | DiskState | ClockState


@dataclass(slots=True, frozen=True)
class HealthVerdict:
    """`unwell`: one line for each signal that is not ok, as it was when its state changed.
    `not_judged`: what nothing tells of."""

    phase: Phase
    unwell: tuple[str, ...] = ()
    not_judged: tuple[str, ...] = ()

    @property
    def should_drain(self) -> bool:
        return self.phase == "draining"
