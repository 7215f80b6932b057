"""Which peers this controld watches, and when one of them is dead for certain.

Each controld holds a connection to a few others, its successors on a ring of all members.
A dead process's kernel ends the connection at once and refuses the next one: two
refusals are proof, and its registration is removed without waiting for the lease. Whoever
is silent instead (frozen, cut off, its host dead) may still decide until its lease is
over, so only the lease ends it (docs/architecture.md, rules 7 and 12).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from controld.core.rendezvous import digest
from corefleet.errors import IllegalTransition

WATCHED = 3
"""Peers that each controld watches: all three watchers of one must die for it to go unseen."""

CONFIRM_S = 0.15
"""Between two refusals: a port is closed for a moment when a process replaces itself."""

AGAIN_S = 1.0
"""Until a peer is connected to again that answered though its connection had ended."""

PeerState = Literal["watched", "asked", "doubted", "asked_again", "waiting", "expelled"]

TABLE: frozenset[tuple[PeerState, PeerState]] = frozenset(
    {
        ("watched", "asked"),
        ("asked", "doubted"),
        ("asked", "waiting"),
        ("doubted", "asked_again"),
        ("asked_again", "expelled"),
        ("asked_again", "waiting"),
        ("waiting", "watched"),
    }
)


@dataclass(slots=True, frozen=True)
class Peer:
    """A registered controld; `revision` is that of its registration."""

    controld: str
    address: str
    revision: int


@dataclass(slots=True, frozen=True)
class PeersSeen:
    """All registered controlds, ours included."""

    peers: tuple[Peer, ...]


@dataclass(slots=True, frozen=True)
class ConnectionEnded:
    """The connection to a peer ended, or there never was one."""

    peer: Peer


@dataclass(slots=True, frozen=True)
class PortAsked:
    """Answers AskPort. `refused`: its host answers, and nobody listens there."""

    peer: Peer
    refused: bool


@dataclass(slots=True, frozen=True)
class PeersTick:
    pass


PeersEvent = PeersSeen | ConnectionEnded | PortAsked | PeersTick


@dataclass(slots=True, frozen=True)
class WatchPeer:
    """Hold a connection to the peer; answered by ConnectionEnded, once."""

    peer: Peer


@dataclass(slots=True, frozen=True)
class UnwatchPeer:
    """Give the connection up; nothing answers."""

    peer: Peer


@dataclass(slots=True, frozen=True)
class AskPort:
    """Try to connect; answered by PortAsked."""

    peer: Peer


@dataclass(slots=True, frozen=True)
class Expel:
    """Remove the registration, if it still is this one, and tell the others."""

    peer: Peer


PeersAction = WatchPeer | UnwatchPeer | AskPort | Expel


class _Watched:
    __slots__ = ("due", "peer", "state")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.state: PeerState = "watched"
        self.due = 0.0
        """When a doubted or a waiting one is turned to again."""

    def move(self, state: PeerState) -> None:
        if (self.state, state) not in TABLE:
            raise IllegalTransition(f"peer {self.peer.controld}", self.state, state, "")
        self.state = state


class PeersCore:
    """Watches for one controld."""

    def __init__(self, controld: str) -> None:
        self._controld = controld
        self._watched: dict[str, _Watched] = {}

    def handle(self, event: PeersEvent, now: float) -> list[PeersAction]:
        """Take in what happened; `now` in monotonic seconds."""
        out: list[PeersAction] = []
        match event:
            case PeersSeen():
                self._on_peers(event.peers, out)
            case ConnectionEnded():
                watched = self._known(event.peer)
                if watched is not None and watched.state == "watched":
                    watched.move("asked")
                    out.append(AskPort(watched.peer))
            case PortAsked():
                self._on_asked(event, now, out)
            case PeersTick():
                for watched in self._watched.values():
                    self._on_due(watched, now, out)
        return out

    def _on_peers(self, peers: tuple[Peer, ...], out: list[PeersAction]) -> None:
        wanted = {peer.controld: peer for peer in successors(self._controld, peers)}
        for name, watched in list(self._watched.items()):
            if wanted.get(name) != watched.peer:
                del self._watched[name]
                out.append(UnwatchPeer(watched.peer))
        for name, peer in wanted.items():
            if name not in self._watched:
                self._watched[name] = _Watched(peer)
                out.append(WatchPeer(peer))

    def _on_asked(self, event: PortAsked, now: float, out: list[PeersAction]) -> None:
        watched = self._known(event.peer)
        if watched is None or watched.state not in ("asked", "asked_again"):
            return
        if not event.refused:
            watched.move("waiting")
            watched.due = now + AGAIN_S
        elif watched.state == "asked":
            watched.move("doubted")
            watched.due = now + CONFIRM_S
        else:
            watched.move("expelled")
            out.append(Expel(watched.peer))

    def _on_due(self, watched: _Watched, now: float, out: list[PeersAction]) -> None:
        if now < watched.due:
            return
        if watched.state == "doubted":
            watched.move("asked_again")
            out.append(AskPort(watched.peer))
        elif watched.state == "waiting":
            watched.move("watched")
            out.append(WatchPeer(watched.peer))

    def _known(self, peer: Peer) -> _Watched | None:
        watched = self._watched.get(peer.controld)
        return watched if watched is not None and watched.peer == peer else None


def successors(controld: str, peers: tuple[Peer, ...], count: int = WATCHED) -> tuple[Peer, ...]:
    """Return the `count` peers that follow `controld` on the ring of names' digests."""
    others = [peer for peer in peers if peer.controld != controld]
    own = digest(controld)
    others.sort(key=lambda peer: ((digest(peer.controld) - own) % 2**64, peer.controld))
    return tuple(others[:count])
