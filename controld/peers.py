"""Peers watched: connections held, ports asked, the dead taken off the list of members."""

from __future__ import annotations

import asyncio
from typing import Protocol

import structlog

from controld.cluster import Cluster
from controld.core.peers import (
    AskPort,
    ConnectionEnded,
    Expel,
    Peer,
    PeersAction,
    PeersCore,
    PeersEvent,
    PeersSeen,
    PeersTick,
    PortAsked,
    UnwatchPeer,
    WatchPeer,
)
from controld.gauges import Gauges
from controld.registry import Registry
from corefleet.background import Background, stop
from corefleet.codec import encode
from corefleet.errors import Unavailable
from corefleet.messages.records import ControldRegistration
from corefleet.messages.wire import PeerSuspected
from corefleet.store import Compare, Delete
from corefleet.subjects import PEERS, controld_key

_log = structlog.get_logger(__name__)

_TICK_S = 0.05
_TRIES = 5
_RETRY_S = 0.2


class PeerReach(Protocol):
    """How a peer is reached, at its address as registered."""

    async def until_gone(self, address: str) -> None:
        """Hold a connection; return when it ended or could not be made."""

    async def refused(self, address: str) -> bool:
        """Return whether the host answers that nobody listens there."""


class Peers:
    """Watches the peers that this controld has to watch."""

    def __init__(
        self,
        cluster: Cluster,
        background: Background,
        registry: Registry,
        gauges: Gauges,
        reach: PeerReach,
    ) -> None:
        self._cluster = cluster
        self._background = background
        self._registry = registry
        self._gauges = gauges
        self._reach = reach
        self._core = PeersCore(cluster.controld)
        self._held: dict[str, asyncio.Task[None]] = {}
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to watch."""
        self._registry.controlds.listen(self._seen)
        self._ticking = self._background.spawn(self._tick(), "peers")

    async def close(self) -> None:
        """Give all connections up. Idempotent."""
        self._registry.controlds.unlisten(self._seen)
        await stop(self._ticking)
        held, self._held = self._held, {}
        for task in held.values():
            await stop(task)

    def _seen(self, name: str, found: ControldRegistration | None, revision: int) -> None:
        table = self._registry.controlds
        self._feed(
            PeersSeen(
                tuple(
                    Peer(known, registration.address, table.revisions[known])
                    for known, registration in table.records.items()
                )
            )
        )

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._feed(PeersTick())

    def _feed(self, event: PeersEvent) -> None:
        for action in self._core.handle(event, self._cluster.clock.monotonic()):
            self._carry_out(action)

    def _carry_out(self, action: PeersAction) -> None:
        peer = action.peer
        match action:
            case WatchPeer():
                self._held[peer.controld] = self._background.spawn(
                    self._watch(peer), f"watch {peer.controld}"
                )
            case UnwatchPeer():
                held = self._held.pop(peer.controld, None)
                if held is not None:
                    held.cancel()
            case AskPort():
                self._background.spawn(self._ask(peer), f"ask {peer.controld}")
            case Expel():
                self._background.spawn(self._expel(peer), f"expel {peer.controld}")

    async def _watch(self, peer: Peer) -> None:
        await self._reach.until_gone(peer.address)
        self._feed(ConnectionEnded(peer))

    async def _ask(self, peer: Peer) -> None:
        refused = await self._reach.refused(peer.address)
        self._feed(PortAsked(peer, refused))

    async def _expel(self, peer: Peer) -> None:
        """Remove a dead peer's registration: its units can be claimed at once."""
        key = controld_key(peer.controld)
        for _ in range(_TRIES):
            try:
                done = await self._cluster.store.commit(
                    [Compare(key, peer.revision)], [Delete(key)]
                )
            except Unavailable as error:
                _log.warning("dead peer not removed yet", peer=peer.controld, error=str(error))
                await asyncio.sleep(_RETRY_S)
                continue
            if done.succeeded:
                self._gauges.expelled().inc()
                _log.warning(
                    "peer is dead: its port refuses connections",
                    peer=peer.controld,
                    address=peer.address,
                )
                told = PeerSuspected(controld=peer.controld, by=self._cluster.controld)
                self._cluster.bus.publish(PEERS, encode(told))
            return
        _log.warning("dead peer not removed: its lease will end it", peer=peer.controld)
