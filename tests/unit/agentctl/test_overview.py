"""What `agentctl top` makes of the counts of controlds."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from agentctl.overview import Rates, quantile
from agentctl.screen import MOST_CONTROLDS, screen
from corefleet.rpc import fleet_pb2

BOUNDS = (0.1, 1.0, 10.0)


def counts(pool: str = "p", **fields: Any) -> fleet_pb2.PoolCounts:
    return fleet_pb2.PoolCounts(pool=pool, **fields)


def controld(name: str, at_ms: int, *pools: fleet_pb2.PoolCounts, **fields: Any) -> Any:
    given = {"answered": True, "started_ms": 5, "shards": 8, **fields}
    return fleet_pb2.ControldOverview(controld=name, at_ms=at_ms, pools=pools, **given)


def reply(*controlds: Any) -> fleet_pb2.OverviewReply:
    nodes = fleet_pb2.NodesOverview(
        states={"ready": 2, "lost": 1}, slots_used=3, slots_total=16, balance=0.25,
        pools=[fleet_pb2.PoolPlaces(pool="p", nodes=2, slots_used=3, slots_total=16)],
    )  # fmt: skip
    return fleet_pb2.OverviewReply(
        controld="c1", at_ms=9_000, nodes=nodes, controlds=controlds, wait_bounds_s=BOUNDS
    )


def shown(view: dict[str, Any]) -> str:
    out = io.StringIO()
    Console(file=out, width=240).print(screen(view))
    return out.getvalue()


def test_counts_are_summed_over_controlds_and_rates_follow_each_ones_own_clock() -> None:
    rates = Rates()
    first = rates.view(
        reply(
            controld("c1", 1_000, counts(placed=10)),
            controld("c2", 2_000, counts(placed=100)),
        )
    )
    assert first["pools"][0]["placed_per_s"] is None
    assert first["interval_s"] is None
    view = rates.view(
        reply(
            controld(
                "c1", 3_000,
                counts(
                    placed=30, finished=8, queued=5, home={"hit": 3, "moved": 1, "new": 9},
                    requeued={"lost": 4, "refused": 2}, waits=[0, 10, 0, 0],
                ),
                cpu_s=0.5,
            ),
            controld("c2", 3_000, counts(placed=150, queued=7, in_flight=2)),
        )
    )  # fmt: skip
    pool = view["pools"][0]
    assert (pool["queued"], pool["in_flight"], pool["slots_total"]) == (12, 2, 16)
    assert pool["placed_per_s"] == pytest.approx(20 / 2 + 50 / 1)
    assert pool["requeued_per_s"] == {"lost": 2.0, "refused": 1.0}
    assert pool["refused_per_s"] == 1.0
    assert pool["home_share"] == 0.75
    assert pool["wait_p50_s"] == pytest.approx(0.55)
    assert pool["since_start"]["placed"] == 180
    assert view["total"]["queued"] == 12
    assert view["controlds"]["list"][0]["cpu"] == 0.25
    json.dumps(view)
    text = shown(view)
    assert "lost 2.0, refused 1.0" in text
    assert "75%" in text


def test_a_restarted_controld_and_a_silent_one_make_no_rates() -> None:
    rates = Rates()
    rates.view(reply(controld("c1", 1_000, counts(placed=500)), controld("c2", 1_000)))
    silent = fleet_pb2.ControldOverview(controld="c2")
    view = rates.view(reply(controld("c1", 2_000, counts(placed=3), started_ms=1_500), silent))
    assert view["pools"][0]["placed_per_s"] is None, "never negative, never from another life"
    assert (view["controlds"]["answered"], view["controlds"]["living"]) == (1, 2)
    assert "no answer" in shown(view)
    back = rates.view(
        reply(controld("c1", 3_000, counts(placed=5), started_ms=1_500), controld("c2", 3_000))
    )
    assert back["pools"][0]["placed_per_s"] == 2.0


def test_a_pool_that_only_nodes_know_is_shown() -> None:
    view = Rates().view(reply(controld("c1", 1_000)))
    assert [pool["pool"] for pool in view["pools"]] == ["p"]
    assert "3/16" in shown(view)


def test_of_many_controlds_those_that_do_not_answer_come_first() -> None:
    many = [controld(f"c{number}", 1_000) for number in range(100)]
    many.append(fleet_pb2.ControldOverview(controld="gone"))
    text = shown(Rates().view(reply(*many)))
    assert "gone" in text
    assert f"and {101 - MOST_CONTROLDS} more" in text


@pytest.mark.parametrize(
    ("buckets", "share", "value"),
    [
        ([0, 0, 0, 0], 0.5, None),
        ([10, 0, 0, 0], 0.5, 0.05),
        ([0, 10, 0, 0], 1.0, 1.0),
        ([98, 0, 2, 0], 0.99, 5.5),
        ([0, 0, 0, 1], 0.5, 10.0),
    ],
)
def test_quantiles_are_linear_within_a_bucket(
    buckets: list[int], share: float, value: float | None
) -> None:
    assert quantile(buckets, BOUNDS, share) == (pytest.approx(value) if value else None)
