"""How a quota is divided."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controld.core.quota_division import FLOOR, Quota, divide

NAMES = st.sampled_from([f"c{n}" for n in range(12)])
DEMAND = st.dictionaries(
    NAMES, st.one_of(st.just(0.0), st.floats(min_value=0.05, max_value=1e5)), min_size=1
)
QUOTA = st.builds(
    Quota, st.floats(min_value=0.1, max_value=1e5), st.floats(min_value=1.0, max_value=1e4)
)


@given(QUOTA, DEMAND)
def test_no_division_is_more_than_the_ceiling(quota: Quota, demand: dict[str, float]) -> None:
    shares = divide(quota, demand)
    assert shares.keys() == demand.keys()
    assert min(shares.values()) >= 0.0
    assert sum(shares.values()) <= quota.ceiling * (1 + 1e-9)


@given(QUOTA, DEMAND)
def test_all_of_it_is_divided_when_all_of_it_is_asked_for(
    quota: Quota, demand: dict[str, float]
) -> None:
    if sum(demand.values()) >= quota.amount:
        assert sum(divide(quota, demand).values()) >= quota.amount * (1 - 1e-9)


@given(QUOTA, DEMAND)
def test_nobody_gets_less_than_an_even_part_that_asks_for_it(
    quota: Quota, demand: dict[str, float]
) -> None:
    shares = divide(quota, demand)
    asking = [name for name, wanted in demand.items() if wanted > 0]
    for name in asking:
        assert shares[name] >= min(demand[name], quota.amount / len(asking)) * (1 - 1e-9)


@given(st.integers(1, 40), st.dictionaries(NAMES, st.integers(0, 60).map(float), min_size=1))
def test_places_are_whole_and_never_more_than_there_are(
    places: int, demand: dict[str, float]
) -> None:
    shares = divide(Quota(float(places), whole=True), demand)
    assert all(share == int(share) >= 0 for share in shares.values())
    assert sum(shares.values()) <= places
    if sum(demand.values()) >= places:
        assert sum(shares.values()) == places


def test_one_that_asks_for_all_leaves_the_idle_ones_their_floor() -> None:
    shares = divide(Quota(10_000.0, 1000.0), {"a": 20_000.0, "b": 0.0, "c": 0.0})
    assert shares == pytest.approx({"a": 10_000.0, "b": 50.0, "c": 50.0})
    assert FLOOR == 0.01


def test_half_of_what_nobody_asks_for_lies_ready() -> None:
    assert divide(Quota(200.0, 20.0), {"a": 0.0, "b": 0.0}) == {"a": 50.0, "b": 50.0}


def test_an_idle_share_is_worth_a_token_or_nothing() -> None:
    shares = divide(Quota(10.0, 1.0), {"a": 0.0, "b": 0.0})
    assert shares == {"a": 0.0, "b": 0.0}
    shares = divide(Quota(100.0, 10.0), {f"c{n}": 0.0 for n in range(9)})
    assert sorted(shares.values()) == [0.0] * 4 + [10.0] * 5
