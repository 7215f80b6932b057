"""Who may publish and subscribe what: one table for every subject that there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corefleet import subjects
from corefleet.identity import ROLES, Identity
from corefleet.permissions import Permissions, permissions_of
from corefleet.subjects import ANY, Layout

TASK = "3-01hzy2k3m4n5p6q7r8s9t0v1w2"
OTHER = "4-01hzy2k3m4n5p6q7r8s9t0v1w2"
LAYOUT = Layout(16, 4)

NODE, CONTROLD, OPERATOR = (
    Identity("agentd", "n1"),
    Identity("controld", "c1"),
    Identity("operator", "o1"),
)
IDENTITIES = {"node": (NODE, "r1"), "controld": (CONTROLD, ANY), "operator": (OPERATOR, ANY)}

Who = frozenset[str]
NOBODY: Who = frozenset()
BOTH: Who = frozenset({"node", "controld"})


def only(*who: str) -> Who:
    return frozenset(who)


@dataclass(frozen=True)
class Decision:
    """Who may publish and subscribe a subject, and an other's subject of the same kind."""

    subject: str
    publish: Who
    subscribe: Who
    of_other: str = ""
    other_publish: Who = NOBODY
    other_subscribe: Who = NOBODY


C = only("controld")
N = only("node")
O = only("operator")  # noqa: E741 - as the others
API = only("controld", "operator")

DECISIONS: dict[str, Decision] = {
    # What a node says of itself, and nobody else.
    "beat": Decision(subjects.beat("r1", "n1"), N, C, subjects.beat("r1", "n2"), NOBODY, C),
    "control_register": Decision(
        subjects.control_register("n1"), N, C, subjects.control_register("n2"), NOBODY, C
    ),
    "shard_returned": Decision(
        subjects.shard_returned(3, "n1"), N, C, subjects.shard_returned(3, "n2"), NOBODY, C
    ),
    # What a node is told.
    "node_assign": Decision(
        subjects.node_assign("n1"), C, N, subjects.node_assign("n2"), C, NOBODY
    ),
    "node_drop": Decision(subjects.node_drop("n1"), C, N, subjects.node_drop("n2"), C, NOBODY),
    "node_yield": Decision(subjects.node_yield("n1"), C, N, subjects.node_yield("n2"), C, NOBODY),
    "node_inventory": Decision(
        subjects.node_inventory("n1"), C, N, subjects.node_inventory("n2"), C, NOBODY
    ),
    "digest": Decision(subjects.digest("r1"), C, BOTH, subjects.digest("r2"), C, C),
    "VERDICTS": Decision(subjects.VERDICTS, C, BOTH),
    "POOLS_CHANGED": Decision(subjects.POOLS_CHANGED, C, N),
    # What any node may say of any task.
    "CONTROL_SUBMIT": Decision(subjects.CONTROL_SUBMIT, N, C),
    "events": Decision(
        subjects.events("c1", TASK), BOTH, C, subjects.events("c2", OTHER), BOTH, C
    ),
    # Among controlds.
    "LOSS_VOTES": Decision(subjects.LOSS_VOTES, C, C),
    "PEERS": Decision(subjects.PEERS, C, C),
    "QUOTAS": Decision(subjects.QUOTAS, C, C),
    "OVERVIEW": Decision(subjects.OVERVIEW, C, C),
    "overview_of": Decision(
        subjects.overview_of("c1"), C, C, subjects.overview_of("c2"), C, NOBODY
    ),
    "observe": Decision(subjects.observe("c1"), C, C, subjects.observe("c2"), C, NOBODY),
    "shard_cancel": Decision(subjects.shard_cancel(3), C, C),
    "shard_explain": Decision(subjects.shard_explain(3), C, C),
    "shard_list": Decision(subjects.shard_list(3), C, C),
    # Streams: written by publishing, read by JetStream's API only.
    "Layout.task": Decision(LAYOUT.task(3, TASK), BOTH, NOBODY),
    "Layout.head": Decision(LAYOUT.head(3, "support", "s1"), BOTH, NOBODY),
    "Layout.owner": Decision(LAYOUT.owner(3), C, NOBODY),
    "Layout.journal": Decision(LAYOUT.journal(3, TASK), BOTH, NOBODY),
    "Layout.result": Decision(LAYOUT.result(3, TASK), BOTH, NOBODY),
    "stream_info": Decision(subjects.stream_info("cf-1"), API, NOBODY),
    "stream_create": Decision(subjects.stream_create("cf-1"), API, NOBODY),
    "stream_message": Decision(subjects.stream_message("cf-1"), BOTH | O, NOBODY),
    "stream_messages": Decision(subjects.stream_messages("cf-1"), API, NOBODY),
    "consumer_create": Decision(subjects.consumer_create("cf-1", "x-1"), API, NOBODY),
    "consumer_delete": Decision(subjects.consumer_delete("cf-1", "x-1"), API, NOBODY),
    "FLOW_CONTROL": Decision("$JS.FC.cf-1.x-1.abcd", C, NOBODY),
    "SNAPSHOTS": Decision("$JS.SNAPSHOT.ACK.cf-1.abcd", O, NOBODY),
    "JETSTREAM_API": Decision("$JS.API.STREAM.DELETE.cf-1", O, NOBODY),
    # Inboxes.
    "inboxes": Decision(
        f"{subjects.inboxes('agentd', 'n1')}.ab.1", BOTH, N,
        f"{subjects.inboxes('agentd', 'n2')}.ab.1", C, NOBODY,
    ),
    "ALL_INBOXES": Decision(
        f"{subjects.inboxes('controld', 'c1')}.ab.1", C, C,
        f"{subjects.inboxes('controld', 'c2')}.ab.1", C, NOBODY,
    ),
    "PLAIN_INBOXES": Decision(f"{subjects.PLAIN_INBOXES}.ab.1", C, NOBODY),
}  # fmt: skip
"""One entry for each subject in corefleet/subjects.py."""

PATTERNS = {
    *("ALL_TASKS", "ALL_HEADS", "ALL_OWNERS", "ALL_JOURNALS", "ALL_RESULTS"),
    *("beats", "DIGESTS", "CONTROL_REGISTER", "shard_calls", "events_to", "events_of"),
    *("Layout.stream_subjects", "Layout.tasks_of", "Layout.owned", "Layout.task_or_result"),
}
"""Filters over subjects that are in the table."""

NO_SUBJECTS = {
    *("ANY", "CONTROL_QUEUE", "INBOX"),
    *("Layout.stream_of", "Layout.stream_name"),
    *("stream_name", "stream_name_of", "kind_of", "call_of", "sender_of", "name_in_key"),
    *("EVERY_KEY", "SETTINGS", "CONTROLDS", "SHARDS", "RACKS", "NODES", "LOST", "POOLS", "DRAINS"),
    *("controld_key", "shard_key", "rack_key", "node_key", "lost_key", "pool_key", "drain_key"),
}


def matches(pattern: str, subject: str) -> bool:
    """Whether a permission for `pattern` takes in `subject`, which may have wildcards itself."""
    allowed, asked = pattern.split("."), subject.split(".")
    for place, token in enumerate(allowed):
        if token == ">":
            return len(asked) > place
        if place >= len(asked) or asked[place] == ">":
            return False
        if token not in ("*", asked[place]):
            return False
    return len(allowed) == len(asked)


def may(subject: str, patterns: tuple[str, ...]) -> bool:
    return any(matches(pattern, subject) for pattern in patterns)


def given_to(who: str) -> Permissions:
    identity, rack = IDENTITIES[who]
    found = permissions_of(identity, rack)
    assert found is not None
    return found


def who_may(subject: str, side: Callable[[Permissions], tuple[str, ...]]) -> Who:
    return frozenset(who for who in IDENTITIES if may(subject, side(given_to(who))))


def test_every_subject_has_a_decision() -> None:
    names = {
        name
        for name, value in vars(subjects).items()
        if isinstance(value, str) or (callable(value) and value.__module__ == subjects.__name__)
        if not name.startswith("_") and name != "Layout"
    }
    names |= {
        f"Layout.{name}"
        for name in vars(Layout)
        if callable(getattr(Layout, name)) and name[0] != "_"
    }

    assert names == DECISIONS.keys() | PATTERNS | NO_SUBJECTS


@pytest.mark.parametrize("name", DECISIONS)
def test_permissions_are_as_decided(name: str) -> None:
    decision = DECISIONS[name]

    assert who_may(decision.subject, lambda p: p.publish) == decision.publish
    assert who_may(decision.subject, lambda p: p.subscribe) == decision.subscribe
    if decision.of_other:
        assert who_may(decision.of_other, lambda p: p.publish) == decision.other_publish
        assert who_may(decision.of_other, lambda p: p.subscribe) == decision.other_subscribe


@pytest.mark.parametrize(
    "filter_",
    [
        subjects.beats("r1"),
        subjects.DIGESTS,
        subjects.CONTROL_REGISTER,
        subjects.shard_calls(3),
        subjects.events_to("c1"),
        subjects.events_of(TASK),
    ],
)
def test_only_controlds_listen_to_all_of_a_kind(filter_: str) -> None:
    assert who_may(filter_, lambda p: p.subscribe) == C


@pytest.mark.parametrize("role", sorted(set(ROLES) - {"agentd", "controld", "operator"}))
def test_other_roles_are_no_users_of_nats(role: str) -> None:
    assert permissions_of(Identity(role, "x")) is None  # type: ignore[arg-type]


def test_only_nodes_answer_by_the_right_to_respond() -> None:
    assert [who for who in IDENTITIES if given_to(who).responses] == ["node"]


SPELLINGS: tuple[Callable[[str], str], ...] = (
    lambda w: subjects.beat(w, w),
    lambda w: subjects.node_assign(w),
    lambda w: subjects.observe(w),
    lambda w: subjects.overview_of(w),
    lambda w: subjects.events(w, w),
    lambda w: subjects.control_register(w),
    lambda w: subjects.shard_returned(3, w),
)
"""Every subject of core NATS that a name stands in."""

names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,20}\Z")


@given(me=names, other=names, rack=names, shard=st.integers(0, 65535))
def test_no_node_speaks_or_listens_as_another(me: str, other: str, rack: str, shard: int) -> None:
    mine = permissions_of(Identity("agentd", me), rack)
    assert mine is not None
    said = (
        subjects.beat(rack, other),
        subjects.control_register(other),
        subjects.shard_returned(shard, other),
        subjects.inboxes("agentd", other) + ".x.1",
    )
    told = (
        subjects.node_assign(other),
        subjects.node_drop(other),
        subjects.node_yield(other),
        subjects.node_inventory(other),
        subjects.inboxes("agentd", other) + ".x.1",
    )

    for subject in said:
        assert may(subject, mine.publish) == (me == other)
    for subject in told:
        assert may(subject, mine.subscribe) == (me == other)
        assert not may(subject, mine.publish) or subject == said[-1]
    assert not may(subjects.inboxes("controld", me) + ".x.1", mine.publish + mine.subscribe)


@given(me=names)
def test_rights_on_streams_touch_nothing_else(me: str) -> None:
    """`cf.*.log.*.*` must not match what is no stream's: any token may be a node's name."""
    mine = permissions_of(Identity("agentd", me), "r1")
    assert mine is not None
    of_streams = (
        subjects.ALL_TASKS,
        subjects.ALL_HEADS,
        subjects.ALL_JOURNALS,
        subjects.ALL_RESULTS,
    )
    core = [spell(word) for word in ("own", "log", "res", "task", "head") for spell in SPELLINGS]

    assert set(of_streams) <= set(mine.publish)
    assert not any(may(subject, of_streams) for subject in core)
