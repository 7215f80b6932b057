"""What is let in."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controld.core.admission import Admission, AdmissionSettings, Refusal, _Bucket
from controld.core.overload import PATIENCE
from controld.core.quota_division import Quota
from controld.core.quota_shares import QuotaShares
from corefleet.messages.records import PoolSpec
from corefleet.messages.wire import QuotaReport


def admission(spec: PoolSpec | None = None, now: float = 0.0, *members: str) -> Admission:
    """Return the admission of the controld `me`, which is alone unless members are named."""
    shares = QuotaShares("me", now)
    found = Admission(AdmissionSettings(max_input_bytes=100, backlog_limit=3), shares)
    shares.set_members(members or ["me"], now)
    found.set_pools({"chat": spec or rated()}, now)
    return found


def rated(rate: float = 10.0, burst: int = 5) -> PoolSpec:
    return PoolSpec(name="chat", rate_per_s=rate, burst=burst)


def admitted(found: Admission, seconds: float, step: float = 0.001) -> int:
    return sum(attempt(found, at * step) for at in range(round(seconds / step)))


def attempt(found: Admission, now: float) -> bool:
    """Try once, with the shares' ticks, which renew what they are."""
    if round(now * 1000) % 200 == 0:
        found.shares.tick(now)
    return found.admit("chat", 1, now) is None


def test_a_burst_then_the_rate_with_the_time_to_wait() -> None:
    found = admission(None, 50.0)
    assert all(found.admit("chat", 1, 50.0) is None for _ in range(5))
    refusal = found.admit("chat", 1, 50.0)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(0.1)
    assert not refusal.permanent
    assert not refusal.coming
    assert refusal.reason == "pool chat: over its rate of 10 submissions a second"
    assert found.admit("chat", 1, 50.0 + refusal.retry_after_s) is None
    assert found.admit("chat", 1, 50.1) is not None


def test_the_rate_holds_over_time() -> None:
    assert 104 <= admitted(admission(), 10.0) <= 105


def test_a_changed_pool_makes_up_no_tokens() -> None:
    found = admission(rated(burst=8), 1.0)
    assert found.admit("chat", 1, 1.0) is None
    found.set_pools({"chat": rated(burst=2)}, 1.0)
    found.set_pools({"chat": rated(burst=8)}, 1.0)
    assert sum(found.admit("chat", 1, 1.0) is None for _ in range(8)) == 2


def test_a_rate_without_a_burst_lets_one_tenth_of_a_second_through() -> None:
    found = admission(rated(50.0, 0))
    assert sum(found.admit("chat", 1, 0.0) is None for _ in range(20)) == 5


def test_a_small_rate_always_has_a_whole_token() -> None:
    found = admission(rated(0.5, 1))
    assert found.admit("chat", 1, 0.0) is None
    refusal = found.admit("chat", 1, 0.0)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(2.0)


def test_without_a_share_it_says_that_one_may_be_coming() -> None:
    found = admission(None, 0.0, "me", "other")
    refusal = found.admit("chat", 1, 0.0)
    assert refusal is not None
    assert refusal.coming
    assert 0.0 < refusal.retry_after_s < 1.0


def test_a_token_of_the_pool_and_one_of_the_tenant_are_taken_together() -> None:
    spec = PoolSpec(name="chat", rate_per_s=30.0, burst=3, tenant_rate_per_s=20.0)
    found = admission(spec)
    assert [found.admit("chat", 1, 0.0, "a") is None for _ in range(3)] == [True, True, False]
    refusal = found.admit("chat", 1, 0.0, "a")
    assert refusal is not None
    assert refusal.cause == "tenant_rate"
    assert found.admit("chat", 1, 0.0, "b") is None, "what the tenant a was refused cost no token"
    refusal = found.admit("chat", 1, 0.0, "b")
    assert refusal is not None
    assert refusal.cause == "rate"


def test_too_little_cpu_refuses_batch_and_costs_no_token() -> None:
    found = admission(PoolSpec(name="chat", rate_per_s=10.0, burst=1, pool_class="batch"))
    for at in range(PATIENCE):
        found.overload.sample(0.93, 0.0, at * 0.5)
    refusal = found.admit("chat", 1, 0.0)
    assert refusal is not None
    assert refusal.cause == "overload"
    assert refusal.reason == "controld is at 93% CPU: batch is shed"
    for at in range(20):
        found.overload.sample(0.3, 0.0, 2.0 + at * 0.5)
    assert found.admit("chat", 1, 0.0) is None


def test_the_backlog_of_all_controlds_counts_and_batch_is_refused_first() -> None:
    def asked(pool_class: Literal["online", "batch"], elsewhere: int) -> Refusal | None:
        found = admission(PoolSpec(name="chat", pool_class=pool_class, backlog_limit=10))
        found.shares.heard(QuotaReport(controld="b", number=1, backlog={"chat": elsewhere}), 0.0)
        found.set_backlog("chat", 2)
        return found.admit("chat", 1, 0.0)

    assert asked("online", 7) is None
    refusal = asked("online", 8)
    assert refusal is not None
    assert refusal.reason == (
        "pool chat: 10 tasks wait already in the cluster; expected fewer than 10"
    )
    assert refusal.cause == "backlog"
    assert asked("batch", 5) is None
    refusal = asked("batch", 6)
    assert refusal is not None
    assert refusal.reason == (
        "pool chat: 8 tasks of a batch pool wait already in the cluster; expected fewer than 8"
    )


def test_pools_without_a_rate_are_not_limited() -> None:
    assert admitted(admission(rated(0.0)), 1.0) == 1000


def test_too_large_an_input_is_never_taken() -> None:
    found = admission()
    assert found.admit("chat", 100, 0.0) is None
    refusal = found.admit("chat", 101, 0.0)
    assert refusal is not None
    assert refusal.permanent
    assert refusal.reason == "input: 101 bytes; expected at most 100"


def test_rule_5_submissions_stop_at_eighty_per_cent_of_the_streams() -> None:
    found = admission()
    found.set_stream_usage(0.79)
    assert found.admit("chat", 1, 0.0) is None
    found.set_stream_usage(0.8)
    refusal = found.admit("chat", 1, 0.0)
    assert refusal is not None
    assert "80% full" in refusal.reason
    assert refusal.retry_after_s > 0


def test_a_long_backlog_refuses_its_pool_only() -> None:
    found = admission()
    found.set_backlog("chat", 3)
    refusal = found.admit("chat", 1, 0.0)
    assert refusal is not None
    assert "3 tasks wait already" in refusal.reason
    assert found.admit("crunch", 1, 0.0) is None
    found.set_backlog("chat", 2)
    assert found.admit("chat", 1, 0.0) is None


def test_a_refused_submission_costs_no_token() -> None:
    found = admission(rated(burst=1))
    found.set_stream_usage(0.9)
    found.admit("chat", 1, 0.0)
    found.set_stream_usage(0.1)
    assert found.admit("chat", 1, 0.0) is None


def test_the_wait_before_the_next_token_shrinks_as_time_passes() -> None:
    found = admission(rated(1.0, 1))
    found.admit("chat", 1, 0.0)
    first, second = found.admit("chat", 1, 0.25), found.admit("chat", 1, 0.5)
    assert first is not None
    assert second is not None
    assert (first.retry_after_s, second.retry_after_s) == pytest.approx((0.75, 0.5))


@given(st.floats(0.01, 1000.0), st.floats(0.0, 0.999), st.floats(0.0, 1e6))
def test_who_waits_as_long_as_told_finds_a_token(rate: float, tokens: float, now: float) -> None:
    bucket = _Bucket(now, rate, tokens)
    then = now + bucket.wait_s()
    bucket.fill(then, rate, Quota(amount=rate, burst=10.0))
    assert bucket.wait_s() == 0.0


def test_a_small_share_makes_nobody_wait_longer_than_the_share_takes_to_grow() -> None:
    found = admission(rated(rate=4.0), 0.0, "me", "other")
    found.shares.tick(0.0)
    (name,) = found._buckets
    refusal = found._over(name, 136.0, coming=False)
    assert refusal.retry_after_s <= 0.5
