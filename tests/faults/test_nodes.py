"""Nodes, racks, agentds and workers die, freeze and are cut off under load."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial

import psutil
import pytest

from tests.faults.agents import LEDGER
from tests.faults.faulting import (
    BACK_S,
    CUT,
    DELAY,
    FAULTS,
    FREEZE_1,
    FREEZE_5,
    KILL,
    Fault,
    ran_on,
    recovered,
    resumed,
    suffer,
)
from tests.faults.load import now_ms
from tests.faults.matrix import MATRIX
from tests.faults.plant import CONTROLDS, NATS, NODES, Plant

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180, func_only=True)]

AGENTD_FROZEN = [
    replace(fault, begin=partial(Plant.freeze, alone=True)) for fault in (FREEZE_1, FREEZE_5)
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
async def test_rules_1_8_and_10_a_nodes_tasks_go_on_elsewhere(plant: Plant, fault: Fault) -> None:
    victim = await plant.busiest()
    at_ms = await suffer(plant, fault, victim)
    MATRIX.add("node", fault.name, resumed(plant.load, at_ms, ran_on(victim)))


@pytest.mark.parametrize("fault", [CUT, DELAY], ids=lambda fault: fault.name)
async def test_rule_10_both_nodes_of_a_rack_are_missed_at_once(plant: Plant, fault: Fault) -> None:
    rack = [name for name, rack in NODES.items() if rack == NODES[await plant.busiest()]]
    at_ms = await suffer(plant, fault, *rack)
    MATRIX.add("rack", fault.name, resumed(plant.load, at_ms, ran_on(*rack)))


@pytest.mark.parametrize("fault", [KILL, *AGENTD_FROZEN], ids=lambda fault: fault.name)
async def test_node_rule_1_an_agentd_alone_loses_nothing(plant: Plant, fault: Fault) -> None:
    """With the plain launcher workers and heartbeat end with a dead agentd."""
    victim = await plant.busiest()
    at_ms = await suffer(plant, fault, victim)
    MATRIX.add("agentd alone", fault.name, resumed(plant.load, at_ms, ran_on(victim)))


async def test_a_killed_workers_tasks_go_on_in_another_one(plant: Plant) -> None:
    """On the same node, unless that takes longer than the pool lets a task rest."""
    victim = await plant.busiest()
    at_ms = now_ms()
    for worker in plant.workers(victim):
        worker.kill()
    await recovered(plant)
    touched = [p for p in plant.load.live_at(at_ms) if ran_on(victim)(p)]
    moved = [p for p in touched if {step.node for step in p.links()} != {victim}]
    gaps = resumed(plant.load, at_ms, ran_on(victim))
    MATRIX.add("worker", "kill -9", gaps, f"tasks, {len(moved)} of them moved to other nodes")


async def test_rule_1_a_worker_that_wakes_up_after_its_task_was_moved_changes_nothing(
    plant: Plant,
) -> None:
    """It makes no progress for longer than the pool allows, so its tasks go elsewhere."""
    victim = await plant.busiest()
    workers = plant.workers(victim)
    at_ms = now_ms()
    for worker in workers:
        worker.suspend()
    try:
        await plant.load.all_before(at_ms, BACK_S)
    finally:
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.resume()
    await recovered(plant)
    late = f"worker frozen; progress_timeout_s {LEDGER.progress_timeout_s:g}"
    MATRIX.add("no progress", late, resumed(plant.load, at_ms, ran_on(victim)))


async def test_rule_10_a_node_that_hears_but_is_not_heard_loses_its_tasks_to_others(
    plant: Plant,
) -> None:
    """What it sends to the NATS servers and controlds is lost; what they send still comes."""
    victim = await plant.busiest()
    targets = (*NATS, *CONTROLDS)
    at_ms = now_ms()
    plant.lan.cut_one_way(victim, *targets)
    try:
        await plant.load.all_before(at_ms, BACK_S)
    finally:
        plant.lan.mend_one_way(victim, *targets)
    await recovered(plant)
    MATRIX.add("node", "not heard any more", resumed(plant.load, at_ms, ran_on(victim)))
