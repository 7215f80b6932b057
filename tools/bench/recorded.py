"""Arrivals as recorded at two services of language models: see data/README.md.

A stretch of the trace is compressed in time so that all of it happens while the replay
lasts, and as many services as the load needs behave so at once, each beginning at another
point of the stretch and going on with its beginning after its end. What a request takes is

    prompt tokens / PROMPT_TOKENS_PER_S + generated tokens / GENERATED_TOKENS_PER_S,

scaled to the mean that the load needs, so that only the ratio of the two rates counts. The
traces name no sessions: they are drawn at random, as in the made patterns.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from controld.core.columns import Floats
from tools.bench.place_oracle import Arrival

PROMPT_TOKENS_PER_S = 250.0
GENERATED_TOKENS_PER_S = 50.0
"""Of one request at a small model on two cores."""

_DATA = Path(__file__).parent / "data"


def code(rate: float, seconds: float, mean_s: float, sessions: int, seed: int) -> list[Arrival]:
    """Code completion: bursts of long prompts and short answers, and pauses between them."""
    return _arrivals("azure_llm_2023_code", rate, seconds, mean_s, sessions, seed)


def conversation(
    rate: float, seconds: float, mean_s: float, sessions: int, seed: int
) -> list[Arrival]:
    """Conversation: a steadier stream whose rate rises to twice what it was."""
    return _arrivals("azure_llm_2023_conv", rate, seconds, mean_s, sessions, seed)


@cache
def requests(name: str) -> tuple[Floats, Floats]:
    """Return when each request of a trace came, as share of the whole stretch, and what it takes.

    The stretch ends one mean gap after the last request. What it takes is in seconds.
    """
    rows = np.loadtxt(_DATA / f"{name}.csv", delimiter=",", skiprows=1)
    at_ms, prompt, generated = rows.T
    stretch_ms = at_ms[-1] * len(at_ms) / (len(at_ms) - 1)
    return at_ms / stretch_ms, prompt / PROMPT_TOKENS_PER_S + generated / GENERATED_TOKENS_PER_S


def _arrivals(
    name: str, rate: float, seconds: float, mean_s: float, sessions: int, seed: int
) -> list[Arrival]:
    draw = np.random.default_rng(seed)
    at, takes_s = requests(name)
    services = max(1, round(rate * seconds / len(at)))
    times = (at[None, :] + draw.random((services, 1))) % 1.0 * seconds
    # Whole services rarely make the rate exactly: their requests' length makes up for it.
    offered_s = mean_s * rate * seconds / times.size
    work = np.tile(takes_s * (offered_s / takes_s.mean()), services)
    order = np.argsort(times, axis=None)
    at_s, work_s = times.ravel()[order].tolist(), work[order].tolist()
    session = draw.integers(0, sessions, times.size).tolist()
    return [Arrival(*row) for row in zip(at_s, work_s, session, strict=True)]
