"""Composes beats from agentd's last word and what is measured here."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentd.heartbeat.pipe import Setup, Status
from corefleet.messages.wire import Heartbeat, LoadVector


@dataclass(slots=True)
class Heart:
    """The newest of everything a beat tells."""

    setup: Setup
    status: Status
    heard_at: float
    """When agentd's loop last gave a sign of life."""
    load: LoadVector = field(default_factory=LoadVector)
    number: int = 0
    _met: bool = False

    def meet(self) -> None:
        """An agentd came: its statuses count from one again."""
        self._met = True

    def hear(self, status: Status, now: float) -> None:
        """Take agentd's status in."""
        if self._met or status.number != self.status.number:
            self.heard_at = now
        if self._met and not status.epoch:
            # Until the new agentd is registered, the node stands as it stood.
            return
        self._met = False
        self.status = status

    def beat(self, now: float, wall_ms: int) -> Heartbeat | None:
        """Return the next beat, None before the node has an epoch."""
        status = self.status
        if not status.epoch:
            return None
        # Counts on where a program that died left off: no one sends ten beats a second.
        self.number = max(self.number + 1, int(now * 10))
        return Heartbeat(
            node=self.setup.node,
            rack=self.setup.rack,
            epoch=status.epoch,
            number=self.number,
            sent_ms=wall_ms,
            loop_age_s=now - self.heard_at,
            restart_grace_s=status.restart_grace_s,
            load=self.load,
            running=status.running,
            queued=status.queued,
            slots=status.slots,
            slow=status.slow,
        )
