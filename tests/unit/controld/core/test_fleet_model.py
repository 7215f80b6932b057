"""The fleet's arrays against a naive recomputation, after any sequence of events."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controld.core.eligibility import NOWHERE, Offers, Slot, why_not
from controld.core.fleet import Fleet
from controld.core.placement import PlacementRequest, place
from controld.core.score import (
    HOME_LIMIT,
    class_factor,
    crowd_cost,
    kind_row,
    load_cost,
    place_cost,
    slot_cost,
    slot_costs,
)
from corefleet.messages.records import Drain, LostNode, PoolSpec
from corefleet.messages.wire import LoadVector, SlotUse, Verdict
from tests.unit.controld.core.driving import FleetDriver

POOLS = ("chat", "crunch")
NODES = tuple(f"n{index}" for index in range(4))
SPECS: tuple[dict[str, PoolSpec], ...] = (
    {},
    {"chat": PoolSpec(name="chat", exclusive=True)},
    {"chat": PoolSpec(name="chat", labels={"disk": "nvme"})},
    {
        "chat": PoolSpec(name="chat", accelerator="npu"),
        "crunch": PoolSpec(name="crunch", accelerator="npu", pool_class="batch"),
    },
    {"crunch": PoolSpec(name="crunch", pool_class="batch")},
)


class Story:
    """Does to a fleet what it is told, with a clock that goes on."""

    def __init__(self) -> None:
        self.fleets = FleetDriver(nodes=0)
        self.fleet = self.fleets.fleet
        self.held: list[Slot] = []
        self.epochs = dict.fromkeys(NODES, 0)
        self.now = 1.0
        self.rng = Random(4)

    def step(self, what: int, number: int) -> None:
        self.now += 0.03
        steps: tuple[Callable[[str, int], object], ...] = (
            self._join,
            self._see,
            self._take,
            self._give,
            self._state,
            self._tell,
        )
        steps[what](NODES[number % len(NODES)], number)

    def _join(self, node: str, number: int) -> None:
        self.epochs[node] += number // 4 % 2
        labels = {"disk": "nvme"} if number % 3 else {}
        self.fleets.join(
            node,
            epoch=self.epochs[node],
            slots=1 + number % 3,
            now=self.now,
            rack=f"r{number % 2}",
            labels=labels,
            accelerators={"npu": number % 3},
        )

    def _see(self, node: str, number: int) -> None:
        uses = tuple(
            SlotUse(pool, domain, number % 5, number // 5 % 4)
            for domain, pool in enumerate(POOLS[: 1 + number % 2])
        )
        self.fleets.see(
            node,
            epoch=self.epochs[node],
            now=self.now,
            rack=f"r{number % 2}",
            slots=uses if number % 7 else (),
            load=LoadVector(cpu=number / 100, network=number % 10 / 10),
            queued=number % 4,
            beat_age_s=0.02 * (number % 4),
        )

    def _take(self, node: str, number: int) -> None:
        request = PlacementRequest(POOLS[number % 2], home_node=node, home_domain=0)
        slot = place(self.fleet, request, self.rng).slot
        if slot is not None:
            assert slot.taken < slot.total
            assert why_not(slot, spec_of(self.fleet, slot)) == ""
            self.fleet.took(slot, self.now)
            self.held.append(slot)

    def _give(self, node: str, number: int) -> None:
        if self.held:
            slot = self.held.pop(number % len(self.held))
            if number % 5:
                self.fleet.gave_back(slot, self.now)
            else:
                self.fleet.disowned(slot)
        else:
            offers = self.fleet.offers("chat")
            for slots in list(offers.nodes.values())[:1] if offers is not None else ():
                self.fleet.adopted(slots[0])
                self.held.append(slots[0])

    def _state(self, node: str, number: int) -> None:
        epoch = self.epochs[node]
        if number % 4 == 0:
            self.fleet.removed(node, self.now)
        elif number % 4 == 1:
            verdict = Verdict(rack="r0", rack_epoch=1, node=node, node_epoch=epoch, state="cut")
            self.fleet.verdict(verdict, self.now)
        elif number % 4 == 2:
            self.fleet.lost(LostNode(node=node, epoch=epoch), self.now)
        else:
            self.fleets.see(node, epoch=epoch, now=self.now, state="suspect")

    def _tell(self, node: str, number: int) -> None:
        if number % 3 == 0:
            self.fleet.set_pools(SPECS[number % len(SPECS)])
        elif number % 3 == 1:
            self.fleet.set_drains({node: Drain(node=node)} if number % 2 else {})
        elif self.held:
            self.fleet.refused(self.held[number % len(self.held)], self.now)
        self.fleet.tick(self.now)


def spec_of(fleet: Fleet, slot: Slot) -> PoolSpec | None:
    offers = fleet.offers(slot.pool)
    return offers.spec if offers is not None else None


def check(fleet: Fleet, held: list[Slot]) -> None:
    """Recompute all that the arrays say, slot by slot, and compare."""
    for pool in POOLS:
        offers = fleet.offers(pool)
        if offers is None:
            continue
        slots = [slot for each in offers.nodes.values() for slot in each]
        for slot in slots:
            check_slot(fleet, offers, slot)
            assert slot.own == sum(other is slot for other in held)
        open_now = [slot for slot in slots if slot.position != NOWHERE]
        assert sorted(map(id, offers.open)) == sorted(map(id, open_now))
        assert offers.count == len(open_now)
        assert [offers.open[slot.position] for slot in open_now] == open_now
        eligible = [slot for slot in slots if slot.total and not why_not(slot, offers.spec)]
        assert offers.eligible == len(eligible)
        racks: dict[str, int] = {}
        for slot in open_now:
            racks[slot.node.rack] = racks.get(slot.node.rack, 0) + 1
        assert sorted(offers.racks.values()) == sorted(racks.values())
        check_preemptable(fleet, offers, slots)


def check_preemptable(fleet: Fleet, offers: Offers, slots: list[Slot]) -> None:
    """Asked after every step, so that an answer is remembered whenever it may be."""
    free = any(slot.position != NOWHERE and slot.node.worst < HOME_LIMIT for slot in slots)
    usable = [
        slot
        for slot in slots
        if slot.total
        and why_not(slot, offers.spec) in ("", slot.node.held.get((slot.pool, slot.domain)))
        and any(other.own and is_batch(fleet, other) for other in slot.node.slots.values())
    ]
    if free or (slots and is_batch(fleet, slots[0])):
        usable = []
    held = [slot for slot in usable if (slot.pool, slot.domain) in slot.node.held]
    for seed in range(3):
        found = fleet.preemptable(offers.pool, Random(seed))
        assert found in (held or usable) if usable else found is None


def is_batch(fleet: Fleet, slot: Slot) -> bool:
    spec = spec_of(fleet, slot)
    return spec is not None and spec.pool_class == "batch"


def check_slot(fleet: Fleet, offers: Offers, slot: Slot) -> None:
    columns, nodes, node = slot.columns, slot.node.columns, slot.node
    row = slot.row
    assert offers.handles[row] is slot
    used, pending = int(columns.used[row]), int(columns.pending[row])
    assert slot.taken == max(used + pending, slot.own) >= 0
    assert slot.own >= 0
    assert pending == sum(s is slot for _, s in node.takes) - sum(s is slot for _, s in node.gives)
    is_open = slot.total > slot.taken and not why_not(slot, offers.spec)
    assert is_open == (slot.position != NOWHERE), (slot.node.name, why_not(slot, offers.spec))
    on_node = sum(other.taken for other in node.slots.values())
    places = sum(other.total for other in node.slots.values())
    assert (nodes.taken[node.row], nodes.places[node.row]) == (on_node, places)
    for pool_class, kind in (("online", "mixed"), ("batch", "tool")):
        factor = class_factor(pool_class)
        expected = (
            load_cost(node.load, pool_class, kind)
            + crowd_cost(on_node, places) * factor
            + place_cost(slot.taken, slot.total, node.queued)
        )
        found = slot_cost(nodes, columns, row, kind_row(kind), factor)
        assert found == pytest.approx(expected)
        together = slot_costs(nodes, columns, np.array([row]), kind_row(kind), factor)
        assert together[0] == pytest.approx(found)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 99)), max_size=60))
def test_arrays_say_what_a_naive_count_says_after_any_story(story: list[tuple[int, int]]) -> None:
    told = Story()
    for node in range(3):
        told.step(0, node + 4)
    for what, number in story:
        told.step(what, number)
        told.held = [slot for slot in told.held if slot.row >= 0]
        check(told.fleet, told.held)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_samples_drawn_in_advance_obey_the_rules_of_one(seed: int, uneven: bool) -> None:
    fleets = FleetDriver(nodes=0)
    rng = Random(seed)
    for index in range(150):
        places = 3 + (20 * (index % 2) if uneven else 0)
        fleets.join(f"n{index}", rack=f"r{index % 11}", slots=places)
        cpu = 0.9 * rng.random()
        fleets.see(f"n{index}", rack=f"r{index % 11}", load=LoadVector(cpu=cpu))
    taken: dict[str, int] = {}
    for turn in range(300):
        slot = place(fleets.fleet, PlacementRequest("chat"), rng).slot
        assert slot is not None
        assert slot.taken < slot.total
        fleets.fleet.took(slot, float(turn))
        taken[slot.node.name] = taken.get(slot.node.name, 0) + 1
        if turn % 50 == 49:
            fleets.fleet.removed(f"n{turn}", float(turn))
    offers = fleets.fleet.offers("chat")
    assert offers is not None
    (deck,) = offers.decks.values()
    assert all(cost < np.inf for cost in deck.costs)
    assert max(deck.compared) <= 8
    assert len(taken) > 60, "no slot draws all tasks"
