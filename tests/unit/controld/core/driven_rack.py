"""A rack's liveness core, driven by hand."""

from __future__ import annotations

from typing import TypeVar

from controld.core.liveness import LivenessTimes, RackLiveness
from controld.core.liveness_io import (
    BeatReceived,
    Found,
    LivenessAction,
    LivenessEvent,
    LivenessTick,
    NodeRegisteredEvent,
    Observe,
    Observed,
    PeersSeen,
    Probe,
    ProbeAnswered,
    PublishDigest,
    PushVerdict,
)
from corefleet.messages.records import NodeRegistration
from corefleet.messages.wire import Heartbeat, NodeView

A = TypeVar("A")


class DrivenRack:
    """One liveness core under a hand-moved clock that ticks every 10 ms."""

    def __init__(
        self,
        *nodes: str,
        connected: bool = True,
        answers: bool | None = None,
        peers: tuple[str, ...] = (),
        observed: Found | None = None,
    ) -> None:
        self.core = RackLiveness("r1", "c1", 7, LivenessTimes(), connected)
        self.now = 100.0
        self.number = 0
        self.answers = answers
        """What every probe finds, None: probes are not answered by themselves."""
        self.observed = observed
        """What every second look finds, None: they are not answered by themselves."""
        self.seen: list[tuple[float, LivenessAction]] = []
        self.feed(PeersSeen((), peers))
        for node in nodes:
            self.feed(NodeRegisteredEvent(self.registration(node)))

    @staticmethod
    def registration(node: str, epoch: int = 1, draining: bool = False) -> NodeRegistration:
        return NodeRegistration(
            node=node, epoch=epoch, rack="r1", probe_address=f"{node}:9", draining=draining
        )

    def feed(self, event: LivenessEvent) -> list[LivenessAction]:
        actions = self.core.handle(event, self.now, int(self.now * 1000))
        self.seen += [(self.now, action) for action in actions]
        for action in actions:
            if isinstance(action, Probe) and self.answers is not None:
                found: Found = "alive" if self.answers else "nobody"
                self.feed(ProbeAnswered(action.node, action.node_epoch, found))
            if isinstance(action, Observe) and self.observed is not None:
                seen = Observed(action.node, action.node_epoch, action.observer, self.observed)
                self.feed(seen)
        return actions

    def beat(self, node: str = "a", epoch: int = 1, **more: float) -> list[LivenessAction]:
        self.number += 1
        beat = Heartbeat(node=node, rack="r1", epoch=epoch, number=self.number, **more)  # type: ignore[arg-type]
        return self.feed(BeatReceived(beat))

    def wait(self, seconds: float, beating: tuple[str, ...] = ()) -> None:
        """Tick on, with a beat of each of `beating` every 200 ms."""
        for step in range(round(seconds * 100)):
            self.now += 0.01
            if step % 20 == 19:
                for node in beating:
                    self.beat(node)
            self.feed(LivenessTick())

    def all(self, kind: type[A]) -> list[A]:
        return [action for _, action in self.seen if isinstance(action, kind)]

    def when(self, kind: type[LivenessAction]) -> list[float]:
        return [round(at - 100.0, 2) for at, action in self.seen if isinstance(action, kind)]

    def view(self, node: str = "a") -> NodeView | None:
        """The node in the newest digest."""
        digests = self.all(PublishDigest)
        views = [view for view in digests[-1].digest.nodes if view.node == node]
        return views[0] if views else None

    def states(self) -> list[str]:
        return [verdict.verdict.state for verdict in self.all(PushVerdict)]
