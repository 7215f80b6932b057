"""Between verdicts and the fleet: what the mass-loss guard holds is unplaceable, not gone."""

from __future__ import annotations

import msgspec

from controld.core.fleet import Fleet, FleetDelta
from controld.core.mass_loss import MassLoss
from corefleet.messages.records import LostNode, NodeRegistration
from corefleet.messages.wire import NodeView, RackDigest, Verdict


class LossGate:
    """Feeds the fleet all that is heard of nodes' lives."""

    def __init__(self, fleet: Fleet, guard: MassLoss) -> None:
        self._fleet = fleet
        self._guard = guard

    def verdict(self, verdict: Verdict, now: float) -> FleetDelta:
        """A verdict that a rack owner pushed."""
        node, epoch = verdict.node, verdict.node_epoch
        stale = verdict.rack_epoch < self._fleet.newest(verdict.rack)[0]
        if stale or verdict.state != "lost" or self._guard.lost(node, epoch, now):
            return self._fleet.verdict(verdict, now)
        return self._fleet.held(node, epoch)

    def digest(self, digest: RackDigest, now: float) -> FleetDelta:
        """A rack owner's view of its nodes."""
        if (digest.epoch, digest.number) > self._fleet.newest(digest.rack):
            views = tuple(self._judged(view, now) for view in digest.nodes)
            if views != digest.nodes:
                digest = msgspec.structs.replace(digest, nodes=views)
        return self._fleet.digest(digest, now)

    def lost(self, lost: LostNode, now: float) -> FleetDelta:
        """A verdict that stands in the store."""
        self._guard.stands(lost.node, lost.epoch)
        return self._fleet.lost(lost, now)

    def registered(self, registration: NodeRegistration, now: float) -> FleetDelta:
        """A registration as stored."""
        delta = self._fleet.registered(registration, now)
        for gone in delta.gone:
            self._guard.lives(gone.node, gone.node_epoch)
        return delta

    def removed(self, node: str, now: float) -> FleetDelta:
        """The registration was deleted."""
        self._guard.gone(node)
        return self._fleet.removed(node, now)

    def _judged(self, view: NodeView, now: float) -> NodeView:
        """Return the view as the fleet is to take it."""
        guard = self._guard
        if view.state == "lost":
            acted = guard.lost(view.node, view.epoch, now)
        elif view.state == "held":
            acted = guard.shown_held(view.node, view.epoch, now)
        else:
            if guard.undecided(view.node) and guard.lives(view.node, view.epoch):
                self._fleet.revived(view.node, view.epoch)
            return view
        if acted == (view.state == "lost"):
            return view
        return msgspec.structs.replace(view, state="lost" if acted else "held")
