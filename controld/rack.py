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
    LostSeen,
    NodeRegisteredEvent,
    NodeRemoved,
    Probe,
    ProbeAnswered,
    PublishDigest,
    PushVerdict,
    StoreLost,
)
from controld.registry import Registry
from corefleet.background import Background, stop
from corefleet.bus import Bus, Incoming, Subscription
from corefleet.codec import decode, encode
from corefleet.errors import CorruptRecord, Unavailable
from corefleet.messages.records import LostNode, NodeRegistration
from corefleet.messages.wire import Heartbeat
from corefleet.store import Compare, Put
from corefleet.subjects import VERDICTS, beats, digest, lost_key, rack_key

_log = structlog.get_logger(__name__)

_TICK_S = 0.05
_RETRY_S = 0.2


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
        beats_bus: Bus,
        core: RackLiveness,
        rack: str,
        revision: int,
        probe_timeout_s: float,
    ) -> None:
        self._cluster = cluster
        self._background = background
        self._registry = registry
        self._bus = beats_bus
        self._core = core
        self._rack = rack
        self._revision = revision
        self._probe_timeout_s = probe_timeout_s
        self._nodes: set[str] = set()
        self._halted = False
        self._subscription: Subscription | None = None
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Hear the rack's beats and begin to judge. Raises Unavailable."""
        self._feed(BusConnection(self._bus.connected))
        self._registry.nodes.listen(self._node_seen)
        self._registry.lost.listen(self._lost_seen)
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
        await stop(self._ticking)
        if self._subscription is not None:
            subscription, self._subscription = self._subscription, None
            await subscription.close()

    def connection(self, connected: bool) -> None:
        """Our own connection for beats came or went."""
        self._feed(BusConnection(connected))

    def _beat(self, message: Incoming) -> None:
        try:
            beat = decode(message.payload, Heartbeat)
        except CorruptRecord as error:
            _log.warning("heartbeat is not usable", subject=message.subject, error=str(error))
            return
        self._feed(BeatReceived(beat))

    def _node_seen(self, name: str, found: NodeRegistration | None, revision: int) -> None:
        if found is not None and found.rack == self._rack:
            self._nodes.add(name)
            self._feed(NodeRegisteredEvent(found))
        elif name in self._nodes:
            self._nodes.discard(name)
            self._feed(NodeRemoved(name))

    def _lost_seen(self, name: str, found: LostNode | None, revision: int) -> None:
        if found is not None and name in self._nodes:
            self._feed(LostSeen(found))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
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
            case PushVerdict():
                verdict = action.verdict
                _log.warning(
                    "node judged",
                    node=verdict.node,
                    epoch=verdict.node_epoch,
                    state=verdict.state,
                    reason=verdict.reason,
                )
                self._bus.publish(VERDICTS, encode(verdict))
            case StoreLost():
                self._background.spawn(self._store(action.lost), f"lost {action.lost.node}")

    async def _probe(self, action: Probe) -> None:
        alive = await answers_probe(
            action.address, action.node, action.node_epoch, self._probe_timeout_s
        )
        self._feed(ProbeAnswered(action.node, action.node_epoch, alive))

    async def _store(self, lost: LostNode) -> None:
        """Write the verdict, as long as the rack is ours and the node has not come back."""
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


async def answers_probe(address: str, node: str, epoch: int, timeout_s: float) -> bool:
    """Return whether the agentd of `node` at `epoch` answers on `address` within the time.

    The question is the line `probe`, the answer `corefleet <node> <epoch>`.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return False
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"probe\n")
            line = await reader.readline()
    except (OSError, TimeoutError, ValueError):
        return False
    finally:
        if writer is not None:
            writer.transport.abort()
    return line == f"corefleet {node} {epoch}\n".encode()
