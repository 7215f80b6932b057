"""Limits of attempts in flight: exact over all shards, shared by those of a controld."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controld.core.fleet import Fleet
from controld.core.limits import Limits, Opened, allotment
from controld.core.shard import ShardCore
from controld.core.shard_io import AttemptReturned, RecordStored, WriteRecord, WriteUnavailable
from corefleet.messages.records import PoolSpec
from tests.unit.controld.core.driving import ShardDriver, of_kind, only


def chat(**limits: int) -> dict[str, PoolSpec]:
    return {"chat": PoolSpec(name="chat", **limits)}  # type: ignore[arg-type]


@given(st.integers(0, 5000), st.integers(1, 512), st.text(max_size=8))
def test_allotments_of_all_shards_sum_up_to_the_limit_and_are_even(
    limit: int, shards: int, salt: str
) -> None:
    parts = [allotment(limit, shards, shard, salt) for shard in range(shards)]
    assert sum(parts) == limit
    assert max(parts) - min(parts) <= 1


@given(
    limit=st.integers(1, 300),
    owners=st.lists(st.integers(0, 4), min_size=16, max_size=16),
)
def test_shares_of_all_controlds_sum_up_to_the_limit(limit: int, owners: list[int]) -> None:
    controlds = [Limits(16) for _ in range(5)]
    for shard, owner in enumerate(owners):
        controlds[owner].own(shard)
    for each in controlds:
        each.set_pools(chat(max_in_flight=limit, max_in_flight_per_tenant=limit))
    assert sum(each.share("chat") or 0 for each in controlds) == limit
    assert sum(each.share("chat", "acme") or 0 for each in controlds) == limit
    controlds[owners[3]].disown(3)
    controlds[0].own(3)
    assert sum(each.share("chat") or 0 for each in controlds) == limit


def test_a_share_that_was_given_replaces_the_allotments_until_it_is_taken_back() -> None:
    limits = Limits(4)
    limits.own(0)
    limits.set_pools(chat(max_in_flight=8))
    assert limits.share("chat") == 2
    limits.set_share("chat", 5)
    assert limits.share("chat") == 5
    limits.set_share("chat", None)
    assert limits.share("chat") == 2
    limits.set_pools(chat())
    assert limits.share("chat") is None


def test_shards_take_turns_at_a_limit_in_the_order_in_which_they_asked() -> None:
    limits = Limits(2)
    limits.own(0)
    limits.own(1)
    limits.set_pools(chat(max_in_flight=1))
    assert limits.held_by(0, "chat", "") == ""
    limits.took(0, "chat", "")
    assert limits.held_by(1, "chat", "") == "pool"
    assert limits.held_by(0, "chat", "") == "pool"
    assert limits.woken() == []
    limits.left("chat", "")
    assert limits.held_by(0, "chat", "") == "pool", "shard 1 asked before"
    assert limits.woken() == [Opened(1, "chat", "")]
    assert limits.held_by(1, "chat", "") == ""
    limits.took(1, "chat", "")
    assert limits.woken() == []
    limits.left("chat", "")
    assert limits.woken() == [Opened(0, "chat", "")]


def test_who_is_woken_and_needs_nothing_any_more_does_not_hold_up_the_next() -> None:
    limits = Limits(3)
    for shard in range(3):
        limits.own(shard)
    limits.set_pools(chat(max_in_flight=1))
    limits.took(0, "chat", "")
    for shard in (1, 2):
        limits.held_by(shard, "chat", "")
    limits.left("chat", "")
    assert limits.woken() == [Opened(1, "chat", "")]
    assert limits.woken() == [Opened(2, "chat", "")]
    assert limits.held_by(2, "chat", "") == ""


def test_a_pool_at_its_limit_waits_and_says_so_and_goes_on_when_an_attempt_is_over() -> None:
    shard = ShardDriver(nodes=2, slots=8, pools=chat(max_in_flight=2))
    first = shard.run()
    shard.run()
    assert shard.submit() == []
    assert shard.core.reason("t3") == (
        "pool chat has max_in_flight 2: 2 of this controld's share of 2 are in flight"
    )
    assert only(shard.submit(pool="crunch"), WriteRecord).record.pool == "crunch"
    assert only(shard.done(first), WriteRecord).record.task == "t3"


def test_a_limit_that_is_raised_lets_go_on_who_waits() -> None:
    shard = ShardDriver(nodes=2, slots=8, pools=chat(max_in_flight=1))
    shard.run()
    shard.submit()
    assert shard.core.states()["t2"] == "queued"
    actions = shard.set_pools(chat(max_in_flight=2))
    assert only(actions, WriteRecord).record.task == "t2"


def test_a_tenant_at_its_limit_does_not_hold_up_other_tenants_and_keeps_its_order() -> None:
    shard = ShardDriver(nodes=2, slots=8, pools=chat(max_in_flight_per_tenant=1))
    first = shard.run(tenant="acme")
    for _ in range(2):
        assert shard.submit(tenant="acme") == []
    assert shard.core.reason("t2") == (
        "tenant acme has max_in_flight_per_tenant 1 in pool chat: "
        "1 of this controld's share of 1 are in flight"
    )
    assert only(shard.submit(tenant="other"), WriteRecord).record.task == "t4"
    assert only(shard.submit(), WriteRecord).record.task == "t5"
    assert only(shard.submit(), WriteRecord).record.task == "t6", "without a tenant: no limit"
    second = only(shard.done(first), WriteRecord)
    assert second.record.task == "t2"
    assert shard.submit(tenant="acme") == []
    shard.written(second)
    assert only(shard.done(second.record), WriteRecord).record.task == "t3"


def test_a_parked_task_that_is_ended_does_not_keep_the_next_of_its_tenant() -> None:
    shard = ShardDriver(nodes=2, slots=8, pools=chat(max_in_flight_per_tenant=1))
    first = shard.run(tenant="acme")
    shard.submit(tenant="acme")
    shard.submit(tenant="acme")
    waiting = shard.core._state.tasks["t2"].record
    shard.done(waiting, "cancelled", head=False)
    assert only(shard.done(first), WriteRecord).record.task == "t3"


def test_an_attempt_that_moves_keeps_its_place_within_the_limit() -> None:
    shard = ShardDriver(nodes=2, slots=8, pools=chat(max_in_flight=1))
    record = shard.run()
    shard.submit()
    move = only(shard.feed(AttemptReturned("t1", 1, record.node, "boom")), WriteRecord)
    assert move.record.task == "t1"
    assert shard.limits.counts() == {("chat", ""): 1}
    shard.written(move)
    assert shard.limits.counts() == {("chat", ""): 1}


def test_what_could_not_be_written_counts_no_more() -> None:
    shard = ShardDriver(nodes=2, pools=chat(max_in_flight=1))
    only(shard.submit(), WriteRecord)
    assert shard.limits.counts() == {("chat", ""): 1}
    shard.feed(WriteUnavailable("t1", 1, "no leader"))
    assert shard.limits.counts() == {}


@pytest.mark.parametrize("tenant", ["", "acme"])
def test_counts_are_rebuilt_from_the_records_and_given_back_with_the_shard(tenant: str) -> None:
    shard = ShardDriver(nodes=2, slots=8, pools=chat(max_in_flight=9))
    records = [shard.run(tenant=tenant) for _ in range(3)]
    counts = shard.limits.counts()
    assert counts["chat", ""] == 3
    limits = Limits()
    core = ShardCore(7, "c2", 4, Fleet(), Random(0), limits=limits)
    for number, record in enumerate(records):
        core.handle(RecordStored(record, 1000 + number), 0.0, 0)
    assert limits.counts() == counts
    core.close(1.0)
    assert limits.counts() == {}
    assert limits.share("chat") is None


def test_a_limit_lowered_below_what_runs_only_keeps_new_attempts_out() -> None:
    shard = ShardDriver(nodes=2, slots=8, pools=chat(max_in_flight=3))
    running = [shard.run() for _ in range(3)]
    shard.set_pools(chat(max_in_flight=1))
    shard.submit()
    for record in running[:2]:
        assert of_kind(shard.done(record), WriteRecord) == []
    assert only(shard.done(running[2]), WriteRecord).record.task == "t4"


def test_nothing_is_kept_of_tenants_without_an_attempt() -> None:
    shard = ShardDriver(nodes=1, slots=2, pools=chat(max_in_flight_per_tenant=1))
    for number in range(20):
        tenant = f"tenant{number}"
        shard.done(shard.run(tenant=tenant))
        shard.limits.held_by(7, "chat", tenant)
    assert set(shard.limits._limits) == {("chat", "")}
