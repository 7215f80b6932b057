"""Second looks: this controld looks at silent nodes of others' racks, and asks for looks."""

from __future__ import annotations

import structlog

from controld.cluster import Cluster
from controld.core.liveness_io import Found
from controld.gauges import Gauges
from controld.heard import heard
from controld.probe import probe as probe_port
from corefleet.background import Background
from corefleet.bus import Bus, Incoming, Subscription
from corefleet.codec import decode, encode
from corefleet.errors import CorruptRecord, Unavailable
from corefleet.messages.wire import NodeObserved, ObserveNode
from corefleet.subjects import observe

_log = structlog.get_logger(__name__)

_SHARE_OF_DEADLINE = 0.7
"""The observer's own probe ends so early that its answer is back within the deadline."""


class Observer:
    """Answers and asks on `bus`, the connection that heartbeats have.

    `deadline_s` is LivenessConfig.probe_timeout_s.
    """

    def __init__(
        self,
        cluster: Cluster,
        background: Background,
        gauges: Gauges,
        bus: Bus,
        deadline_s: float,
    ) -> None:
        self._cluster = cluster
        self._background = background
        self._gauges = gauges
        self._bus = bus
        self._deadline_s = deadline_s
        self._subscription: Subscription | None = None
        self.probe = probe_port
        """How to look at a port; another one makes us blind to some nodes."""

    async def start(self) -> None:
        """Begin to answer. Raises Unavailable."""
        self._subscription = await self._bus.subscribe(observe(self._cluster.controld), self._asked)

    async def close(self) -> None:
        """Stop answering. Idempotent."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.close()

    async def look(self, address: str, node: str, epoch: int) -> Found:
        """Probe a node ourselves."""
        found = await self.probe(address, node, epoch, self._deadline_s)
        self._gauges.looks("own", found).inc()
        return found

    async def ask(self, observer: str, address: str, node: str, epoch: int) -> Found:
        """Let another controld look; `unable` when no answer of it counts."""
        question = ObserveNode(node=node, node_epoch=epoch, address=address)
        found: Found = "unable"
        try:
            payload = await self._bus.request(observe(observer), encode(question), self._deadline_s)
            answer = decode(payload, NodeObserved)
            if answer.reached and (answer.node, answer.node_epoch) == (node, epoch):
                found = "alive" if answer.alive else "nobody"
        except Unavailable:
            # No answer in time or no connection: the core asks another one.
            pass
        except CorruptRecord as error:
            _log.warning("second look is not usable", observer=observer, error=str(error))
        self._gauges.looks("second", found).inc()
        return found

    def _asked(self, message: Incoming) -> None:
        asked = heard(message, ObserveNode, "question for a second look")
        if asked is None:
            return
        self._background.spawn(self._answer(asked, message.reply), f"observe {asked.node}")

    async def _answer(self, asked: ObserveNode, reply: str) -> None:
        found = await self.probe(
            asked.address, asked.node, asked.node_epoch, _SHARE_OF_DEADLINE * self._deadline_s
        )
        self._gauges.looks("for_peer", found).inc()
        if not (self._bus.connected and self._cluster.bus.connected):
            found = "unable"
        answer = NodeObserved(
            node=asked.node,
            node_epoch=asked.node_epoch,
            observer=self._cluster.controld,
            alive=found == "alive",
            reached=found != "unable",
        )
        self._bus.publish(reply, encode(answer))
