"""The guard: how much is given up unasked, and that nothing more is without a majority."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from controld.core.liveness_io import Found
from controld.core.loss_votes import MOST_A_ROUND, VALID_S, LossVotes
from controld.core.mass_loss import MassLoss, MassLossLimits
from corefleet.messages.wire import LossVote

LIMITS = MassLossLimits(max_lost_share=0.2, max_lost_floor=3, mass_window_s=10.0)


def guard_of(nodes: int, *drained: str) -> MassLoss:
    guard = MassLoss(LIMITS)
    guard.cluster(nodes, frozenset(drained))
    return guard


def test_a_rack_of_40_in_4096_is_given_up_at_once() -> None:
    guard = MassLoss(MassLossLimits())
    guard.cluster(4096, frozenset())
    assert all(guard.lost(f"n{number}", 1, 5.0) for number in range(40))
    assert guard.held == {}


def test_more_than_the_share_within_the_window_is_held() -> None:
    guard = guard_of(50)
    acted = [guard.lost(f"n{number}", 1, number * 0.01) for number in range(25)]
    assert acted == [True] * 10 + [False] * 15
    assert guard.lost("n0", 1, 0.3), "what was given up stays so"
    assert not guard.lost("n24", 1, 0.3)
    assert len(guard.held) == 15


def test_few_nodes_are_never_a_mass() -> None:
    guard = guard_of(4)
    assert [guard.lost(name, 1, 0.0) for name in "abcd"] == [True, True, True, False]


def test_losses_that_are_further_apart_than_the_window_do_not_add_up() -> None:
    guard = guard_of(10)
    assert all(guard.lost(f"n{number}", 1, number * 4.0) for number in range(10))


def test_planned_drains_do_not_count() -> None:
    guard = guard_of(4, "a", "b", "c")
    assert all(guard.lost(name, 1, 0.0) for name in "abcdef")
    assert not guard.lost("g", 1, 0.0)
    guard.cluster(4, {"h"})
    assert guard.lost("h", 1, 0.0), "who was drained is not held either"


def test_what_stands_in_the_store_is_settled() -> None:
    guard = guard_of(4)
    for name in "abcde":
        guard.lost(name, 1, 0.0)
    assert guard.held == {"d": 1, "e": 1}
    guard.stands("d", 1)
    assert guard.held == {"e": 1}
    assert guard.lost("d", 1, 0.1)
    assert not guard.lost("d", 2, 0.1), "a newer epoch is another loss"


def test_a_rack_owner_stores_nothing_unasked_while_anything_is_held() -> None:
    guard = guard_of(4)
    for name in "abcd":
        guard.lost(name, 1, 0.0)
    assert not guard.settle("a", 1, 0.25)
    assert guard.held == {"a": 1, "d": 1}, "so that all vote on it"
    assert guard.lives("d", 1)
    assert guard.settle("b", 1, 0.25)


def test_who_lives_after_all_is_no_longer_held_and_still_counts_within_the_window() -> None:
    guard = guard_of(4)
    for name in "abcd":
        guard.lost(name, 1, 0.0)
    assert guard.lives("d", 1)
    assert guard.lives("a", 1)
    assert not guard.lives("a", 1)
    assert guard.held == {}
    assert not guard.lost("e", 1, 0.1)
    assert guard.lost("a", 1, 0.1) is False, "something is held again"


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 40),
    st.lists(
        st.tuples(
            st.sampled_from(["lost", "lives", "held", "settle", "gone"]),
            st.integers(0, 14),
            st.floats(0, 4),
        ),
        max_size=120,
    ),
)
def test_never_more_than_the_limit_is_given_up_unasked_within_a_window(
    nodes: int, story: list[tuple[str, int, float]]
) -> None:
    guard = guard_of(nodes)
    now = 0.0
    acted: list[tuple[float, str]] = []
    given_up: set[str] = set()
    for what, number, pause in story:
        now += pause
        node = f"n{number}"
        if what == "lives":
            guard.lives(node, 1)
            given_up.discard(node)
        elif what == "gone":
            guard.gone(node)
            given_up.discard(node)
        else:
            ask = {"lost": guard.lost, "held": guard.shown_held, "settle": guard.settle}[what]
            held_before = guard.holds(node, 1)
            if ask(node, 1, now):
                assert not held_before, "nothing but the store releases what is held"
                if node not in given_up:
                    acted.append((now, node))
                given_up.add(node)
        recent = {name for at, name in acted if now - at <= LIMITS.mass_window_s}
        assert len(recent) <= guard.limit


def vote(controld: str, number: int, *, dead: str = "", alive: str = "") -> LossVote:
    return LossVote(
        controld=controld, number=number, unreachable=tuple(dead), reachable=tuple(alive)
    )


def test_most_must_find_a_node_unreachable() -> None:
    votes = LossVotes("c1")
    members = {"c1", "c2", "c3", "c4"}
    votes.found("a", "nobody", 0.0)
    votes.found("b", "alive", 0.0)
    votes.found("c", "unable", 0.0)
    mine = votes.vote(0.1)
    assert (mine.unreachable, mine.reachable) == (("a",), ("b",))
    votes.voted(vote("c2", 1, dead="ab"), 0.1)
    assert votes.decisions({"a", "b"}, members, 0.1) == {}, "two of four are no majority"
    votes.voted(vote("c3", 1, dead="a", alive="b"), 0.1)
    votes.voted(vote("c4", 1, alive="b"), 0.1)
    assert votes.decisions({"a", "b", "c"}, members, 0.1) == {"a": "agreed", "b": "withdrawn"}


def test_the_dead_do_not_vote_and_old_votes_do_not_count() -> None:
    votes = LossVotes("c1")
    for name in ("c2", "c3", "c4"):
        votes.voted(vote(name, 5, dead="a"), 0.0)
    assert votes.decisions({"a"}, {"c1", "c2"}, 0.1) == {}
    votes.voted(vote("c2", 5, dead="a"), 0.2)
    votes.found("a", "nobody", 0.2)
    votes.vote(0.2)
    votes.voted(vote("c2", 4, alive="a"), 0.3)
    assert votes.decisions({"a"}, {"c1", "c2"}, 0.4) == {"a": "agreed"}
    assert votes.decisions({"a"}, {"c1", "c2"}, 0.4 + VALID_S) == {}


def test_a_controld_that_starts_anew_counts_from_the_beginning() -> None:
    votes = LossVotes("c1")
    votes.voted(vote("c2", 900, alive="a"), 0.0)
    votes.voted(vote("c2", 1, dead="a"), VALID_S + 0.1)
    assert votes.decisions({"a"}, {"c2"}, VALID_S + 0.2) == {"a": "agreed"}


def test_a_round_looks_first_at_what_was_seen_longest_ago() -> None:
    votes = LossVotes("c1")
    held = {f"n{number:03d}": 1 for number in range(MOST_A_ROUND + 44)}
    first = votes.due(held)
    assert len(first) == MOST_A_ROUND
    for node in first:
        votes.found(node, "nobody", 1.0)
    second = votes.due(held)
    assert set(second[:44]) == held.keys() - set(first)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["c1", "c2", "c3", "c4", "c5", "gone"]),
            st.sampled_from(["alive", "nobody", "unable"]),
            st.floats(0, 1),
        ),
        max_size=40,
    ),
    st.sets(st.sampled_from(["c1", "c2", "c3", "c4", "c5"]), min_size=1),
)
def test_nothing_is_decided_without_a_majority_of_the_living(
    story: list[tuple[str, Found, float]], members: set[str]
) -> None:
    votes = LossVotes("c1")
    newest: dict[str, tuple[float, Found]] = {}
    now = 0.0
    for number, (who, found, pause) in enumerate(story):
        now += pause
        if who == "c1":
            votes.found("a", found, now)
            votes.vote(now)
            if found == "unable":
                found = newest.get("c1", (0.0, found))[1]
        else:
            dead, alive = "a" * (found == "nobody"), "a" * (found == "alive")
            votes.voted(vote(who, number, dead=dead, alive=alive), now)
        newest[who] = (now, found)
        most = len(members) // 2 + 1
        told = [what for name, (at, what) in newest.items() if name in members and now - at < 2]
        decision = votes.decisions({"a"}, members, now).get("a")
        if decision == "agreed":
            assert told.count("nobody") >= most
        if decision == "withdrawn":
            assert told.count("alive") >= most
