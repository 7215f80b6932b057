"""Which nodes of a rack are alive: deadlines of heartbeats, probes, verdicts.

Deadlines count from the receipt of a beat on our own monotonic clock. Silence alone
condemns nobody: the node's own port must be found dead too, and nobody else may have seen
it alive (rules 8, 10, 11).
"""

from __future__ import annotations

from dataclasses import dataclass

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
from controld.core.observers import Observers
from controld.core.watched import Watched
from corefleet.messages.records import LostNode, NodeRegistration
from corefleet.messages.wire import Heartbeat, RackDigest, Verdict

_REPEAT_S = 1.0
"""A condemned node that still beats hears its verdict at most this often."""

MOST_ANNOUNCED_S = 60.0
"""An announced restart of agentd may take as long."""


@dataclass(slots=True, frozen=True)
class LivenessTimes:
    """Seconds; see LivenessConfig."""

    suspect_after_s: float = 0.45
    lost_after_s: float = 0.65
    probe_timeout_s: float = 0.15
    cut_after_s: float = 3.0
    digest_interval_s: float = 0.25
    loop_late_s: float = 1.0
    """A node whose main loop is older than this is given nothing new."""
    loop_grace_s: float = 5.0
    """A beat whose sender's main loop is older than this is no sign of life, unless a restart
    was announced: then it may take as long as announced."""


class RackLiveness:
    """One rack, watched by its owner from `rack_epoch` on."""

    def __init__(
        self,
        rack: str,
        controld: str,
        rack_epoch: int,
        times: LivenessTimes | None = None,
        connected: bool = True,
        observer_offset: int = 0,
    ) -> None:
        self._rack = rack
        self._controld = controld
        self._rack_epoch = rack_epoch
        self._times = times or LivenessTimes()
        self._connected = connected
        self._nodes: dict[str, Watched] = {}
        self._lost: dict[str, int] = {}
        """Newest epoch with a verdict in the store."""
        self._observers = Observers(observer_offset)
        self._ticked_at: float | None = None
        self._digest_at = 0.0
        self._number = 0

    def handle(self, event: LivenessEvent, now: float, wall_ms: int) -> list[LivenessAction]:
        """Take in what happened; `now` in monotonic seconds, `wall_ms` since the epoch."""
        out: list[LivenessAction] = []
        match event:
            case BeatReceived():
                self._on_beat(event.beat, now, out)
            case LivenessTick():
                self._on_tick(now, wall_ms, out)
            case ProbeAnswered() | Observed():
                self._on_look(event, now, wall_ms, out)
            case LossHeld() | LossDecided():
                self._on_guard(event, now, out)
            case NodeRegisteredEvent():
                self._on_registered(event.registration, now)
            case NodeRemoved():
                self._nodes.pop(event.node, None)
            case LostSeen():
                self._on_lost_seen(event.lost)
            case PeersSeen():
                self._observers.seen(event.preferred, event.others)
            case BusConnection():
                self._on_connection(event.connected, now)
        return out

    def _on_registered(self, registration: NodeRegistration, now: float) -> None:
        node = self._nodes.get(registration.node)
        if node is not None and registration.epoch < node.epoch:
            return
        if node is not None and registration.epoch == node.epoch:
            node.describe(registration)
            return
        node = self._nodes[registration.node] = Watched(registration, now)
        if node.epoch <= self._lost.get(node.name, 0):
            node.state = "lost"
            node.stored = True

    def _on_lost_seen(self, lost: LostNode) -> None:
        self._lost[lost.node] = max(lost.epoch, self._lost.get(lost.node, 0))
        node = self._nodes.get(lost.node)
        if node is not None and node.epoch <= lost.epoch:
            node.state = "lost"
            node.stored = True

    def _on_connection(self, connected: bool, now: float) -> None:
        if connected and not self._connected:
            self._restart_all(now)
        self._connected = connected

    def _restart_all(self, now: float) -> None:
        for node in self._nodes.values():
            node.restart(now)

    def _on_beat(self, beat: Heartbeat, now: float, out: list[LivenessAction]) -> None:
        node = self._nodes.get(beat.node)
        if node is None or beat.epoch != node.epoch:
            return
        if node.state == "lost":
            # It lives, but its attempts were given away: it must register anew.
            if self._connected and now - node.repeated_at >= _REPEAT_S:
                node.repeated_at = now
                verdict = self._verdict(node, "lost", "found lost before; register anew")
                out.append(PushVerdict(verdict))
            return
        if node.beat is not None and beat.number <= node.beat.number:
            return
        node.beat = beat
        times = self._times
        announced_s = min(beat.restart_grace_s, MOST_ANNOUNCED_S)
        if beat.loop_age_s < max(times.loop_grace_s, announced_s):
            if node.silent and node.state == "suspect":
                out.append(SuspicionOver(node.name))
            node.restart(now)
            node.state = "ready" if beat.loop_age_s < times.loop_late_s else "suspect"

    def _on_tick(self, now: float, wall_ms: int, out: list[LivenessAction]) -> None:
        times = self._times
        stood_still = self._ticked_at is not None and now - self._ticked_at > times.suspect_after_s
        self._ticked_at = now
        if not self._connected:
            return
        if stood_still:
            # Beats may wait unread: what we did not hear meanwhile is no silence of theirs.
            self._restart_all(now)
        for node in self._nodes.values():
            if now - node.heard_at >= times.suspect_after_s:
                self._judge(node, now, wall_ms, out)
        if now >= self._digest_at:
            late = now - self._digest_at >= times.digest_interval_s
            self._digest_at = (now if late else self._digest_at) + times.digest_interval_s
            out.append(self._digest(now))

    def _on_look(
        self,
        event: ProbeAnswered | Observed,
        now: float,
        wall_ms: int,
        out: list[LivenessAction],
    ) -> None:
        if isinstance(event, Observed) and event.found == "unable":
            self._observers.failed(event.observer, now)
        node = self._nodes.get(event.node)
        if node is None or node.epoch != event.node_epoch:
            return
        look = node.looks.second if isinstance(event, Observed) else node.looks.own
        look.ended(event.found, now, node.heard_at, self._times.probe_timeout_s)
        if self._connected and now - node.heard_at >= self._times.suspect_after_s:
            self._judge(node, now, wall_ms, out)

    def _on_guard(
        self, event: LossHeld | LossDecided, now: float, out: list[LivenessAction]
    ) -> None:
        node = self._nodes.get(event.node)
        if node is None or node.epoch != event.node_epoch or node.stored or node.lost is None:
            return
        if isinstance(event, LossHeld):
            if node.state == "lost":
                node.state = "held"
                self._digest_at = now
        elif node.state == "held":
            if event.agreed:
                node.state = "lost"
                out.append(StoreLost(node.lost, agreed=True))
                return
            node.looks.restart()
            node.looks.second.alive_at = now
            node.state = "suspect"

    def _judge(self, node: Watched, now: float, wall_ms: int, out: list[LivenessAction]) -> None:
        """Decide on a node that missed beats; called with our own connection standing."""
        if node.state == "lost":
            return
        node.silent = True
        if node.state not in ("cut", "held"):
            node.state = "suspect"
        times, looks = self._times, node.looks
        silence = now - node.heard_at
        if node.state == "held":
            if looks.alive(now):
                node.state = "suspect"
        elif silence >= times.lost_after_s and looks.nobody(now, self._observers.none):
            self._condemn(node, silence, now, wall_ms, out)
            return
        if silence >= times.cut_after_s and node.state == "suspect" and looks.alive(now):
            node.state = "cut"
            reason = f"answers probes, but silent on NATS for {silence:.2f} s"
            out.append(PushVerdict(self._verdict(node, "cut", reason), silence))
        self._look(node, now, out)

    def _look(self, node: Watched, now: float, out: list[LivenessAction]) -> None:
        """Look ourselves, and let another look, each when its turn has come (rule 11)."""
        deadline_s = self._times.probe_timeout_s
        own, second = node.looks.own, node.looks.second
        if own.due(now, deadline_s):
            own.began(now)
            out.append(Probe(node.name, node.epoch, node.probe_address))
        if second.due(now, deadline_s):
            observer = self._observers.pick(now)
            if observer:
                second.began(now)
                out.append(Observe(node.name, node.epoch, node.probe_address, observer))

    def _condemn(
        self,
        node: Watched,
        silence: float,
        now: float,
        wall_ms: int,
        out: list[LivenessAction],
    ) -> None:
        second = "no second observer" if node.looks.second.found is None else "nor to another's"
        reason = f"silent for {silence:.2f} s and no answer to a probe, {second}"
        node.state = "lost"
        node.repeated_at = now
        node.lost = LostNode(
            node=node.name, epoch=node.epoch, by=self._controld, at_ms=wall_ms, reason=reason
        )
        out.append(PushVerdict(self._verdict(node, "lost", reason, provisional=True), silence))
        out.append(StoreLost(node.lost))

    def _verdict(
        self, node: Watched, state: str, reason: str, provisional: bool = False
    ) -> Verdict:
        return Verdict(
            rack=self._rack,
            rack_epoch=self._rack_epoch,
            node=node.name,
            node_epoch=node.epoch,
            state="cut" if state == "cut" else "lost",
            reason=reason,
            provisional=provisional,
        )

    def _digest(self, now: float) -> PublishDigest:
        self._number += 1
        views = [
            node.view(node.state, now) for node in self._nodes.values() if node.state is not None
        ]
        digest = RackDigest(
            rack=self._rack,
            controld=self._controld,
            epoch=self._rack_epoch,
            number=self._number,
            nodes=tuple(views),
        )
        return PublishDigest(digest)
