"""Stream leaders and NATS servers die, freeze and are cut off under load.

Rules 1, 2 and 3 hold through elections of three replicas: every append that was cut short is
found out, none lands twice or past its fence, and every ending is carried out once.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.faulting import (
    BACK_S,
    FAULTS,
    KILL,
    Fault,
    admitted,
    recovered,
    resumed,
    suffer,
    waited,
)
from tests.faults.load import now_ms
from tests.faults.matrix import MATRIX
from tests.faults.plant import NATS, Plant

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180, func_only=True)]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
async def test_rules_1_2_and_3_hold_when_a_streams_leader_is_away(
    plant: Plant, fault: Fault
) -> None:
    stream = 0
    leader = await plant.stream_leader(stream)
    leads = {
        each for each in range(plant.layout.streams) if await plant.stream_leader(each) == leader
    }
    at_ms = await suffer(plant, fault, leader)
    hit = {name for name in plant.load.sessions if plant.stream_of(name) in leads}
    note = f"of {len(leads)} of {plant.layout.streams} streams"
    MATRIX.add(
        "NATS server",
        f"stream leader {fault.name}",
        resumed(plant.load, at_ms, lambda promise: promise.session in hit),
        f"running tasks, leader {note}",
    )
    MATRIX.add(
        "NATS server",
        f"stream leader {fault.name}",
        waited(plant.load, at_ms, hit) + admitted(plant.load, at_ms),
        "waiting tasks and submissions",
    )


async def test_rule_10_a_server_that_leads_nothing_is_missed_by_its_clients_only(
    plant: Plant,
) -> None:
    leaders = {await plant.stream_leader(stream) for stream in range(plant.layout.streams)}
    victim = next(host for host in NATS if host not in leaders)
    clients = await plant.clients_of(victim)
    epochs = {node.node: node.epoch for node in await plant.client.nodes()}
    at_ms = await suffer(plant, KILL, victim)
    MATRIX.add(
        "NATS server",
        "server of clients kill -9",
        resumed(plant.load, at_ms, lambda promise: True),
        f"running tasks; {len(clients)} connections moved",
    )
    assert epochs == {node.node: node.epoch for node in await plant.client.nodes()}


async def test_rule_7_an_owner_that_wakes_up_while_the_leader_is_dead_lands_nothing(
    plant: Plant,
) -> None:
    """Frozen beyond its lease; woken while nobody answers appends, after others took over."""
    owned = await plant.sessions_by_owner()
    owner = max(owned, key=lambda controld: len(owned[controld]))
    at_ms = now_ms()
    plant.freeze(owner)
    try:
        await plant.shards_owned(without=owner)
        outdated = len(plant.audit.outdated)
        leader = await plant.stream_leader(plant.stream_of(owned[owner][0]))
        plant.kill(leader)
    finally:
        plant.thaw(owner)
    await plant.load.all_before(at_ms, BACK_S)
    await plant.start_program(leader)
    await recovered(plant)
    assert plant.audit.outdated[outdated:] == []
    MATRIX.add(
        "frozen, then awake",
        "owner, woken as the stream leader dies",
        waited(plant.load, at_ms, owned[owner]),
        "its sessions' waiting tasks",
    )


async def test_rule_5_a_stream_leader_with_a_full_disk_loses_nothing(plant: Plant) -> None:
    victim = await plant.stream_leader(0)
    plant.kill(victim)
    plant.small_disks.add(victim)
    await plant.start_program(victim)
    await plant.whole()
    await plant.lead(0, victim)
    at_ms = now_ms()
    await asyncio.to_thread(plant.fill_disk, victim)
    try:
        await plant.load.all_before(at_ms, BACK_S)
        await plant.load.moving(BACK_S)
    finally:
        plant.small_disks.discard(victim)
        plant.kill(victim)
        await plant.start_program(victim)
    await recovered(plant)
    MATRIX.add(
        "NATS server",
        "stream leader's disk full",
        resumed(plant.load, at_ms, lambda promise: plant.stream_of(promise.session) == 0)
        + waited(plant.load, at_ms, [s for s in plant.load.sessions if plant.stream_of(s) == 0]),
        "running and waiting tasks of its stream",
    )
