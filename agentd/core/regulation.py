"""The words of the regulator: settings, modes, the state of a domain, actions. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from agentd.bandwidth.report import Source
from agentd.core.sensing import KINDS, Judge, Kind
from corefleet.errors import InvalidInput

Mode = Literal["free", "squeezing", "recovering", "elsewhere", "doubting", "static"]
"""free: at the ceiling. squeezing: was cut. recovering: is given back. elsewhere: cutting does not
help. doubting: no sensor is believed, the share is held. static: the same for too long, a fixed
cap."""

TRANSITIONS: frozenset[tuple[Mode, Mode]] = frozenset(
    {
        ("free", "squeezing"),
        ("free", "recovering"),  # a better sensor allows more than the one before
        ("free", "doubting"),
        ("squeezing", "recovering"),
        ("squeezing", "elsewhere"),
        ("squeezing", "doubting"),
        ("recovering", "free"),
        ("recovering", "squeezing"),
        ("recovering", "doubting"),
        ("elsewhere", "squeezing"),
        ("elsewhere", "recovering"),
        ("elsewhere", "doubting"),
        ("doubting", "recovering"),
        ("doubting", "static"),
        ("static", "recovering"),
    }
)


@dataclass(slots=True, frozen=True, kw_only=True)
class RegulatorSettings:
    """Levels are shares of the peak bandwidth, shares are of the domain's batch CPUs."""

    high: float = 0.8
    """Squeeze above."""
    low: float = 0.72
    """Give back below."""
    far_below: float = 0.55
    """Give back faster below."""
    canary_at_high: float = 1.6
    """Latency over idle latency that stands for `high`."""
    pressure_at_high: float = 0.1
    """PSI memory `some avg10` as a share that stands for `high`."""
    floor: float = 0.05
    static_batch_share: float = 0.25
    """The cap where nothing is sensed, and the ceiling where PSI alone is."""
    recover_per_s: float = 0.02
    recover_fast_per_s: float = 0.1
    dwell_s: float = 0.5
    """At least so long after a change before the next."""
    hold_s: float = 10.0
    """How long a share is held without a sensor."""

    def __post_init__(self) -> None:
        """Raise InvalidInput unless 0 < far_below < low < high < 1 and the rest fits."""
        checks = (
            ("high", self.high, self.low < self.high < 1.0, "above low and below 1"),
            ("low", self.low, self.far_below < self.low, "above far_below"),
            ("far_below", self.far_below, self.far_below > 0.0, "above 0"),
            ("canary_at_high", self.canary_at_high, self.canary_at_high > 1.0, "above 1"),
            ("pressure_at_high", self.pressure_at_high, 0 < self.pressure_at_high < 1, "0 to 1"),
            ("floor", self.floor, 0.0 < self.floor <= 1.0, "above 0, at most 1"),
            (
                "static_batch_share", self.static_batch_share,
                self.floor <= self.static_batch_share <= 1.0, "between floor and 1",
            ),
            ("recover_per_s", self.recover_per_s, self.recover_per_s > 0.0, "above 0"),
            (
                "recover_fast_per_s", self.recover_fast_per_s,
                self.recover_fast_per_s >= self.recover_per_s, "at least recover_per_s",
            ),
            ("dwell_s", self.dwell_s, self.dwell_s >= 0.0, "0 or more"),
            ("hold_s", self.hold_s, self.hold_s >= 0.0, "0 or more"),
        )  # fmt: skip
        for name, value, right, expected in checks:
            if not right:
                raise InvalidInput(f"bandwidth.{name}", value, expected)

    @property
    def target(self) -> float:
        return (self.high + self.low) / 2


@dataclass(slots=True)
class DomainState:
    """What the regulator knows of one domain; `node show` and metrics read it."""

    domain: int
    share: float
    mode: Mode = "static"
    kind: Kind | None = None
    """The sensor that counts."""
    level: float | None = None
    """What it said last."""
    source: Source = "pressure"
    judges: dict[Kind, Judge] = field(default_factory=lambda: {k: Judge(k) for k in KINDS})
    levels: list[float] = field(default_factory=list)
    """Fresh levels since the last change, at most two."""
    settled_at: float = 0.0
    stepped_at: float = 0.0
    blind_since: float = 0.0
    cuts: int = 0
    cut_from: tuple[float, float] = (0.0, 1.0)
    """Level and share when this squeeze began."""
    said: float | None = None
    """The share that the shell was last told."""


# Actions.


@dataclass(slots=True, frozen=True)
class SetBatchShare:
    """Let the batch class of `domain` use `share` (0 to 1) of its CPUs."""

    domain: int
    share: float


@dataclass(slots=True, frozen=True)
class LiftBatch:
    """Take the limit of the batch class of `domain` away."""

    domain: int


@dataclass(slots=True, frozen=True)
class SensorDoubted:
    domain: int
    source: Source
    reason: str


@dataclass(slots=True, frozen=True)
class PressureElsewhere:
    """Cutting batch to `share` left the level at `level`: the pressure is not batch's."""

    domain: int
    level: float
    share: float


Action = SetBatchShare | LiftBatch | SensorDoubted | PressureElsewhere
