"""What heartbeats tell beside life: how evenly they come, and how nodes' clocks stand. Pure."""

from __future__ import annotations

from corefleet.messages.wire import Heartbeat

_SAMPLE = 16
"""One pair of beats in so many is measured: every 3.2 s of each node."""


class BeatMeter:
    """Measures some of the beats of the racks owned here."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}
        self._first: dict[str, tuple[int, float]] = {}
        """Epoch and time of the first beat of a pair."""
        self._offset_s: dict[str, float] = {}

    def heard(self, beat: Heartbeat, now: float, wall_ms: int) -> float | None:
        """Take a beat in; return the seconds since the one before, if that is measured.

        `now`: seconds of a clock that never steps. `wall_ms`: ours when the beat came.
        """
        count = self._count[beat.node] = self._count.get(beat.node, 0) + 1
        turn = count % _SAMPLE
        if turn == 0:
            self._first[beat.node] = (beat.epoch, now)
            if beat.sent_ms:
                # The way here only adds to it: the least of a round is nearest to the truth.
                found_s = (wall_ms - beat.sent_ms) / 1000
                self._offset_s[beat.node] = min(found_s, self._offset_s.get(beat.node, found_s))
        elif turn == 1:
            epoch, at = self._first.pop(beat.node, (0, 0.0))
            return now - at if epoch == beat.epoch else None
        return None

    def forget(self, node: str) -> None:
        """The node is not ours to hear any more."""
        self._count.pop(node, None)
        self._first.pop(node, None)
        self._offset_s.pop(node, None)

    def worst_offset(self) -> tuple[str, float]:
        """End the round: return the node whose clock is off most, and the seconds that ours is
        ahead of it; ("", 0.0) if none was measured."""
        found, self._offset_s = self._offset_s, {}
        return max(found.items(), key=lambda item: abs(item[1]), default=("", 0.0))
