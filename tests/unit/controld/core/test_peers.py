"""Who is watched, and who is taken for dead."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controld.core.peers import (
    AGAIN_S,
    CONFIRM_S,
    WATCHED,
    AskPort,
    ConnectionEnded,
    Expel,
    Peer,
    PeersCore,
    PeersEvent,
    PeersSeen,
    PeersTick,
    PortAsked,
    UnwatchPeer,
    WatchPeer,
    successors,
)

PEERS = tuple(Peer(f"c{number}", f"10.0.0.{number}:7070", number) for number in range(100))


def watching(*peers: Peer) -> PeersCore:
    core = PeersCore("me")
    me = Peer("me", "10.0.1.1:7070", 500)
    assert core.handle(PeersSeen((*peers, me)), 0.0) == [WatchPeer(peer) for peer in peers]
    return core


def test_each_of_a_hundred_is_watched_by_three() -> None:
    watched = Counter(peer.controld for own in PEERS for peer in successors(own.controld, PEERS))
    assert set(watched.values()) == {WATCHED}
    assert len(watched) == len(PEERS)


def test_one_that_refuses_twice_is_expelled() -> None:
    [peer] = PEERS[:1]
    core = watching(peer)
    assert core.handle(ConnectionEnded(peer), 1.0) == [AskPort(peer)]
    assert core.handle(PortAsked(peer, refused=True), 1.01) == []
    assert core.handle(PeersTick(), 1.0 + CONFIRM_S) == []
    assert core.handle(PeersTick(), 1.02 + CONFIRM_S) == [AskPort(peer)]
    assert core.handle(PortAsked(peer, refused=True), 1.2) == [Expel(peer)]
    assert core.handle(PeersTick(), 9.0) == []


@pytest.mark.parametrize("refusals", [0, 1])
def test_one_that_answers_or_is_silent_is_watched_again(refusals: int) -> None:
    [peer] = PEERS[:1]
    core = watching(peer)
    now = 1.0
    assert core.handle(ConnectionEnded(peer), now) == [AskPort(peer)]
    for _ in range(refusals):
        core.handle(PortAsked(peer, refused=True), now)
        now += CONFIRM_S
        assert core.handle(PeersTick(), now) == [AskPort(peer)]
    assert core.handle(PortAsked(peer, refused=False), now) == []
    assert core.handle(PeersTick(), now + AGAIN_S / 2) == []
    assert core.handle(PeersTick(), now + AGAIN_S) == [WatchPeer(peer)]


def test_an_answer_about_an_earlier_life_is_no_news() -> None:
    [peer] = PEERS[:1]
    core = watching(peer)
    core.handle(ConnectionEnded(peer), 1.0)
    reborn = Peer(peer.controld, peer.address, peer.revision + 900)
    assert core.handle(PeersSeen((reborn,)), 1.1) == [UnwatchPeer(peer), WatchPeer(reborn)]
    assert core.handle(PortAsked(peer, refused=True), 1.2) == []
    assert core.handle(ConnectionEnded(peer), 1.3) == []
    assert core.handle(PeersTick(), 5.0) == []


def test_who_leaves_is_watched_no_more_and_the_next_takes_its_place() -> None:
    core = PeersCore("me")
    first = core.handle(PeersSeen(PEERS[:5]), 0.0)
    gone = first[0].peer
    left = tuple(peer for peer in PEERS[:5] if peer != gone)
    changed = core.handle(PeersSeen(left), 1.0)
    assert changed[0] == UnwatchPeer(gone)
    assert {action.peer for action in changed[1:]} == set(successors("me", left)) - {
        action.peer for action in first
    }


@given(st.lists(st.tuples(st.sampled_from(["end", "refuse", "answer", "tick"]), st.floats(0, 2))))
def test_nobody_is_expelled_without_two_refusals_apart(told: list[tuple[str, float]]) -> None:
    [peer] = PEERS[:1]
    core = watching(peer)
    events: dict[str, PeersEvent] = {
        "end": ConnectionEnded(peer),
        "refuse": PortAsked(peer, refused=True),
        "answer": PortAsked(peer, refused=False),
        "tick": PeersTick(),
    }
    now, asked, refused_at = 0.0, False, list[float]()
    for what, later in told:
        now += later
        event = events[what]
        if isinstance(event, PortAsked):
            if not asked:
                continue
            asked = False
            refused_at = [*refused_at, now] if event.refused else []
        for action in core.handle(event, now):
            asked = asked or isinstance(action, AskPort)
            if isinstance(action, Expel):
                assert len(refused_at) == 2
                assert refused_at[1] - refused_at[0] >= CONFIRM_S
