"""One node as its rack's owner knows it, and how its digests show it."""

from __future__ import annotations

from controld.core.looks import Looks
from corefleet.messages.records import LostNode, NodeRegistration
from corefleet.messages.wire import Heartbeat, NodeState, NodeView


class Watched:
    """A node of the rack, from its registration on."""

    __slots__ = (
        "beat",
        "draining",
        "epoch",
        "heard_at",
        "looks",
        "lost",
        "name",
        "probe_address",
        "repeated_at",
        "silent",
        "state",
        "stored",
    )

    def __init__(self, registration: NodeRegistration, now: float) -> None:
        self.name = registration.node
        self.epoch = registration.epoch
        self.heard_at = now
        self.beat: Heartbeat | None = None
        self.state: NodeState | None = None
        """None: not heard of yet, and not yet suspect either."""
        self.silent = False
        """Found suspect for its silence since the last beat."""
        self.looks = Looks()
        self.lost: LostNode | None = None
        """Our own verdict."""
        self.stored = False
        """A verdict stands in the store: nothing but a new epoch undoes it."""
        self.repeated_at = float("-inf")
        self.describe(registration)

    def describe(self, registration: NodeRegistration) -> None:
        self.probe_address = registration.probe_address
        self.draining = registration.draining

    def restart(self, now: float) -> None:
        """Count all deadlines from now."""
        self.heard_at = now
        self.silent = False
        self.looks.restart()

    def view(self, state: NodeState, now: float) -> NodeView:
        """Return how digests show the node."""
        beat = self.beat
        shown: NodeState = "draining" if state == "ready" and self.draining else state
        provisional = state == "lost" and not self.stored
        if beat is None:
            return NodeView(node=self.name, epoch=self.epoch, state=shown, provisional=provisional)
        return NodeView(
            node=self.name,
            epoch=self.epoch,
            state=shown,
            load=beat.load,
            running=beat.running,
            queued=beat.queued,
            slots=beat.slots,
            slow=beat.slow,
            beat_age_s=now - self.heard_at,
            provisional=provisional,
        )
