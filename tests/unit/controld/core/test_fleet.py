"""What a controld learns of nodes, and what it concludes."""

from __future__ import annotations

from random import Random

from controld.core.eligibility import Slot
from controld.core.fleet import Gone, Stuck
from controld.core.placement import PlacementRequest, place
from corefleet.messages.records import LostNode, PoolSpec
from corefleet.messages.wire import LoadVector, SlotUse, SlowTask, Verdict
from tests.unit.controld.core.driving import FleetDriver, registration


def slot_of(fleets: FleetDriver, node: str = "n0") -> Slot:
    offers = fleets.fleet.offers("chat")
    assert offers is not None
    return offers.nodes[node][0]


def is_open(fleets: FleetDriver, node: str = "n0") -> bool:
    offers = fleets.fleet.offers("chat")
    return offers is not None and any(slot.node.name == node for slot in offers.open)


def verdict(state: str, epoch: int = 1, rack_epoch: int = 1) -> Verdict:
    return Verdict(
        rack="rack0",
        rack_epoch=rack_epoch,
        node="n0",
        node_epoch=epoch,
        state=state,  # type: ignore[arg-type]
        reason="silent",
    )


def test_a_node_takes_tasks_once_a_digest_shows_it_ready() -> None:
    fleets = FleetDriver(nodes=0)
    fleets.fleet.registered(registration("n0"), 0.0)
    assert not is_open(fleets)
    assert fleets.see("n0").capacity
    assert is_open(fleets)


def test_a_new_epoch_ends_the_attempts_of_older_ones() -> None:
    fleets = FleetDriver(nodes=1)
    delta = fleets.fleet.registered(registration("n0", epoch=2), 0.0)
    assert delta.gone == [Gone("n0", 1, "node started anew (epoch 2)")]
    assert fleets.fleet.is_gone("n0", 1)
    assert not fleets.fleet.is_gone("n0", 2)
    assert not is_open(fleets), "not before a digest shows the new epoch"
    fleets.see("n0", epoch=2)
    assert is_open(fleets)


def test_an_older_registration_and_an_older_epochs_digest_are_ignored() -> None:
    fleets = FleetDriver(nodes=0)
    fleets.join("n0", epoch=3)
    assert fleets.fleet.registered(registration("n0", epoch=2), 0.0).gone == []
    fleets.see("n0", epoch=2, state="lost")
    assert is_open(fleets)


def test_rule_8_a_verdict_is_a_level_it_holds_whenever_and_however_it_is_heard() -> None:
    for hear in ("push", "store", "digest"):
        fleets = FleetDriver(nodes=2)
        if hear == "push":
            delta = fleets.fleet.verdict(verdict("lost"), 0.0)
        elif hear == "store":
            delta = fleets.fleet.lost(LostNode(node="n0", epoch=1, reason="silent"), 0.0)
        else:
            delta = fleets.see("n0", state="lost")
        assert [(gone.node, gone.node_epoch) for gone in delta.gone] == [("n0", 1)], hear
        assert fleets.fleet.is_gone("n0", 1)
        assert not is_open(fleets)
        assert fleets.fleet.verdict(verdict("lost"), 0.0).gone == [], "once"
        fleets.see("n0")
        assert not is_open(fleets), "beats of a lost epoch do not revive it"
        fleets.join("n0", epoch=2)
        assert is_open(fleets)
        assert not fleets.fleet.is_gone("n0", 2)


def test_rule_8_a_verdict_seen_before_the_registration_holds_for_it() -> None:
    fleets = FleetDriver(nodes=0)
    fleets.fleet.lost(LostNode(node="n0", epoch=4), 0.0)
    assert fleets.fleet.is_gone("n0", 4)
    delta = fleets.fleet.registered(registration("n0", epoch=4), 0.0)
    assert [gone.node_epoch for gone in delta.gone] == [3, 4]
    assert fleets.fleet.registered(registration("n0", epoch=5), 0.0).gone[0].node_epoch == 4


def test_a_cut_node_loses_its_attempts_but_may_come_back_at_the_same_epoch() -> None:
    fleets = FleetDriver(nodes=1)
    assert fleets.fleet.verdict(verdict("cut"), 0.0).gone == [Gone("n0", 1, "silent")]
    assert fleets.fleet.is_gone("n0", 1)
    assert not is_open(fleets)
    assert fleets.see("n0", state="cut").gone == []
    fleets.see("n0")
    assert not fleets.fleet.is_gone("n0", 1)
    assert is_open(fleets)


def test_older_rack_owners_and_overtaken_digests_are_ignored() -> None:
    fleets = FleetDriver(nodes=1)
    fleets.see("n0", rack_epoch=5)
    fleets.see("n0", rack_epoch=4, state="suspect")
    assert is_open(fleets)
    assert fleets.fleet.verdict(verdict("lost", rack_epoch=4), 0.0).gone == []
    fleets.number = 0
    fleets.see("n0", rack_epoch=5, state="suspect")
    assert is_open(fleets), "a digest with a lower number was overtaken"


def test_suspect_and_draining_nodes_get_nothing_new_but_keep_what_they_have() -> None:
    fleets = FleetDriver(nodes=1)
    for state in ("suspect", "draining"):
        assert fleets.see("n0", state=state).gone == []
        assert not is_open(fleets)
        assert not fleets.fleet.is_gone("n0", 1)
        fleets.see("n0")
    fleets.fleet.registered(registration("n0", draining=True), 0.0)
    assert not is_open(fleets)
    assert fleets.fleet.nodes()[0].state == "draining"
    assert fleets.fleet.registered(registration("n0"), 0.0).capacity


def test_a_removed_node_is_gone_at_any_epoch() -> None:
    fleets = FleetDriver(nodes=2)
    assert fleets.fleet.removed("n0", 0.0).gone[0].node_epoch > 10**9
    assert not is_open(fleets)
    assert not fleets.fleet.knows("n0")
    assert fleets.fleet.removed("n0", 0.0).gone == []


def test_own_placements_count_until_a_beat_can_show_them() -> None:
    fleets = FleetDriver(nodes=1, slots=4)
    slot = slot_of(fleets)
    fleets.see("n0", now=10.0, slots=(SlotUse("chat", 0, 4, 1),))
    fleets.fleet.took(slot, 10.1)
    fleets.fleet.took(slot, 10.2)
    assert slot.taken == 3
    fleets.see("n0", now=10.3, beat_age_s=0.12, slots=(SlotUse("chat", 0, 4, 2),))
    assert slot.taken == 3, "the beat of 10.18 shows the first, not yet the second"
    fleets.see("n0", now=10.5, beat_age_s=0.0, slots=(SlotUse("chat", 0, 4, 3),))
    assert slot.taken == 3


def test_ended_attempts_free_their_place_before_a_beat_shows_it() -> None:
    fleets = FleetDriver(nodes=1, slots=2)
    slot = slot_of(fleets)
    for now in (1.0, 1.1):
        fleets.fleet.took(slot, now)
    fleets.see("n0", now=2.0, slots=(SlotUse("chat", 0, 2, 2),))
    assert not is_open(fleets)
    fleets.fleet.gave_back(slot, 2.1)
    assert is_open(fleets)
    fleets.see("n0", now=2.2, beat_age_s=0.15, slots=(SlotUse("chat", 0, 2, 2),))
    assert slot.taken == 1, "the beat is older than the end"


def test_own_attempts_are_never_fewer_than_we_know() -> None:
    fleets = FleetDriver(nodes=1, slots=4)
    slot = slot_of(fleets)
    fleets.fleet.adopted(slot)
    fleets.fleet.adopted(slot)
    fleets.see("n0", now=5.0, slots=(SlotUse("chat", 0, 4, 0),))
    assert slot.taken == 2
    fleets.fleet.disowned(slot)
    assert slot.taken == 1


def test_a_full_node_that_frees_a_place_is_capacity() -> None:
    fleets = FleetDriver(nodes=1)
    fleets.see("n0", slots=(SlotUse("chat", 0, 2, 2),))
    assert not fleets.see("n0", slots=(SlotUse("chat", 0, 2, 2),)).capacity
    assert fleets.see("n0", slots=(SlotUse("chat", 0, 2, 1),)).capacity


def test_pools_that_a_beat_no_longer_offers_have_no_places() -> None:
    fleets = FleetDriver(nodes=1)
    fleets.see("n0", slots=(SlotUse("crunch", 0, 2, 0),))
    assert not is_open(fleets)
    fleets.see("n0", slots=(SlotUse("crunch", 0, 2, 0), SlotUse("chat", 0, 2, 0)))
    assert is_open(fleets)


def test_slow_tasks_are_passed_on() -> None:
    fleets = FleetDriver(nodes=1)
    delta = fleets.see("n0", slow=(SlowTask("t1", 2, 31.5),))
    assert delta.stuck == [Stuck("n0", "t1", 2, 31.5)]


def test_loads_are_smoothed() -> None:
    fleets = FleetDriver(nodes=1)
    fleets.see("n0", load=LoadVector(cpu=0.8))
    assert slot_of(fleets).node.load.cpu == 0.4
    fleets.see("n0", load=LoadVector(cpu=0.8))
    assert slot_of(fleets).node.load.cpu == 0.6000000000000001


def test_cool_downs_grow_with_refusals_in_a_row_and_end_by_themselves() -> None:
    fleets = FleetDriver(nodes=1)
    slot = slot_of(fleets)
    fleets.fleet.refused(slot, 10.0)
    assert not is_open(fleets)
    assert not fleets.fleet.tick(10.09).capacity
    assert fleets.fleet.tick(10.11).capacity
    assert is_open(fleets)
    fleets.fleet.refused(slot, 11.0)
    fleets.fleet.tick(11.11)
    assert not is_open(fleets)
    fleets.fleet.tick(11.21)
    assert is_open(fleets)
    fleets.fleet.accepted(slot)
    fleets.fleet.refused(slot, 12.0)
    fleets.fleet.tick(12.11)
    assert is_open(fleets)


def test_pool_changes_change_who_is_eligible() -> None:
    fleets = FleetDriver(nodes=1)
    fleets.fleet.set_pools({"chat": PoolSpec(name="chat", labels={"zone": "a"})})
    assert not is_open(fleets)
    delta = fleets.fleet.registered(registration("n0", labels={"zone": "a"}), 0.0)
    assert delta.capacity
    assert is_open(fleets)
    assert not fleets.fleet.set_pools({"chat": PoolSpec(name="chat")}).capacity


def test_shards_take_places_in_the_order_in_which_they_asked() -> None:
    fleets = FleetDriver(nodes=1, slots=1)
    fleet = fleets.fleet
    slot = slot_of(fleets)
    fleet.took(slot, 0.0)
    for shard in (5, 3, 9):
        fleet.wait("chat", shard)
    assert fleet.woken() == []
    fleet.gave_back(slot, 1.0)
    assert not fleet.turn("chat", 7), "it must stand in line behind the others"
    served = []
    while woken := fleet.woken():
        for shard in woken:
            assert fleet.turn("chat", shard)
            decision = place(fleet, PlacementRequest("chat"), Random(0))
            if decision.slot is None:
                fleet.wait("chat", shard)
            else:
                fleet.took(decision.slot, 1.0)
                served.append(shard)
                fleet.gave_back(decision.slot, 1.0)
    assert served == [5, 3, 9, 7]


def test_a_shard_that_left_holds_nobody_up() -> None:
    fleets = FleetDriver(nodes=1, slots=1)
    fleets.fleet.wait("chat", 5)
    fleets.fleet.forget_shard(5)
    assert fleets.fleet.woken() == []
    assert fleets.fleet.turn("chat", 6)


def test_nodes_are_listed_with_what_is_known_of_them() -> None:
    fleets = FleetDriver(nodes=1)
    fleets.see("n0", slots=(SlotUse("chat", 0, 3, 1),), running=1, beat_age_s=0.2)
    (status,) = fleets.fleet.nodes()
    assert (status.registration.node, status.state, status.running) == ("n0", "ready", 1)
    assert SlotUse("chat", 0, 3, 1) in status.slots
    assert status.beat_age_s == 0.2


def test_an_agentd_that_started_anew_within_its_epoch_is_told_apart() -> None:
    fleets = FleetDriver(nodes=0)
    first = registration("n0", started_ms=1)
    assert fleets.fleet.registered(first, 0.0).resumed == []
    assert fleets.fleet.registered(first, 0.0).resumed == []
    delta = fleets.fleet.registered(registration("n0", started_ms=2), 0.0)
    assert (delta.resumed, delta.gone) == (["n0"], [])
