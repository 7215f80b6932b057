"""Placement: barriers, affinity, sampling, explanations."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from controld.core.fleet import Fleet
from controld.core.placement import PlacementRequest, explain, place
from controld.core.score import HOME_LIMIT, barrier, load_cost
from corefleet.messages.records import DomainInfo, PoolSpec
from corefleet.messages.wire import LoadVector, SlotUse
from tests.unit.controld.core.driving import FleetDriver

CHAT = PlacementRequest("chat")


def node_of(fleet: Fleet, request: PlacementRequest = CHAT, seed: int = 0) -> str:
    slot = place(fleet, request, Random(seed)).slot
    assert slot is not None
    return slot.node.name


def spread(fleet: Fleet, request: PlacementRequest, times: int = 400) -> Counter[str]:
    rng = Random(3)
    counts: Counter[str] = Counter()
    for _ in range(times):
        slot = place(fleet, request, rng).slot
        assert slot is not None
        counts[slot.node.name] += 1
    return counts


def test_the_barrier_grows_without_bound_and_is_about_linear_when_idle() -> None:
    assert barrier(0.0) == 0.0
    assert barrier(0.1) == pytest.approx(0.111, abs=0.001)
    assert barrier(0.5) == 1.0
    assert barrier(0.99) > 90
    assert barrier(1.7) == barrier(1.0) > 900


def test_one_full_resource_repels_however_idle_the_others_are() -> None:
    full_bus = LoadVector(cpu=0.4, memory_bandwidth=0.98)
    busy = LoadVector(cpu=0.8, memory_bandwidth=0.8, memory=0.8, network=0.8, storage=0.8)
    assert load_cost(full_bus, "online", "compute") > load_cost(busy, "online", "compute")


def test_the_kind_shifts_the_weights_and_batch_shies_away_sooner() -> None:
    disk = LoadVector(storage=0.8)
    assert load_cost(disk, "online", "retrieval") > load_cost(disk, "online", "compute")
    assert load_cost(disk, "batch", "retrieval") > load_cost(disk, "online", "retrieval")
    assert load_cost(disk, "online", "unheard") == load_cost(disk, "online", "mixed")


def test_no_node_and_no_place_are_told_apart() -> None:
    fleets = FleetDriver(nodes=0)
    assert place(fleets.fleet, CHAT, Random(0)).why == "no node offers pool chat"
    fleets.join("n0", slots=1)
    fleets.see("n0", slots=(SlotUse("chat", 0, 1, 1),))
    why = place(fleets.fleet, CHAT, Random(0)).why
    assert why == "all 1 eligible place (node and domain) are full"
    fleets.see("n0", state="suspect")
    why = place(fleets.fleet, CHAT, Random(0)).why
    assert why == "no node can take pool chat now: 1 suspect"


def test_the_less_loaded_of_two_nodes_wins() -> None:
    fleets = FleetDriver(nodes=2, slots=8)
    for _ in range(6):
        fleets.see("n0", load=LoadVector(cpu=0.9))
    assert spread(fleets.fleet, CHAT) == {"n1": 400}


def test_taken_places_count_as_load() -> None:
    fleets = FleetDriver(nodes=2, slots=8)
    fleets.see("n0", slots=(SlotUse("chat", 0, 8, 6),))
    assert node_of(fleets.fleet) == "n1"


def test_queued_work_at_a_node_counts_as_load() -> None:
    fleets = FleetDriver(nodes=2, slots=8)
    fleets.see("n0", queued=5)
    assert node_of(fleets.fleet) == "n1"


def home(cost: float = 1.0, avoid: str = "") -> PlacementRequest:
    return PlacementRequest("chat", home_node="n0", home_domain=0, move_cost=cost, avoid=avoid)


def test_home_wins_unless_it_is_too_busy_for_what_moving_costs() -> None:
    fleets = FleetDriver(nodes=2, slots=8)
    for _ in range(8):
        fleets.see("n0", load=LoadVector(cpu=0.6))
    assert node_of(fleets.fleet, home(cost=2.0)) == "n0"
    assert node_of(fleets.fleet, home(cost=0.1)) == "n1"


def test_the_bonus_is_bounded_and_never_keeps_a_task_on_a_home_above_its_limit() -> None:
    fleets = FleetDriver(nodes=2, slots=8)
    for _ in range(12):
        fleets.see("n0", load=LoadVector(cpu=0.88))
    assert node_of(fleets.fleet, home(cost=1e9)) == "n1", "5.9 is more than the bonus can be"
    for _ in range(12):
        fleets.see("n0", load=LoadVector(network=HOME_LIMIT + 0.02))
    assert node_of(fleets.fleet, home(cost=4.0)) == "n1"


def test_a_home_that_is_full_draining_or_avoided_is_no_home() -> None:
    fleets = FleetDriver(nodes=2, slots=2)
    assert node_of(fleets.fleet, home(avoid="n0")) == "n1"
    fleets.see("n0", slots=(SlotUse("chat", 0, 2, 2),))
    assert node_of(fleets.fleet, home()) == "n1"
    fleets.see("n0", slots=(SlotUse("chat", 0, 2, 0),), state="draining")
    assert node_of(fleets.fleet, home()) == "n1"


def test_the_home_domain_counts_more_than_its_neighbour() -> None:
    fleets = FleetDriver(nodes=0)
    domains = tuple(DomainInfo(domain=d, cpus="0", slots={"chat": 4}) for d in (0, 1))
    fleets.join("n0", domains=domains)
    request = PlacementRequest("chat", home_node="n0", home_domain=1)
    slot = place(fleets.fleet, request, Random(0)).slot
    assert slot is not None
    assert slot.domain == 1


def test_an_avoided_node_is_taken_when_there_is_no_other() -> None:
    fleets = FleetDriver(nodes=1)
    assert node_of(fleets.fleet, PlacementRequest("chat", avoid="n0")) == "n0"


def test_equal_nodes_share_the_tasks() -> None:
    counts = spread(FleetDriver(nodes=10, slots=1000).fleet, CHAT)
    assert len(counts) == 10
    assert max(counts.values()) < 2.5 * min(counts.values())


def test_the_emptiest_node_does_not_draw_all_tasks_of_owners_that_see_the_same() -> None:
    fleets = FleetDriver(nodes=0)
    for index in range(20):
        fleets.join(f"n{index}", slots=1000)
        for _ in range(8):
            fleets.see(f"n{index}", load=LoadVector(cpu=0.3 + 0.02 * index))
    counts = spread(fleets.fleet, CHAT)
    assert counts["n0"] < 200
    assert sum(counts[f"n{index}"] for index in range(10)) > 300, "the idler half is preferred"


def test_a_sample_is_spread_over_racks() -> None:
    fleets = FleetDriver(nodes=0, sample_size=8)
    for index in range(40):
        fleets.join(f"big{index}", rack="big", slots=8)
    for rack in range(8):
        fleets.join(f"small{rack}", rack=f"r{rack}", slots=8)
    counts = spread(fleets.fleet, CHAT, 600)
    small = sum(count for name, count in counts.items() if name.startswith("small"))
    assert small > 200, "8 of 48 nodes, but 8 of 9 racks"


class CountingRng(Random):
    """Counts its draws."""

    draws = 0

    def random(self) -> float:
        self.draws += 1
        return super().random()


def test_no_decision_looks_at_all_nodes() -> None:
    few, many = (FleetDriver(nodes=nodes, sample_size=8) for nodes in (40, 300))
    rng = CountingRng(1)
    for _ in range(5):
        place(few.fleet, CHAT, rng)
    assert rng.draws <= 5 * 4 * 8, "three tries and a blur for each of eight"
    offers = many.fleet.offers("chat")
    assert offers is not None
    for _ in range(20):
        place(many.fleet, CHAT, rng)
    (deck,) = offers.decks.values()
    assert max(deck.compared) <= 8


def test_labels_and_models_must_fit() -> None:
    fleets = FleetDriver(nodes=0)
    fleets.fleet.set_pools({"chat": PoolSpec(name="chat", labels={"disk": "nvme"}, model="qwen")})
    fleets.join("plain")
    fleets.join("nvme", labels={"disk": "nvme"}, models=("other",))
    assert place(fleets.fleet, CHAT, Random(0)).slot is None
    lines = {line.node: line.line for line in explain(fleets.fleet, CHAT)}
    assert lines == {
        "plain": "label disk is not set, the pool wants 'nvme'",
        "nvme": "model qwen is not there",
    }
    fleets.join("fit", labels={"disk": "nvme"}, models=("qwen",))
    assert node_of(fleets.fleet) == "fit"


def test_explain_has_a_line_for_each_candidate_best_first() -> None:
    fleets = FleetDriver(nodes=4, slots=4)
    for _ in range(8):
        fleets.see("n1", load=LoadVector(cpu=0.5))
    fleets.see("n2", slots=(SlotUse("chat", 0, 4, 4),))
    fleets.see("n3", state="cut")
    lines = explain(fleets.fleet, home())
    assert [line.node for line in lines[:2]] == ["n0", "n1"]
    assert lines[0].line.endswith("home, bonus 1.00")
    assert lines[0].score == pytest.approx(-1.0)
    assert "cpu 50%" in lines[1].line
    assert {line.node: line.line for line in lines if not line.eligible} == {
        "n2": "full: 4 of 4 taken",
        "n3": "cut",
    }


def test_explain_is_bounded() -> None:
    assert len(explain(FleetDriver(nodes=100).fleet, CHAT, limit=10)) == 10


def test_explain_agrees_with_place() -> None:
    fleets = FleetDriver(nodes=2, slots=8)
    rng = Random(5)
    for _ in range(50):
        for node in ("n0", "n1"):
            fleets.see(node, load=LoadVector(cpu=rng.random() * 0.9, memory=rng.random() * 0.9))
        lines = explain(fleets.fleet, CHAT)
        if lines[1].score > 1.2 * lines[0].score:
            assert node_of(fleets.fleet) == lines[0].node
