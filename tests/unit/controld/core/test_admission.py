"""What is let in."""

from __future__ import annotations

import pytest

from controld.core.admission import Admission, AdmissionSettings
from corefleet.messages.records import PoolSpec


def admission(rate: float = 10.0, burst: int = 5, members: int = 1) -> Admission:
    found = Admission(AdmissionSettings(max_input_bytes=100, backlog_limit=3))
    found.set_members(members)
    found.set_pools({"chat": PoolSpec(name="chat", rate_per_s=rate, burst=burst)})
    return found


def admitted(found: Admission, seconds: float, step: float = 0.001) -> int:
    return sum(found.admit("chat", 1, at * step) is None for at in range(round(seconds / step)))


def test_a_burst_then_the_rate_with_the_time_to_wait() -> None:
    found = admission()
    assert all(found.admit("chat", 1, 50.0) is None for _ in range(5))
    refusal = found.admit("chat", 1, 50.0)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(0.1)
    assert not refusal.permanent
    assert refusal.reason == "pool chat: over its rate of 10 submissions a second"
    assert found.admit("chat", 1, 50.0 + refusal.retry_after_s) is None
    assert found.admit("chat", 1, 50.1) is not None


def test_the_rate_holds_over_time() -> None:
    assert 104 <= admitted(admission(), 10.0) <= 105


def test_each_controld_spends_its_share() -> None:
    total = sum(admitted(admission(rate=100.0, burst=10, members=4), 5.0) for _ in range(4))
    assert 500 <= total <= 512


def test_a_change_of_members_makes_up_no_tokens() -> None:
    found = admission(burst=8)
    assert found.admit("chat", 1, 1.0) is None
    found.set_members(4)
    found.set_members(1)
    assert sum(found.admit("chat", 1, 1.0) is None for _ in range(8)) == 2


def test_a_rate_without_a_burst_lets_one_tenth_of_a_second_through() -> None:
    found = admission(rate=50.0, burst=0)
    assert sum(found.admit("chat", 1, 1.0) is None for _ in range(20)) == 5


def test_a_small_rate_always_has_a_whole_token() -> None:
    found = admission(rate=0.5, burst=1, members=10)
    assert found.admit("chat", 1, 0.0) is None
    refusal = found.admit("chat", 1, 0.0)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(20.0)


def test_pools_without_a_rate_are_not_limited() -> None:
    found = admission(rate=0.0)
    assert admitted(found, 1.0) == 1000


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
    found = admission(burst=1)
    found.set_stream_usage(0.9)
    found.admit("chat", 1, 0.0)
    found.set_stream_usage(0.1)
    assert found.admit("chat", 1, 0.0) is None


def test_the_wait_before_the_next_token_shrinks_as_time_passes() -> None:
    found = admission(rate=1.0, burst=1)
    found.admit("chat", 1, 0.0)
    first, second = found.admit("chat", 1, 0.25), found.admit("chat", 1, 0.5)
    assert first is not None
    assert second is not None
    assert (first.retry_after_s, second.retry_after_s) == pytest.approx((0.75, 0.5))
