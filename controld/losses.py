"""The mass-loss guard in motion: held losses are looked at and voted on until most agree."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import structlog

from controld.cluster import Cluster
from controld.core.loss_votes import LossVotes
from controld.core.mass_loss import MassLoss
from controld.gauges import Gauges
from controld.heard import heard
from controld.observer import Observer
from controld.registry import Registry
from corefleet.background import Background, stop
from corefleet.bus import Bus, Incoming
from corefleet.codec import encode
from corefleet.messages.wire import LossVote
from corefleet.subjects import LOSS_VOTES

_log = structlog.get_logger(__name__)

_POLL_S = 0.1
_ROUND_S = 0.5
"""From one vote to the next while something is held."""
_REMIND_S = 10.0
_PROBES_AT_ONCE = 64


class Losses:
    """Votes on all that is held anywhere; decides on what the racks owned here hold."""

    def __init__(
        self,
        cluster: Cluster,
        background: Background,
        registry: Registry,
        gauges: Gauges,
        bus: Bus,
        guard: MassLoss,
        observer: Observer,
    ) -> None:
        self._cluster = cluster
        self._background = background
        self._registry = registry
        self._gauges = gauges
        self._bus = bus
        self._guard = guard
        self._observer = observer
        self._votes = LossVotes(cluster.controld)
        self._open = AsyncExitStack()
        self._round: asyncio.Task[None] | None = None
        self._round_at = 0.0
        self._reminded_at: float | None = None
        self.decided: Callable[[str, int, bool], None] = lambda node, epoch, agreed: None
        """Told node, epoch and whether most find it lost; not told what they do not agree on."""

    async def start(self) -> None:
        """Begin to guard. Raises Unavailable."""
        self._look_around()
        subscription = await self._bus.subscribe(LOSS_VOTES, self._voted)
        self._open.push_async_callback(subscription.close)
        polling = self._background.spawn(self._poll(), "mass loss")
        self._open.push_async_callback(stop, polling)

    async def close(self) -> None:
        """Guard no more. Idempotent."""
        await self._open.aclose()
        await stop(self._round)

    def may_store(self, node: str, epoch: int) -> bool:
        """Return whether a verdict of ours may be stored with nobody asked."""
        return self._guard.settle(node, epoch, self._cluster.clock.monotonic())

    def _look_around(self) -> None:
        registry = self._registry
        self._guard.cluster(len(registry.nodes.records), registry.drains.records.keys())

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            self._look_around()
            held, now = self._guard.held, self._cluster.clock.monotonic()
            self._gauges.held_nodes().set(len(held))
            if held:
                self._hold(held, now)
            elif self._reminded_at is not None:
                self._reminded_at = None
                _log.warning("mass loss is over: nothing is held any more")

    def _hold(self, held: dict[str, int], now: float) -> None:
        members = self._registry.controlds.records.keys()
        if self._reminded_at is None or now - self._reminded_at >= _REMIND_S:
            self._reminded_at = now
            _log.warning(
                "mass loss: requeueing is held until most controlds agree",
                held=len(held),
                registered=len(self._registry.nodes.records),
                limit=self._guard.limit,
                controlds=len(members),
            )
        if now - self._round_at >= _ROUND_S and (self._round is None or self._round.done()):
            self._round_at = now
            self._round = self._background.spawn(self._vote(held), "mass loss vote")
        for node, decision in self._votes.decisions(held.keys(), members, now).items():
            self.decided(node, held[node], decision == "agreed")

    async def _vote(self, held: dict[str, int]) -> None:
        """Look at what is held, some at a time, and tell all what was found."""
        free = asyncio.Semaphore(_PROBES_AT_ONCE)

        async def look(node: str) -> None:
            known = self._registry.nodes.records.get(node)
            if known is None or known.epoch != held[node]:
                return
            async with free:
                found = await self._observer.look(known.probe_address, node, known.epoch)
            self._votes.found(node, found, self._cluster.clock.monotonic())

        async with asyncio.TaskGroup() as looks:
            for node in self._votes.due(held):
                looks.create_task(look(node))
        if self._bus.connected:
            vote = self._votes.vote(self._cluster.clock.monotonic())
            self._bus.publish(LOSS_VOTES, encode(vote))

    def _voted(self, message: Incoming) -> None:
        vote = heard(message, LossVote, "vote on a mass loss")
        if vote is None:
            return
        self._votes.voted(vote, self._cluster.clock.monotonic())
