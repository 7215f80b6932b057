"""Arrival patterns for placement, each made from a seed; where their shapes come from.

- Two are recorded: see recorded.py.
- Durations are log-normal with sigma 2.36, cut at a minute: the fit of function run times in
  Shahrad et al., "Serverless in the Wild" (USENIX ATC 2020, figure 7), scaled to the mean
  that the load needs.
- Bursts are gamma-distributed gaps with a coefficient of variation of 4, within what Wang et
  al., "BurstGPT" (2024), fit to requests at a language model's service.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from controld.core.columns import Floats
from tools.bench import recorded
from tools.bench.place_oracle import Arrival

_SIGMA = 2.36
_LONGEST_S = 60.0
_BURST_CV = 4.0
_HOT_SHARE = 0.3
_HUGE_SHARE = 0.9

Draw = np.random.Generator


def poisson(rate: float, seconds: float, mean_s: float, sessions: int, seed: int) -> list[Arrival]:
    """Independent arrivals, exponential durations."""
    draw = np.random.default_rng(seed)
    at = _gaps(draw, rate, seconds, 1.0)
    work = draw.exponential(mean_s, len(at))
    return _arrivals(at, work, draw.integers(0, sessions, len(at)))


def bursts(rate: float, seconds: float, mean_s: float, sessions: int, seed: int) -> list[Arrival]:
    """The same with bursts."""
    draw = np.random.default_rng(seed)
    at = _gaps(draw, rate / 20, seconds, _BURST_CV)
    at = np.repeat(at, 20)
    work = draw.exponential(mean_s, len(at))
    return _arrivals(at, work, draw.integers(0, sessions, len(at)))


def heavy_tail(
    rate: float, seconds: float, mean_s: float, sessions: int, seed: int
) -> list[Arrival]:
    """Poisson arrivals, heavy-tailed durations."""
    draw = np.random.default_rng(seed)
    at = _gaps(draw, rate, seconds, 1.0)
    work = np.minimum(draw.lognormal(0.0, _SIGMA, len(at)), _LONGEST_S)
    work *= mean_s / work.mean()
    return _arrivals(at, work, draw.integers(0, sessions, len(at)))


def hot_tool(rate: float, seconds: float, mean_s: float, sessions: int, seed: int) -> list[Arrival]:
    """Three of ten tasks are of a hundredth of the sessions, whose homes would drown in them."""
    draw = np.random.default_rng(seed)
    at = _gaps(draw, rate, seconds, 1.0)
    work = draw.exponential(mean_s, len(at))
    hot = draw.random(len(at)) < _HOT_SHARE
    few = max(1, sessions // 100)
    session = np.where(hot, draw.integers(0, few, len(at)), draw.integers(few, sessions, len(at)))
    return _arrivals(at, work, session)


def huge_pool(
    rate: float, seconds: float, mean_s: float, sessions: int, seed: int
) -> list[Arrival]:
    """One pool has nine of ten tasks, another shares the nodes with it."""
    draw = np.random.default_rng(seed)
    at = _gaps(draw, rate, seconds, 1.0)
    work = draw.exponential(mean_s, len(at))
    huge = draw.random(len(at)) < _HUGE_SHARE
    session = draw.integers(0, sessions, len(at)) * 2 + huge
    return _arrivals(at, work, session, ["chat" if one else "crunch" for one in huge])


PATTERNS: dict[str, Callable[[float, float, float, int, int], list[Arrival]]] = {
    "poisson": poisson,
    "bursts": bursts,
    "heavy_tail": heavy_tail,
    "hot_tool": hot_tool,
    "huge_pool": huge_pool,
    "azure_code": recorded.code,
    "azure_conversation": recorded.conversation,
}
"""By name: (tasks a second, seconds, mean duration, sessions, seed) -> arrivals."""


def _gaps(draw: Draw, rate: float, seconds: float, variation: float) -> Floats:
    """Return times until `seconds` whose gaps are gamma-distributed."""
    shape = 1.0 / variation**2
    count = int(rate * seconds * 1.5) + 50
    at = np.cumsum(draw.gamma(shape, 1.0 / (rate * shape), count))
    return at[at < seconds]


def _arrivals(
    at: Floats, work: Floats, session: object, pools: list[str] | None = None
) -> list[Arrival]:
    sessions = np.asarray(session).tolist()
    pools = pools or ["chat"] * len(sessions)
    return [Arrival(*row) for row in zip(at.tolist(), work.tolist(), sessions, pools, strict=True)]
