"""What a controld counts: homes kept and left, places by pool, balance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controld.core.affinity import affinity
from controld.core.fleet import Fleet
from controld.core.overview import FleetTally, Places, Tallies
from corefleet.messages.records import (
    DomainInfo,
    NodeRegistration,
    PastAttempt,
    PoolSpec,
    TaskRecord,
)
from corefleet.messages.wire import LoadVector, NodeView, RackDigest, SlotUse
from corefleet.metrics import LATENCY_BUCKETS_S


def fleet_of(*views: NodeView, total: int = 4) -> Fleet:
    """Return a fleet of nodes that offer `total` places of pool p, as `views` show them."""
    fleet = Fleet()
    fleet.set_pools({"p": PoolSpec(name="p")})
    for view in views:
        domains = (DomainInfo(domain=0, cpus="0-3", slots={"p": total}),)
        fleet.registered(NodeRegistration(node=view.node, epoch=1, domains=domains), 0.0)
    fleet.digest(RackDigest(rack="rack0", controld="c1", epoch=1, number=1, nodes=views), 1.0)
    return fleet


def view(node: str, used: int, total: int = 4, **fields: object) -> NodeView:
    return NodeView(node=node, epoch=1, slots=(SlotUse("p", 0, total, used),), **fields)  # type: ignore[arg-type]


def placed(node: str, left: str = "") -> TaskRecord:
    past = (PastAttempt(1, left, "lost: gone"),) if left else ()
    return TaskRecord(
        task="0-x", pool="p", session="s", request_id="r", input="", state="placed",
        node=node, past=past,
    )  # fmt: skip


def test_a_placement_keeps_or_leaves_the_home_of_its_session() -> None:
    busy = LoadVector(cpu=1.0)
    fleet = fleet_of(view("n1", 0), view("n2", 4), view("n3", 0, load=busy), view("n4", 0))
    for number in range(2, 9):
        fleet.digest(
            RackDigest(
                rack="rack0", controld="c1", epoch=1, number=number,
                nodes=(view("n3", 0, load=LoadVector(cpu=1.0, storage=number / 100)),),
            ),
            float(number),
        )  # fmt: skip
    offers = fleet.offers("p")
    assert affinity(offers, "", placed("n1")) == "new"
    assert affinity(offers, "n1", placed("n1")) == "hit"
    assert affinity(offers, "n1", placed("n4")) == "moved"
    assert affinity(offers, "n2", placed("n1")) == "missed", "full"
    assert affinity(offers, "n3", placed("n1")) == "missed", "above its limit"
    assert affinity(offers, "n9", placed("n1")) == "missed", "gone"
    assert affinity(offers, "n1", placed("n4", left="n1")) == "missed", "just left"
    assert affinity(None, "n1", placed("n4")) == "missed"


def test_tallies_tell_what_stands_and_what_was_counted() -> None:
    tallies = Tallies()
    tallies.of("p").count_placed("hit", 0.0015)
    tallies.of("p").count_placed("missed", None)
    tallies.of("p").count_left("lost")
    tallies.of("p").count_placed("new", LATENCY_BUCKETS_S[-1] + 1)
    asleep, counts = tallies.counts({"p": 3, "asleep": 1}, {"p": 2})
    assert (asleep.pool, asleep.queued, asleep.placed) == ("asleep", 1, 0)
    assert (counts.queued, counts.in_flight, counts.placed) == (3, 2, 3)
    assert counts.home == {"hit": 1, "missed": 1, "new": 1}
    assert counts.requeued == {"lost": 1}
    assert len(counts.waits) == len(LATENCY_BUCKETS_S) + 1
    assert (sum(counts.waits), counts.waits[-1]) == (2, 1)
    assert counts.waits[LATENCY_BUCKETS_S.index(0.002)] == 1, "as Prometheus' `le`"


def test_nodes_that_do_not_serve_are_counted_but_their_places_are_not() -> None:
    fleet = fleet_of(view("n1", 1), view("n2", 3), view("n3", 4, state="cut"))
    tally = FleetTally()
    tally.add(fleet.all_nodes())
    assert tally.states == {"ready": 2, "cut": 1}
    assert (tally.places.used, tally.places.total) == (4, 8)
    assert tally.pools["p"].nodes == 2
    assert tally.places.balance == pytest.approx(0.5), "shares 1/4 and 3/4: deviation over mean"


def test_balance_is_relative_to_capacity() -> None:
    places = Places()
    places.add(4, 16)
    places.add(1, 4)
    assert places.balance == 0.0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1))
def test_balance_is_the_coefficient_of_variation(nodes: list[tuple[int, int]]) -> None:
    places = Places()
    for used, total in nodes:
        places.add(min(used, total), total)
    shares = [min(used, total) / total for used, total in nodes]
    mean = sum(shares) / len(shares)
    deviation = (sum((share - mean) ** 2 for share in shares) / len(shares)) ** 0.5
    assert places.balance == pytest.approx(deviation / mean if mean else 0.0, abs=1e-5)
