"""The properties of tests/sim/properties.py hold for every seed, and every run repeats itself."""

from __future__ import annotations

import pytest

from tests.sim.run import run_seeds

SEEDS = 200
CHUNK = 40
JOBS = 2


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_nothing_is_lost_done_twice_or_out_of_order(first: int) -> None:
    seeds = range(first, first + CHUNK)
    found = {int(str(line["seed"])): line for line in run_seeds(seeds, JOBS)}
    missing = [seed for seed in seeds if seed not in found]
    assert not missing, f"no outcome of seeds {missing}: python -m tests.sim --seed {missing[0]}"
    broken = [
        f"seed {seed}: {line['violation']}" for seed, line in found.items() if line["violation"]
    ]
    assert not broken, "\n".join([*broken, "replay: python -m tests.sim --seed N --shrink"])


@pytest.mark.timeout(120)
def test_a_seed_gives_the_same_run_to_the_byte() -> None:
    once, again = (_digests() for _ in range(2))
    assert once == again
    assert len(set(once.values())) == len(once)


def _digests() -> dict[str, str]:
    return {str(line["seed"]): str(line["digest"]) for line in run_seeds(range(24, 26), 1)}
