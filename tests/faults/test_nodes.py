"""Nodes, racks, agentds and workers die, freeze and are cut off under load."""

from __future__ import annotations

import pytest

from tests.faults.faulting import FAULTS, Fault, ran_on, resumed, suffer
from tests.faults.matrix import MATRIX
from tests.faults.plant import Plant

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180, func_only=True)]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
async def test_rules_1_8_and_10_a_nodes_tasks_go_on_elsewhere(plant: Plant, fault: Fault) -> None:
    at_ms = await suffer(plant, fault, "n1")
    MATRIX.add("node", fault.name, resumed(plant.load, at_ms, ran_on("n1")))
