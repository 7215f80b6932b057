"""Identifiers are checked where they come in, and spell what they belong to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corefleet import ids
from corefleet.errors import InvalidInput

LONGEST = "a" * 63


@pytest.mark.parametrize("name", ["a", "_", "A-b_9", LONGEST])
def test_good_names_pass(name: str) -> None:
    assert ids.check_name("pool", name) == name


@pytest.mark.parametrize(
    "name", ["", "-a", "a.b", "a b", "a/b", "a*", ">", "\u00fc", "a\n", LONGEST + "a"]
)
def test_bad_names_are_refused_with_field_and_value(name: str) -> None:
    with pytest.raises(InvalidInput, match=r"^pool: ") as caught:
        ids.check_name("pool", name)

    assert caught.value.field == "pool"
    assert caught.value.value == name


@pytest.mark.parametrize("value", ["r", "3f-01j5/4", "a:b_c", "x" * 128])
def test_good_request_ids_pass(value: str) -> None:
    assert ids.check_request_id(value) == value


@pytest.mark.parametrize("value", ["", "a.b", "a b", "a\n", "x" * 129])
def test_bad_request_ids_are_refused(value: str) -> None:
    with pytest.raises(InvalidInput, match=r"^request_id: "):
        ids.check_request_id(value)


@given(pool=st.text(), session=st.text(), shards=st.integers(1, 65536))
def test_a_session_always_has_the_same_shard(pool: str, session: str, shards: int) -> None:
    shard = ids.shard_of(pool, session, shards)

    assert 0 <= shard < shards
    assert shard == ids.shard_of(pool, session, shards)


def test_shards_are_those_of_every_version() -> None:
    """Another hash would orphan every stored session."""
    assert ids.shard_of("support", "s1", 256) == 189
    assert ids.session_for_request("r-1") == "sceed0d1c4f4917414163"


def test_sessions_spread_over_all_shards() -> None:
    shards = [ids.shard_of("support", f"s{number}", 16) for number in range(1600)]

    counts = [sum(taken == shard for taken in shards) for shard in range(16)]
    assert min(counts) > 60
    assert max(counts) < 150


@given(shard=st.integers(0, 65535), request_id=st.text("abc/:-_09", min_size=1, max_size=128))
def test_a_task_id_spells_its_shard(shard: int, request_id: str) -> None:
    task = ids.task_id_of(shard, request_id)

    assert ids.shard_of_task(task) == shard
    assert ids.check_task_id(task, shard + 1) == task
    assert ids.check_name("task", task) == task


@pytest.mark.parametrize(
    "task",
    ["", "3f", "3f-", "3F-01j5x0c9k2m4n6p8q0r2s4t6v8", "12345-01j5x0c9k2m4n6p8q0r2s4t6v8", "a.b"],
)
def test_bad_task_ids_are_refused(task: str) -> None:
    with pytest.raises(InvalidInput, match=r"^task: "):
        ids.shard_of_task(task)


def test_a_task_id_of_a_larger_cluster_is_refused() -> None:
    task = ids.task_id_of(200, "r-1")

    with pytest.raises(InvalidInput, match="cluster of 16 shards"):
        ids.check_task_id(task, 16)


def test_a_step_key_names_task_and_step() -> None:
    key = ids.step_key("3f-01j5x0c9k2m4n6p8q0r2s4t6v8", 4)

    assert key == "3f-01j5x0c9k2m4n6p8q0r2s4t6v8/4"
    assert ids.check_request_id(key) == key
