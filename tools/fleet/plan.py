"""What a simulated fleet looks like, and how long its tasks take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Literal

from corefleet.errors import InvalidInput

NODES_PER_RACK = 40

Law = Literal["fixed", "exp", "lognormal"]


@dataclass(slots=True, frozen=True)
class Durations:
    """How long a step takes: `fixed:S`, `exp:MEAN` or `lognormal:MEDIAN,SIGMA`, in seconds."""

    law: Law
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Durations:
        """Read the form above; raises InvalidInput."""
        law, _, numbers = text.partition(":")
        parts = numbers.split(",")
        wanted = {"fixed": 1, "exp": 1, "lognormal": 2}.get(law, -1)
        try:
            values = [float(part) for part in parts]
        except ValueError:
            values = []
        if len(values) != wanted or any(not 0 <= value < math.inf for value in values):
            raise InvalidInput("durations", text, "fixed:S, exp:MEAN or lognormal:MEDIAN,SIGMA")
        return cls(law, *values)  # type: ignore[arg-type]

    def draw(self, rng: Random) -> float:
        """Return one duration in seconds."""
        match self.law:
            case "fixed":
                return self.first
            case "exp":
                return rng.expovariate(1 / self.first) if self.first else 0.0
            case "lognormal":
                return self.first * math.exp(rng.gauss(0.0, self.second))


@dataclass(slots=True, frozen=True)
class Shape:
    """Nodes by number; a rack has NODES_PER_RACK of them, the last one maybe fewer."""

    nodes: int
    first: int = 0
    """Number of the first node: several processes can simulate one fleet together."""

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise InvalidInput("nodes", self.nodes, "1 or more")

    def names(self) -> list[tuple[str, str]]:
        """Return (node, rack) of all nodes."""
        numbers = range(self.first, self.first + self.nodes)
        return [(node_name(number), rack_name(number // NODES_PER_RACK)) for number in numbers]


def node_name(number: int) -> str:
    return f"n{number:05d}"


def rack_name(number: int) -> str:
    return f"rack-{number:03d}"


@dataclass(slots=True, frozen=True)
class Job:
    """What a task's input asks of a simulated node: `STEPS [SECONDS]`."""

    steps: int
    seconds: float | None = None
    """Of each step; None draws them."""

    @classmethod
    def parse(cls, text: str) -> Job:
        """Read an input; what cannot be read is a task without steps."""
        parts = text.split()
        try:
            steps = int(parts[0]) if parts else 0
            seconds = float(parts[1]) if len(parts) > 1 else None
        except ValueError:
            return cls(0)
        return cls(max(0, steps), seconds)
