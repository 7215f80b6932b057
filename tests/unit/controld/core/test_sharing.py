"""Pools that share nodes: exclusive ones, accelerators, drains, and what batch gives up."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from controld.core.eligibility import Slot
from controld.core.fleet import Fleet
from controld.core.placement import PlacementRequest, explain, place
from corefleet.messages.records import Drain, PoolSpec
from corefleet.messages.wire import LoadVector, SlotUse
from tests.unit.controld.core.driving import FleetDriver, registration

CHAT = PlacementRequest("chat")
CRUNCH = PlacementRequest("crunch", "batch")
ALONE = {"chat": PoolSpec(name="chat", exclusive=True), "crunch": PoolSpec(name="crunch")}
BATCH = {"chat": PoolSpec(name="chat"), "crunch": PoolSpec(name="crunch", pool_class="batch")}


def slot_of(fleet: Fleet, pool: str, node: str = "n0") -> Slot:
    found = fleet.slot(node, 1, pool, 0)
    assert found is not None
    return found


def takes(fleet: Fleet, pool: str) -> str:
    """Return the node that a task of the pool gets, '' for none."""
    slot = place(fleet, PlacementRequest(pool), Random(0)).slot
    return "" if slot is None else slot.node.name


def test_a_node_that_runs_an_exclusive_pool_runs_no_other_and_the_reverse() -> None:
    fleets = FleetDriver(nodes=1, slots=4)
    fleet = fleets.fleet
    fleet.set_pools(ALONE)
    chat, crunch = slot_of(fleet, "chat"), slot_of(fleet, "crunch")
    fleet.took(chat, 1.0)
    assert takes(fleet, "crunch") == ""
    assert takes(fleet, "chat") == "n0"
    why = place(fleet, CRUNCH, Random(0)).why
    assert why.endswith("1 pool chat has the node to itself")
    fleet.gave_back(chat, 2.0)
    fleet.took(crunch, 3.0)
    assert takes(fleet, "chat") == ""
    (line,) = explain(fleet, CHAT)
    assert line.line == "pool chat wants the node to itself, pool crunch runs there"


def test_what_others_run_there_keeps_an_exclusive_pool_away_too() -> None:
    fleets = FleetDriver(nodes=2, slots=4)
    fleet = fleets.fleet
    fleet.set_pools(ALONE)
    fleets.see("n0", slots=(SlotUse("chat", 0, 4, 0), SlotUse("crunch", 0, 4, 1)))
    assert takes(fleet, "chat") == "n1"
    fleets.see("n0", slots=(SlotUse("chat", 0, 4, 0), SlotUse("crunch", 0, 4, 0)))
    fleets.see("n1", slots=(SlotUse("chat", 0, 4, 0), SlotUse("crunch", 0, 4, 3)))
    assert takes(fleet, "chat") == "n0"


def test_a_pool_that_waits_for_a_node_to_itself_is_woken_when_it_is_free() -> None:
    fleets = FleetDriver(nodes=1, slots=4)
    fleet = fleets.fleet
    fleet.set_pools(ALONE)
    crunch = slot_of(fleet, "crunch")
    fleet.took(crunch, 1.0)
    fleet.wait("chat", 5)
    assert fleet.woken() == []
    fleet.gave_back(crunch, 2.0)
    assert fleet.woken() == [5]


def test_a_pool_that_is_no_longer_exclusive_lets_others_in() -> None:
    fleet = FleetDriver(nodes=1, slots=4).fleet
    fleet.set_pools(ALONE)
    fleet.took(slot_of(fleet, "chat"), 1.0)
    assert takes(fleet, "crunch") == ""
    assert fleet.set_pools({"chat": PoolSpec(name="chat")}).capacity
    assert takes(fleet, "crunch") == "n0"


def test_accelerators_are_counted_over_all_pools_that_name_them() -> None:
    fleet = FleetDriver(nodes=0).fleet
    specs = {name: PoolSpec(name=name, accelerator="npu") for name in ("chat", "crunch")}
    fleet.set_pools(specs)
    fleets = FleetDriver(nodes=0)
    fleets.fleet = fleet
    fleets.join("none", slots=4)
    assert takes(fleet, "chat") == ""
    fleets.join("n0", slots=4, accelerators={"npu": 2})
    fleet.took(slot_of(fleet, "chat"), 1.0)
    assert takes(fleet, "crunch") == "n0"
    fleet.took(slot_of(fleet, "crunch"), 1.0)
    assert takes(fleet, "crunch") == ""
    lines = {line.node: line.line for line in explain(fleet, CHAT)}
    assert lines == {
        "none": "accelerator npu is not there",
        "n0": "accelerator npu: all 2 are taken",
    }


@pytest.mark.parametrize(
    ("spec", "fits", "why"),
    [
        ({"arch": "aarch64"}, {"arch": "aarch64"}, "arch is x86_64, the pool wants aarch64"),
        (
            {"features": ("avx2", "bf16")},
            {"features": ("avx2", "bf16", "sve")},
            "CPU features are missing: bf16",
        ),
    ],
)
def test_architecture_and_features_must_fit(
    spec: dict[str, Any], fits: dict[str, Any], why: str
) -> None:
    fleets = FleetDriver(nodes=0)
    fleets.fleet.set_pools({"chat": PoolSpec(name="chat", **spec)})
    fleets.join("other", arch="x86_64", features=("avx2",))
    (line,) = explain(fleets.fleet, CHAT)
    assert line.line == why
    fleets.join("fit", **fits)
    assert takes(fleets.fleet, "chat") == "fit"


def test_a_drained_node_gets_nothing_new_and_shards_are_told_once() -> None:
    fleets = FleetDriver(nodes=2)
    drain = Drain(node="n0", reason="new DIMMs")
    fleets.fleet.set_drains({"n0": drain})
    fleets.fleet.set_drains({"n0": drain})
    assert {takes(fleets.fleet, "chat") for _ in range(5)} == {"n1"}
    assert not fleets.fleet.is_gone("n0", 1)
    assert "draining: new DIMMs" in [line.line for line in explain(fleets.fleet, CHAT)]
    assert [node.state for node in fleets.fleet.nodes()] == ["draining", "ready"]
    ended = fleets.fleet.set_drains({})
    assert ended.capacity


def test_a_drain_holds_for_a_node_that_registers_later_and_at_each_epoch() -> None:
    fleets = FleetDriver(nodes=0)
    fleets.fleet.set_drains({"n0": Drain(node="n0")})
    for epoch in (1, 2):
        fleets.join("n0", epoch=epoch)
        assert takes(fleets.fleet, "chat") == ""
    fleets.fleet.set_drains({})
    assert takes(fleets.fleet, "chat") == "n0"


def batch_on_n0(used: int, cpu: float = 0.0) -> FleetDriver:
    """One batch task of ours on n0, where chat has `used` of two places taken."""
    fleets = FleetDriver(nodes=2)
    fleets.fleet.set_pools(BATCH)
    fleets.fleet.took(slot_of(fleets.fleet, "crunch"), 0.0)
    for node in ("n0", "n1"):
        slots = (SlotUse("chat", 0, 2, used), SlotUse("crunch", 0, 2, 1))
        for _ in range(12):
            fleets.see(node, slots=slots, load=LoadVector(cpu=cpu), now=1.0)
    return fleets


def test_batch_of_ours_is_preemptable_where_the_online_pool_is_full_or_over_its_limit() -> None:
    for fleets in (batch_on_n0(used=2), batch_on_n0(used=1, cpu=0.97)):
        slot = fleets.fleet.preemptable("chat", Random(0))
        assert slot is not None
        assert (slot.node.name, slot.domain, slot.pool) == ("n0", 0, "chat")
        assert fleets.fleet.preemptable("crunch", Random(0)) is None, "batch takes from nobody"


def test_nothing_is_preemptable_while_there_is_room_or_no_batch_of_ours() -> None:
    assert batch_on_n0(used=1).fleet.preemptable("chat", Random(0)) is None
    fleets = batch_on_n0(used=2)
    fleets.fleet.disowned(slot_of(fleets.fleet, "crunch"))
    assert fleets.fleet.preemptable("chat", Random(0)) is None
    assert fleets.fleet.preemptable("unheard", Random(0)) is None


def test_what_is_preemptable_is_not_remembered_past_what_changes_it() -> None:
    fleet = batch_on_n0(used=2).fleet
    chat, crunch = slot_of(fleet, "chat"), slot_of(fleet, "crunch")
    fleet.adopted(chat)
    undone: list[tuple[Callable[[], object], Callable[[], object]]] = [
        (lambda: fleet.disowned(crunch), lambda: fleet.adopted(crunch)),
        (lambda: fleet.gave_back(crunch, 1.0), lambda: fleet.took(crunch, 1.0)),
        (lambda: fleet.gave_back(chat, 1.0), lambda: fleet.took(chat, 1.0)),
        (lambda: fleet.refused(chat, 1.0), lambda: fleet.tick(9.0)),
        (lambda: fleet.set_drains({"n0": Drain(node="n0")}), lambda: fleet.set_drains({})),
        (lambda: fleet.set_pools({}), lambda: fleet.set_pools(BATCH)),
        (lambda: fleet.removed("n0", 9.0), lambda: None),
    ]
    for change, undo in undone:
        for _ in range(2):
            assert fleet.preemptable("chat", Random(0)) is chat
        change()
        assert fleet.preemptable("chat", Random(0)) is None
        undo()
    assert fleet.preemptable("chat", Random(0)) is None


def test_slots_that_batch_holds_shut_come_first() -> None:
    fleets = batch_on_n0(used=2)
    fleets.join("n2", accelerators={"npu": 1})
    fleets.fleet.set_pools(
        {
            "chat": PoolSpec(name="chat", accelerator="npu"),
            "crunch": PoolSpec(name="crunch", pool_class="batch", accelerator="npu"),
        }
    )
    fleets.fleet.took(slot_of(fleets.fleet, "crunch", "n2"), 1.0)
    slot = fleets.fleet.preemptable("chat", Random(0))
    assert slot is not None
    assert slot.node.name == "n2"


def test_handles_of_slots_that_are_no_more_count_nothing() -> None:
    fleets = FleetDriver(nodes=1)
    old = slot_of(fleets.fleet, "chat")
    fleets.fleet.took(old, 0.0)
    fleets.fleet.removed("n0", 1.0)
    fleets.join("n1")
    fleets.fleet.gave_back(old, 2.0)
    fleets.fleet.refused(old, 2.0)
    fleets.fleet.tick(9.0)
    new = slot_of(fleets.fleet, "chat", "n1")
    assert (old.own, new.own, new.taken) == (0, 0, 0)


def test_4096_nodes_come_and_go() -> None:
    fleet = Fleet()
    for index in range(4096):
        fleet.registered(registration(f"n{index}", rack=f"r{index // 40}"), 0.0)
    gone = [fleet.removed(f"n{index}", 1.0).gone for index in range(4096)]
    assert all(len(each) == 1 for each in gone)
    assert fleet.nodes() == []
    assert place(fleet, CHAT, Random(0)).why == "no node offers pool chat"
