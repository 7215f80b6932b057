"""Many controlds share a quota: late, lost and reordered reports, deaths, and jumping demand."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controld.core.quota_division import Quota
from controld.core.quota_shares import LEASE_S, QuotaShares
from corefleet.messages.records import PoolSpec
from corefleet.messages.wire import QuotaReport
from tests.unit.controld.core.quota_world import POOL, Net, World

SETTLED_S = 6.0
REACTION_S = 3.0


def world(n: int, rate: float, net: Net | None = None, settled_s: float = SETTLED_S) -> World:
    made = World(PoolSpec(name=POOL, rate_per_s=rate), 1, net or Net())
    for number in range(n):
        made.join(f"c{number}")
    made.run(settled_s)
    return made


def most_allowed(rate: float, n: int) -> float:
    """At most 5 % above the rate in any second, and the burst; two tokens each at least."""
    return 1.05 * rate + max(0.1 * rate, 2.0 * n)


@pytest.mark.parametrize(("n", "rate"), [(2, 200.0), (5, 500.0), (20, 1000.0), (20, 200.0)])
def test_all_of_the_quota_is_used_wherever_the_demand_goes_and_no_more(n: int, rate: float) -> None:
    made = world(n, rate)
    few = max(2, n // 4)
    for demand in (
        {"c0": 1.5 * rate},
        {"c1": 1.5 * rate},
        {f"c{at}": 1.5 * rate / few for at in range(few)},
        {"c0": 1.2 * rate, "c1": 0.3 * rate},
    ):
        used_and_no_more(made, rate, demand)
    assert made.most_in_a_second() <= most_allowed(rate, few)


def test_a_hundred_controlds_share_a_quota() -> None:
    made = world(100, 2000.0, settled_s=2.0)
    for demand in ({"c0": 3000.0}, {f"c{at}": 30.0 for at in range(100)}):
        used_and_no_more(made, 2000.0, demand)
    assert made.most_in_a_second() <= most_allowed(2000.0, 100)


def used_and_no_more(made: World, rate: float, demand: dict[str, float]) -> None:
    made.demand(demand)
    begun = made.now
    made.run(REACTION_S + 2.0)
    used = made.let_in(begun + REACTION_S, made.now) / 2.0
    assert 0.98 * rate <= used <= 1.05 * rate, demand


def test_a_reliable_network_moves_the_quota_within_a_second() -> None:
    made = world(10, 500.0, net=Net(delay_s=0.002, loss=0.0, watch_s=0.01))
    made.demand({"c3": 1000.0})
    begun = made.now
    made.run(3.0)
    assert made.let_in(begun + 1.0, begun + 3.0) >= 0.99 * 2 * 500
    assert made.most_in_a_second() <= 1.05 * 500 + 50


def test_the_first_submission_to_an_idle_controld_is_let_in_at_once() -> None:
    made = world(4, 400.0)
    for name in list(made.alive):
        assert made.alive[name].admit(POOL, 1, made.now) is None


def test_a_quota_smaller_than_the_controlds_is_kept_over_time() -> None:
    made = world(20, 10.0)
    made.demand({f"c{at}": 2.0 for at in range(20)})
    made.run(10.0)
    begun = made.now
    made.run(30.0)
    assert 0.9 * 300 <= made.let_in(begun, made.now) <= 1.05 * 300 + 20
    assert made.most_in_a_second() <= most_allowed(10.0, 20)


def test_a_tenant_has_its_own_rate_within_its_pool() -> None:
    made = World(PoolSpec(name=POOL, tenant_rate_per_s=100.0), 1, Net())
    made.tenant = lambda: "acme"
    for number in range(3):
        made.join(f"c{number}")
    made.run(SETTLED_S)
    made.demand({"c0": 150.0, "c1": 150.0})
    begun = made.now
    made.run(REACTION_S + 3.0)
    assert made.let_in(begun + REACTION_S, made.now) == pytest.approx(300, rel=0.03)
    refused = [made.alive["c0"].admit(POOL, 1, made.now, "acme") for _ in range(30)]
    assert refused[-1] is not None
    assert refused[-1].reason == (
        "pool p: tenant acme is over its rate of 100 submissions a second"
    )
    assert made.alive["c0"].admit(POOL, 1, made.now, "") is None


def test_what_a_dead_controld_had_is_kept_until_it_lapsed_and_then_used() -> None:
    made = world(3, 300.0)
    made.demand({"c0": 400.0, "c1": 400.0})
    made.run(5.0)
    died = made.now
    made.die("c0")
    made.run(LEASE_S + REACTION_S)
    begun = made.now
    made.run(3.0)
    assert made.let_in(begun, made.now) >= 0.98 * 900
    assert made.let_in(died, died + 2.0, "c1") <= 1.05 * 300 + 30
    assert made.most_in_a_second() <= 1.05 * 300 + 30


def test_a_change_of_members_takes_nothing_from_who_spends() -> None:
    made = world(8, 400.0, net=Net(delay_s=0.05, loss=0.05, watch_s=0.05))
    made.demand({"c0": 600.0})
    made.run(4.0)
    begun = made.now
    for at in range(1, 6):
        made.die(f"c{at}")
        made.join(f"d{at}")
        made.run(2.0)
    for second in range(10):
        assert made.let_in(begun + second, begun + second + 1) >= 0.95 * 400
    assert made.most_in_a_second() <= 1.05 * 400 + 40


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["join", "die", "jump", "spread", "wait"]),
        st.integers(0, 11),
        st.floats(min_value=0.1, max_value=4.0),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=STEPS,
    seed=st.integers(0, 2**16),
    delay=st.floats(min_value=0.0, max_value=0.3),
    loss=st.floats(min_value=0.0, max_value=0.2),
    first=st.integers(1, 6),
)
def test_the_quota_is_kept_through_deaths_joins_and_jumps(
    steps: list[tuple[str, int, float]], seed: int, delay: float, loss: float, first: int
) -> None:
    rate = 300.0
    made = World(PoolSpec(name=POOL, rate_per_s=rate), seed, Net(delay, loss))
    for number in range(first):
        made.join(f"c{number}")
    made.run(SETTLED_S)
    most = first
    for number, (kind, at, seconds) in enumerate(steps):
        alive = sorted(made.alive)
        chosen = alive[at % len(alive)]
        if kind == "join":
            made.join(f"d{number}")
        elif kind == "die" and len(alive) > 1:
            made.die(chosen)
        elif kind == "jump":
            made.demand({chosen: 2 * rate})
        elif kind == "spread":
            made.demand(dict.fromkeys(alive, 2 * rate / len(alive)))
        most = max(most, len(made.alive))
        made.run(seconds)
    assert made.most_in_a_second() <= most_allowed(rate, most)


def shares(me: str, quota: Quota, *members: str) -> QuotaShares:
    made = QuotaShares(me, 0.0, resolve=lambda name: quota)
    made.set_members(members, 0.0)
    made.set_quotas(["q"], 0.0)
    return made


def test_who_is_alone_has_all_of_it_at_once() -> None:
    assert shares("a", Quota(50.0, 5.0), "a").share("q", 0.0) == 50.0


def test_who_is_no_member_yet_has_nothing() -> None:
    assert shares("a", Quota(50.0, 5.0)).share("q", 0.0) == 0.0


def exchange(parts: list[QuotaShares], start: float, seconds: float) -> float:
    """Run reliable rounds of all parts; return the time of the last."""
    now = start
    while now < start + seconds:
        now += 0.2
        reports = [report for part in parts if (report := part.tick(now)) is not None]
        for report in reports:
            for part in parts:
                part.heard(report, now)
    return now


def test_places_in_flight_follow_what_is_wanted_and_wait_for_what_is_in_use() -> None:
    parts = [shares(name, Quota(10.0, whole=True), "a", "b") for name in ("a", "b")]
    first, second = parts
    first.set_places("q", 20, 0, 0.0)
    now = exchange(parts, 0.0, 4.0)
    assert (first.share("q", now), second.share("q", now)) == (10.0, 0.0)
    first.set_places("q", 20, 10, now)
    second.set_places("q", 20, 0, now)
    now = exchange(parts, now, 2.0)
    assert first.share("q", now) == 5.0
    assert second.share("q", now) == 0.0, "ten are still running at the first"
    first.set_places("q", 20, 7, now)
    now = exchange(parts, now, 2.0)
    assert second.share("q", now) == 3.0
    first.set_places("q", 0, 0, now)
    now = exchange(parts, now, 2.0)
    assert second.share("q", now) == 10.0


def test_a_share_lapses_when_its_holder_is_not_heard_any_more() -> None:
    parts = [shares(name, Quota(100.0, 10.0), "a", "b") for name in ("a", "b")]
    now = exchange(parts, 0.0, 4.0)
    holder, other = sorted(parts, key=lambda part: part.names_held() != ["q"])
    assert other.share("q", now) > 0.0
    assert other.share("q", now + LEASE_S - 1.3) > 0.0
    assert other.share("q", now + LEASE_S) == 0.0
    assert holder.names_held() == ["q"]


def test_who_leaves_gives_back_at_once() -> None:
    parts = [shares(name, Quota(100.0, 10.0), "a", "b") for name in ("a", "b")]
    first, second = sorted(parts, key=lambda part: part.names_held() != ["q"])
    for at in range(200):
        second.want("q", at * 0.02)
    now = exchange(parts, 0.0, 4.0)
    had = second.share("q", now)
    first.heard(second.leave(), now)
    assert had > 0.0
    assert second.share("q", now) == 0.0
    first.set_members([first.me], now)
    for _ in range(400):
        first.want("q", now)
    first.tick(now + 0.2)
    assert first.share("q", now + 0.2) == pytest.approx(100.0, rel=0.02)


def test_an_older_report_that_comes_late_is_ignored() -> None:
    made = shares("a", Quota(100.0, 10.0), "a", "b")
    made.heard(QuotaReport(controld="b", number=5, backlog={"p": 7}), 0.0)
    made.heard(QuotaReport(controld="b", number=4, backlog={"p": 90}), 0.1)
    assert made.backlog("p") == 7


def test_without_quotas_and_limits_nothing_is_reported() -> None:
    made = QuotaShares("a", 0.0)
    made.set_members(["a", "b"], 0.0)
    assert all(made.tick(at * 0.2) is None for at in range(1, 40))
