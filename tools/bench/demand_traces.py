"""Demand of victim and batch over time, made anew from a fixed seed: the same in every run."""

from __future__ import annotations

import random
from collections.abc import Callable

from tools.bench.memory_system import Demand

TICK_S = 0.1
SEED = 20

Shape = Callable[[float, random.Random], Demand]


def traces(seconds: float) -> dict[str, list[Demand]]:
    """Return for each trace the demand of every tick."""
    made = {}
    for name, shape in _SHAPES.items():
        rng = random.Random(f"{SEED}-{name}")
        made[name] = [shape(tick * TICK_S, rng) for tick in range(round(seconds / TICK_S))]
    return made


def _near(rng: random.Random, value: float) -> float:
    """Return `value` with a tenth of jitter: programs are never quite steady."""
    return max(0.0, value * rng.gauss(1.0, 0.1))


def _steady(_: float, rng: random.Random) -> Demand:
    return Demand(_near(rng, 0.15), _near(rng, 1.5))


def _steps(at: float, rng: random.Random) -> Demand:
    """The victim steps up and down, batch changes its kind of work every 35 s."""
    victim = (0.1, 0.35, 0.05, 0.25)[int(at / 20) % 4]
    return Demand(_near(rng, victim), _near(rng, (1.5, 0.9, 2.2)[int(at / 35) % 3]))


def _ramp(at: float, rng: random.Random) -> Demand:
    """The victim grows from nothing to 0.4 of the peak and back in a minute."""
    part = abs((at % 60) / 30 - 1)
    return Demand(_near(rng, 0.4 * (1 - part)), _near(rng, 1.5))


def _bursts(at: float, rng: random.Random) -> Demand:
    """Batch bursts of 4 s, far above the peak, on a steady half-load."""
    return Demand(_near(rng, 0.2), _near(rng, 2.5 if at % 12 < 4 else 0.6))


def _on_off(period_s: float) -> Shape:
    def shape(at: float, rng: random.Random) -> Demand:
        return Demand(_near(rng, 0.15), _near(rng, 1.6 if at % period_s < period_s / 2 else 0.0))

    return shape


def _victim_on_off(period_s: float) -> Shape:
    def shape(at: float, rng: random.Random) -> Demand:
        return Demand(_near(rng, 0.35 if at % period_s < period_s / 2 else 0.02), _near(rng, 1.5))

    return shape


def _walk() -> Shape:
    place = [0.2, 1.2]

    def shape(_: float, rng: random.Random) -> Demand:
        place[0] = min(0.5, max(0.02, place[0] + rng.gauss(0.0, 0.01)))
        place[1] = min(2.5, max(0.0, place[1] + rng.gauss(0.0, 0.05)))
        return Demand(_near(rng, place[0]), _near(rng, place[1]))

    return shape


def _light(_: float, rng: random.Random) -> Demand:
    """Batch that never hurts: nothing should be taken from it."""
    return Demand(_near(rng, 0.2), _near(rng, 0.3))


_SHAPES: dict[str, Shape] = {
    "steady": _steady,
    "steps": _steps,
    "ramp": _ramp,
    "bursts": _bursts,
    "batch_on_off_4s": _on_off(4.0),
    "batch_on_off_20s": _on_off(20.0),
    "batch_on_off_60s": _on_off(60.0),
    "victim_on_off_6s": _victim_on_off(6.0),
    "victim_on_off_30s": _victim_on_off(30.0),
    "walk": _walk(),
    "light": _light,
}
