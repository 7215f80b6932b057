"""The simulation finds defects that are put in on purpose, each within a few seeds."""

from __future__ import annotations

import pytest

from tests.sim.mutations import MUTATIONS, Mutation
from tests.sim.simulate import simulate

WITHIN_SEEDS = 12
"""Which seed finds a defect changes with the code; most are found by the first or second."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: str(mutation.name))
def test_a_defect_is_found(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation.make(monkeypatch)
    for seed in range(WITHIN_SEEDS):
        violation = simulate(mutation.plan(seed)).violation
        if violation:
            assert violation.partition(":")[0] in mutation.shows, violation
            return
    pytest.fail(f"{mutation.name} went unseen for {WITHIN_SEEDS} seeds")
