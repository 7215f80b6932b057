"""Which nodes of a rack are alive: deadlines of heartbeats, probes, verdicts.

Deadlines count from the receipt of a beat on our own monotonic clock. Silence alone
condemns nobody: the node's own port must be found dead too (rules 8, 10, 11).
"""

from __future__ import annotations

from dataclasses import dataclass

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
from corefleet.messages.records import LostNode, NodeRegistration
from corefleet.messages.wire import Heartbeat, NodeState, NodeView, RackDigest, Verdict

_REPEAT_S = 1.0
"""A condemned node that still beats hears its verdict at most this often."""

_PROBE_PATIENCE = 4.0
"""Probe time-outs after which a probe without an answer is given up."""

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


class _Watched:
    """A node of the rack."""

    __slots__ = (
        "answered",
        "beat",
        "draining",
        "epoch",
        "heard_at",
        "name",
        "nobody",
        "probe_address",
        "probe_at",
        "probe_sent_at",
        "probing",
        "repeated_at",
        "state",
    )

    def __init__(self, registration: NodeRegistration, now: float) -> None:
        self.name = registration.node
        self.epoch = registration.epoch
        self.heard_at = now
        self.beat: Heartbeat | None = None
        self.state: NodeState | None = None
        """None: not heard of yet, and not yet suspect either."""
        self.probing = False
        self.probe_sent_at = 0.0
        self.probe_at = 0.0
        self.answered = False
        """The newest probe since the last beat was answered."""
        self.nobody = False
        """The newest probe since the last beat found nobody."""
        self.repeated_at = float("-inf")
        self.describe(registration)

    def describe(self, registration: NodeRegistration) -> None:
        self.probe_address = registration.probe_address
        self.draining = registration.draining

    def restart(self, now: float) -> None:
        """Count all deadlines from now."""
        self.heard_at = now
        self.answered = self.nobody = False
        self.probe_at = 0.0


class RackLiveness:
    """One rack, watched by its owner from `rack_epoch` on."""

    def __init__(
        self,
        rack: str,
        controld: str,
        rack_epoch: int,
        times: LivenessTimes | None = None,
        connected: bool = True,
    ) -> None:
        self._rack = rack
        self._controld = controld
        self._rack_epoch = rack_epoch
        self._times = times or LivenessTimes()
        self._connected = connected
        self._nodes: dict[str, _Watched] = {}
        self._lost: dict[str, int] = {}
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
            case ProbeAnswered():
                self._on_probe(event, now, wall_ms, out)
            case NodeRegisteredEvent():
                self._on_registered(event.registration, now)
            case NodeRemoved():
                self._nodes.pop(event.node, None)
            case LostSeen():
                self._on_lost_seen(event.lost)
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
        node = self._nodes[registration.node] = _Watched(registration, now)
        if node.epoch <= self._lost.get(node.name, 0):
            node.state = "lost"

    def _on_lost_seen(self, lost: LostNode) -> None:
        self._lost[lost.node] = max(lost.epoch, self._lost.get(lost.node, 0))
        node = self._nodes.get(lost.node)
        if node is not None and node.epoch <= lost.epoch:
            node.state = "lost"

    def _on_connection(self, connected: bool, now: float) -> None:
        if connected and not self._connected:
            for node in self._nodes.values():
                node.restart(now)
        self._connected = connected

    def _on_beat(self, beat: Heartbeat, now: float, out: list[LivenessAction]) -> None:
        node = self._nodes.get(beat.node)
        if node is None or beat.epoch != node.epoch:
            return
        if node.state == "lost":
            # It lives, but its attempts were given away: it must register anew.
            if self._connected and now - node.repeated_at >= _REPEAT_S:
                node.repeated_at = now
                out.append(self._verdict(node, "lost", "found lost before; register anew"))
            return
        if node.beat is not None and beat.number <= node.beat.number:
            return
        node.beat = beat
        times = self._times
        announced_s = min(beat.restart_grace_s, MOST_ANNOUNCED_S)
        if beat.loop_age_s < max(times.loop_grace_s, announced_s):
            node.restart(now)
            node.state = "ready" if beat.loop_age_s < times.loop_late_s else "suspect"

    def _on_tick(self, now: float, wall_ms: int, out: list[LivenessAction]) -> None:
        if not self._connected:
            return
        for node in self._nodes.values():
            if now - node.heard_at >= self._times.suspect_after_s:
                self._judge(node, now, wall_ms, out)
        if now >= self._digest_at:
            late = now - self._digest_at >= self._times.digest_interval_s
            self._digest_at = (now if late else self._digest_at) + self._times.digest_interval_s
            out.append(self._digest(now))

    def _on_probe(
        self, event: ProbeAnswered, now: float, wall_ms: int, out: list[LivenessAction]
    ) -> None:
        node = self._nodes.get(event.node)
        if node is None or node.epoch != event.node_epoch:
            return
        node.probing = False
        node.probe_at = now + self._times.probe_timeout_s
        if node.heard_at > node.probe_sent_at:
            return
        node.answered, node.nobody = event.alive, not event.alive
        if self._connected and now - node.heard_at >= self._times.suspect_after_s:
            self._judge(node, now, wall_ms, out)

    def _judge(self, node: _Watched, now: float, wall_ms: int, out: list[LivenessAction]) -> None:
        """Decide on a node that missed beats; called with our own connection standing."""
        if node.state == "lost":
            return
        if node.state != "cut":
            node.state = "suspect"
        times = self._times
        silence = now - node.heard_at
        if silence >= times.lost_after_s and node.nobody:
            node.state = "lost"
            self._lost[node.name] = node.epoch
            reason = f"silent for {silence:.2f} s and no answer to a probe"
            out.append(self._verdict(node, "lost", reason))
            lost = LostNode(
                node=node.name,
                epoch=node.epoch,
                by=self._controld,
                at_ms=wall_ms,
                reason=reason,
            )
            out.append(StoreLost(lost))
            return
        if silence >= times.cut_after_s and node.answered and node.state == "suspect":
            node.state = "cut"
            reason = f"answers probes, but silent on NATS for {silence:.2f} s"
            out.append(self._verdict(node, "cut", reason))
        given_up = now - node.probe_sent_at >= _PROBE_PATIENCE * times.probe_timeout_s
        if (not node.probing or given_up) and now >= node.probe_at:
            node.probing = True
            node.probe_sent_at = now
            out.append(Probe(node.name, node.epoch, node.probe_address))

    def _verdict(self, node: _Watched, state: str, reason: str) -> PushVerdict:
        verdict = Verdict(
            rack=self._rack,
            rack_epoch=self._rack_epoch,
            node=node.name,
            node_epoch=node.epoch,
            state="cut" if state == "cut" else "lost",
            reason=reason,
        )
        return PushVerdict(verdict)

    def _digest(self, now: float) -> PublishDigest:
        self._number += 1
        views = [
            _view(node, node.state, now) for node in self._nodes.values() if node.state is not None
        ]
        digest = RackDigest(
            rack=self._rack,
            controld=self._controld,
            epoch=self._rack_epoch,
            number=self._number,
            nodes=tuple(views),
        )
        return PublishDigest(digest)


def _view(node: _Watched, state: NodeState, now: float) -> NodeView:
    beat = node.beat
    shown: NodeState = "draining" if state == "ready" and node.draining else state
    if beat is None:
        return NodeView(node=node.name, epoch=node.epoch, state=shown)
    return NodeView(
        node=node.name,
        epoch=node.epoch,
        state=shown,
        load=beat.load,
        running=beat.running,
        queued=beat.queued,
        slots=beat.slots,
        slow=beat.slow,
        beat_age_s=now - node.heard_at,
    )
