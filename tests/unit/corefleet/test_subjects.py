"""Subjects and keys: each lies where its reader looks, and none is another's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corefleet import subjects
from corefleet.errors import InvalidInput
from corefleet.subjects import Layout

TASK = "3f-01j5x0c9k2m4n6p8q0r2s4t6v8"


def matches(pattern: str, subject: str) -> bool:
    """Whether a NATS subscription to `pattern` receives `subject`."""
    wanted, given_ = pattern.split("."), subject.split(".")
    for place, token in enumerate(wanted):
        if token == ">":
            return len(given_) > place
        if place >= len(given_) or token not in ("*", given_[place]):
            return False
    return len(wanted) == len(given_)


def stored(layout: Layout, shard: int) -> dict[str, str]:
    """Return every subject of one shard by its kind."""
    return {
        "task": layout.task(shard, TASK),
        "head": layout.head(shard, "support", "s1"),
        "owner": layout.owner(shard),
        "log": layout.journal(shard, TASK),
        "res": layout.result(shard, TASK),
    }


@given(data=st.data(), shards=st.integers(1, 512))
def test_a_shard_lives_in_one_stream(data: st.DataObject, shards: int) -> None:
    """docs/architecture.md, rule 1: fences hold within one stream only."""
    streams = data.draw(st.integers(1, shards))
    shard = data.draw(st.integers(0, shards - 1))
    layout = Layout(shards, streams)

    for subject in stored(layout, shard).values():
        holders = [s for s in range(streams) if matches(layout.stream_subjects(s), subject)]
        assert holders == [layout.stream_of(shard)]


@given(data=st.data(), shards=st.integers(1, 512))
def test_shards_spread_evenly_over_streams(data: st.DataObject, shards: int) -> None:
    streams = data.draw(st.integers(1, shards))
    layout = Layout(shards, streams)

    counts = [0] * streams
    for shard in range(shards):
        counts[layout.stream_of(shard)] += 1
    assert max(counts) - min(counts) <= 1


def test_kinds_are_told_from_subjects() -> None:
    for kind, subject in stored(Layout(16, 2), 11).items():
        assert subjects.kind_of(subject) == kind


def test_an_owner_follows_records_heads_and_marks_of_its_shard_only() -> None:
    layout = Layout(16, 2)

    followed = {k for k, s in stored(layout, 11).items() if matches(layout.owned(11), s)}
    assert followed == {"task", "head", "owner"}
    assert not any(matches(layout.owned(11), s) for s in stored(layout, 1).values())
    assert matches(layout.tasks_of(11), layout.task(11, TASK))
    assert not matches(layout.tasks_of(11), layout.head(11, "support", "s1"))


@pytest.mark.parametrize(("shards", "streams"), [(0, 0), (4, 5), (4, 0), (65537, 1), (4, -1)])
def test_impossible_layouts_are_refused(shards: int, streams: int) -> None:
    with pytest.raises(InvalidInput, match=r"^streams: "):
        Layout(shards, streams)


@pytest.mark.parametrize(
    ("pattern", "subject"),
    [
        (subjects.beats("r1"), subjects.beat("r1", "n1")),
        (subjects.DIGESTS, subjects.digest("r1")),
        (subjects.events_to("c1"), subjects.events("c1", TASK)),
        (subjects.events_of(TASK), subjects.events("c1", TASK)),
        (subjects.shard_calls(3), subjects.shard_returned(3, "n1")),
        (subjects.shard_calls(3), subjects.shard_cancel(3)),
        (subjects.shard_calls(3), subjects.shard_explain(3)),
        (subjects.shard_calls(3), subjects.shard_list(3)),
    ],
)
def test_a_subscription_receives_what_is_meant_for_it(pattern: str, subject: str) -> None:
    assert matches(pattern, subject)


def test_no_stream_stores_what_only_counts_now() -> None:
    layout = Layout(256, 8)
    passing = [
        subjects.beat("0", "n1"),
        subjects.digest("0"),
        subjects.VERDICTS,
        subjects.node_assign("n1"),
        subjects.control_register("n1"),
        subjects.POOLS_CHANGED,
        subjects.shard_cancel(1),
        subjects.events("c1", TASK),
    ]

    for stream in range(8):
        assert not any(matches(layout.stream_subjects(stream), subject) for subject in passing)


@pytest.mark.parametrize(
    ("prefix", "key", "name"),
    [
        (subjects.CONTROLDS, subjects.controld_key("c1"), "c1"),
        (subjects.RACKS, subjects.rack_key("r1"), "r1"),
        (subjects.NODES, subjects.node_key("n1"), "n1"),
        (subjects.LOST, subjects.lost_key("n1"), "n1"),
        (subjects.POOLS, subjects.pool_key("support"), "support"),
        (subjects.SHARDS, subjects.shard_key(63), "00063"),
    ],
)
def test_keys_lie_below_their_prefix(prefix: str, key: str, name: str) -> None:
    assert key.startswith(prefix)
    assert subjects.name_in_key(key) == name


def test_shard_keys_sort_by_number() -> None:
    keys = [subjects.shard_key(shard) for shard in (2, 10, 100)]

    assert keys == sorted(keys)
