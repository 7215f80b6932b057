"""etcd loses its leader, or its quorum, under load: tasks keep flowing."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.faulting import FAULTS, FREEZE_5, Fault, recovered, resumed, suffer, waited
from tests.faults.load import now_ms
from tests.faults.matrix import MATRIX
from tests.faults.plant import ETCDS, Plant

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180, func_only=True)]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
async def test_tasks_flow_while_the_leader_of_etcd_is_away(plant: Plant, fault: Fault) -> None:
    leader = await plant.etcd_leader()
    at_ms = await suffer(plant, fault, leader)
    measure(plant, f"leader {fault.name}", at_ms)


async def test_tasks_flow_and_ownership_waits_while_etcd_has_no_quorum(plant: Plant) -> None:
    """Rule 7: whoever cannot renew its lease stops deciding, and goes on once it can again."""
    frozen = ETCDS[:2]
    at_ms = now_ms()
    for host in frozen:
        plant.freeze(host)
    try:
        await asyncio.sleep(FREEZE_5.held_s)
    finally:
        for host in frozen:
            plant.thaw(host)
    await recovered(plant)
    measure(plant, "2 of 3 frozen 5 s", at_ms)


def measure(plant: Plant, fault: str, at_ms: int) -> None:
    running = resumed(plant.load, at_ms, lambda promise: True)
    waiting = waited(plant.load, at_ms, plant.load.sessions)
    MATRIX.add("etcd", fault, running, "running tasks")
    MATRIX.add("etcd", fault, waiting, "waiting tasks")
