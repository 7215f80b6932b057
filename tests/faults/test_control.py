"""Controlds and clients die, freeze, are cut off and slow under load."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.faults.faulting import (
    CUT,
    FAULTS,
    FREEZE_1,
    FREEZE_5,
    Fault,
    admitted,
    recovered,
    suffer,
    waited,
)
from tests.faults.load import now_ms
from tests.faults.matrix import MATRIX
from tests.faults.plant import CLIENT, Plant

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180, func_only=True)]

CUT_BRIEFLY = replace(CUT, name="cut off 1.5 s", held_s=1.5)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
async def test_rules_7_and_8_a_controlds_shards_and_racks_are_taken_over(
    plant: Plant, fault: Fault
) -> None:
    """Rule 7: the one that wakes up, or is joined again, decides nothing more."""
    owned = await plant.sessions_by_owner()
    victim = max(owned, key=lambda controld: len(owned[controld]))
    at_ms = await suffer(plant, fault, victim)
    others = [name for controld in owned if controld != victim for name in owned[controld]]
    MATRIX.add("controld", fault.name, waited(plant.load, at_ms, owned[victim]))
    MATRIX.add("controld", fault.name, waited(plant.load, at_ms, others), "shards of the others")
    MATRIX.add("controld", fault.name, admitted(plant.load, at_ms), "submissions")


async def test_rule_10_a_controld_cut_off_for_a_moment_loses_no_node(plant: Plant) -> None:
    before = {node.node: node.epoch for node in await plant.client.nodes()}
    controlds = await plant.client.controlds()
    victim = max(controlds, key=lambda controld: len(controld.racks)).controld
    await suffer(plant, CUT_BRIEFLY, victim)
    assert before == {node.node: node.epoch for node in await plant.client.nodes()}


async def test_rule_4_a_killed_clients_submissions_are_not_accepted_twice(plant: Plant) -> None:
    at_ms = now_ms()
    await plant.load.kill()
    await plant.load.start()
    await recovered(plant)
    MATRIX.add("client", "kill -9", admitted(plant.load, at_ms))


@pytest.mark.parametrize("fault", [FREEZE_1, FREEZE_5, CUT], ids=lambda fault: fault.name)
async def test_rule_4_a_client_that_comes_back_finds_its_tasks_done(
    plant: Plant, fault: Fault
) -> None:
    at_ms = await suffer(plant, fault, CLIENT)
    MATRIX.add("client", fault.name, admitted(plant.load, at_ms))
