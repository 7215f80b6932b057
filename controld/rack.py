"""A rack in motion: its nodes' heartbeats in, digests and verdicts out."""

from __future__ import annotations

import asyncio

import structlog

from controld.cluster import Cluster
from controld.core.liveness import RackLiveness
from controld.core.liveness_io import (
    BeatReceived,
    BusConnection,
    LivenessAction,
    LivenessEvent,
    LivenessTick,
    LossDecided,
    LossHeld,
    LostSeen,
    NodeRegisteredEvent,
    NodeRemoved,
    Observe,
    Observed,
    PeersSeen,
    Probe,
    ProbeAnswered,
    PublishDigest,
    PushVerdict,
    StoreLost,
    SuspicionOver,
)
from controld.gauges import Gauges
from controld.heard import heard
from controld.losses import Losses
from controld.observer import Observer
from controld.registry import Registry
from corefleet.background import Background, stop
from corefleet.bus import Bus, Incoming, Subscription
from corefleet.codec import encode
from corefleet.errors import Unavailable
from corefleet.messages.records import (
    ControldRegistration,
    LostNode,
    NodeRegistration,
    Ownership,
)
from corefleet.messages.wire import Heartbeat
from corefleet.store import Compare, Put
from corefleet.subjects import VERDICTS, beats, digest, lost_key, rack_key, sender_of

_log = structlog.get_logger(__name__)

_TICK_S = 0.05
_RETRY_S = 0.2
_SETTLE_S = 0.25
"""From a verdict until it is stored: meanwhile those of other racks are heard, so that the
mass-loss guard sees all of what goes at one time."""


class RackRunner:
    """Runs one rack's liveness core.

    `beats_bus` is a connection of its own: heartbeats and verdicts must not wait behind
    heavy traffic. `revision` is that of the rack's ownership in the store.
    """

    def __init__(
        self,
        cluster: Cluster,
        background: Background,
        registry: Registry,
        gauges: Gauges,
        beats_bus: Bus,
        observer: Observer,
        losses: Losses,
        core: RackLiveness,
        rack: str,
        revision: int,
    ) -> None:
        self._cluster = cluster
        self._background = background
        self._registry = registry
        self._bus = beats_bus
        self._core = core
        self._rack = rack
        self._revision = revision
        self._gauges = gauges
        self._beats = gauges.beats()
        self._gaps_s = gauges.beat_gap_s()
        self._observer = observer
        self._losses = losses
        self._nodes: set[str] = set()
        self._peers_changed = True
        self._halted = False
        self._subscription: Subscription | None = None
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Hear the rack's beats and begin to judge. Raises Unavailable."""
        self._feed(BusConnection(self._bus.connected))
        self._registry.nodes.listen(self._node_seen)
        self._registry.lost.listen(self._lost_seen)
        self._registry.controlds.listen(self._peer_seen)
        self._registry.racks.listen(self._peer_seen)
        self._subscription = await self._bus.subscribe(beats(self._rack), self._beat)
        self._ticking = self._background.spawn(self._tick(), f"rack {self._rack}")
        _log.info("rack taken over", rack=self._rack)

    def halt(self) -> None:
        """Judge no more, at once."""
        self._halted = True

    async def close(self) -> None:
        """Stop hearing. Idempotent."""
        self.halt()
        self._registry.nodes.unlisten(self._node_seen)
        self._registry.lost.unlisten(self._lost_seen)
        self._registry.controlds.unlisten(self._peer_seen)
        self._registry.racks.unlisten(self._peer_seen)
        for name in self._nodes:
            self._gauges.beat_meter.forget(name)
        await stop(self._ticking)
        if self._subscription is not None:
            subscription, self._subscription = self._subscription, None
            await subscription.close()

    def connection(self, connected: bool) -> None:
        """Our own connection for beats came or went."""
        self._feed(BusConnection(connected))

    def loss_decided(self, node: str, epoch: int, agreed: bool) -> None:
        """Most controlds found a held node lost, or not."""
        self._feed(LossDecided(node, epoch, agreed))

    def _beat(self, message: Incoming) -> None:
        beat = heard(message, Heartbeat, "heartbeat")
        if beat is None or beat.node != sender_of(message.subject):
            return
        gap_s = self._gauges.beat_meter.heard(
            beat, self._cluster.clock.monotonic(), self._cluster.clock.wall_ms()
        )
        self._beats.inc()
        if gap_s is not None:
            self._gaps_s.observe(gap_s)
        self._feed(BeatReceived(beat))

    def _node_seen(self, name: str, found: NodeRegistration | None, revision: int) -> None:
        if found is not None and found.rack == self._rack:
            self._nodes.add(name)
            self._feed(NodeRegisteredEvent(found))
        elif name in self._nodes:
            self._nodes.discard(name)
            self._gauges.beat_meter.forget(name)
            self._feed(NodeRemoved(name))

    def _lost_seen(self, name: str, found: LostNode | None, revision: int) -> None:
        if found is not None and name in self._nodes:
            self._feed(LostSeen(found))

    def _peer_seen(
        self, name: str, found: ControldRegistration | Ownership | None, revision: int
    ) -> None:
        self._peers_changed = True

    def _peers(self) -> PeersSeen:
        """Return who could look in our stead: first those that own another rack."""
        peers = self._registry.controlds.records.keys() - {self._cluster.controld}
        owners = {rack.controld for rack in self._registry.racks.records.values()} & peers
        return PeersSeen(tuple(sorted(owners)), tuple(sorted(peers - owners)))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            if self._peers_changed:
                self._peers_changed = False
                self._feed(self._peers())
            self._feed(LivenessTick())

    def _feed(self, event: LivenessEvent) -> None:
        if self._halted:
            return
        clock = self._cluster.clock
        for action in self._core.handle(event, clock.monotonic(), clock.wall_ms()):
            self._carry_out(action)

    def _carry_out(self, action: LivenessAction) -> None:
        match action:
            case PublishDigest():
                self._bus.publish(digest(self._rack), encode(action.digest))
            case Probe():
                self._background.spawn(self._probe(action), f"probe {action.node}")
            case Observe():
                self._background.spawn(self._observe(action), f"second look {action.node}")
            case SuspicionOver():
                self._gauges.false_suspicions().inc()
            case PushVerdict():
                self._push(action)
            case StoreLost():
                self._background.spawn(self._store(action), f"lost {action.lost.node}")

    def _push(self, action: PushVerdict) -> None:
        verdict = action.verdict
        self._bus.publish(VERDICTS, encode(verdict))
        if action.silence_s is not None:
            self._gauges.verdicts(verdict.state).inc()
            self._gauges.silence_s().observe(action.silence_s)
        _log.warning(
            "node judged",
            node=verdict.node,
            epoch=verdict.node_epoch,
            state=verdict.state,
            reason=verdict.reason,
        )

    async def _probe(self, action: Probe) -> None:
        found = await self._observer.look(action.address, action.node, action.node_epoch)
        self._feed(ProbeAnswered(action.node, action.node_epoch, found))

    async def _observe(self, action: Observe) -> None:
        found = await self._observer.ask(
            action.observer, action.address, action.node, action.node_epoch
        )
        self._feed(Observed(action.node, action.node_epoch, action.observer, found))

    async def _store(self, action: StoreLost) -> None:
        """Write the verdict, as long as the rack is ours and the node has not come back."""
        lost = action.lost
        if not action.agreed:
            await asyncio.sleep(_SETTLE_S)
            if not self._losses.may_store(lost.node, lost.epoch):
                self._feed(LossHeld(lost.node, lost.epoch))
                return
        put = Put(lost_key(lost.node), encode(lost))
        while not self._halted:
            known = self._registry.nodes.records.get(lost.node)
            if known is not None and known.epoch > lost.epoch:
                return
            try:
                done = await self._cluster.store.commit(
                    [Compare(rack_key(self._rack), self._revision)], [put]
                )
            except Unavailable as error:
                _log.warning("verdict not stored yet", node=lost.node, error=str(error))
                await asyncio.sleep(_RETRY_S)
                continue
            if not done.succeeded:
                _log.info("verdict not stored: the rack is not ours", rack=self._rack)
            return
