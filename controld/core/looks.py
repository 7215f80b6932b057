"""What was found of a silent node since its last beat: by its rack's owner, and by another.

Both looks start together (rule 11). A finding counts for the silence in which the look
began; a newer one replaces it.
"""

from __future__ import annotations

from controld.core.liveness_io import Found

_PATIENCE = 4.0
"""Deadlines after which a look without an answer is given up."""

VOUCHED_S = 1.0
"""An observer that saw the node alive keeps it from being lost for so long."""


class Look:
    """Looks of one kind, one at a time. `deadline_s` bounds one; the next follows as late."""

    __slots__ = ("_again_at", "_asking", "_first_at", "_sent_at", "alive_at", "found")

    def __init__(self) -> None:
        self._asking = False
        self._sent_at = 0.0
        self._first_at: float | None = None
        self._again_at = 0.0
        self.found: Found | None = None
        """By the newest look of this silence that could look; None: there is none yet."""
        self.alive_at: float | None = None

    def restart(self) -> None:
        """A beat came: what was found says nothing of the next silence."""
        self._first_at = self.found = self.alive_at = None
        self._again_at = 0.0

    def due(self, now: float, deadline_s: float) -> bool:
        """Return whether to look now."""
        given_up = now - self._sent_at >= _PATIENCE * deadline_s
        return (not self._asking or given_up) and now >= self._again_at

    def began(self, now: float) -> None:
        self._asking = True
        self._sent_at = now
        if self._first_at is None:
            self._first_at = now

    def ended(self, found: Found, now: float, heard_at: float, deadline_s: float) -> None:
        """Take what was found. Who could not look is asked again, or replaced, at once, while
        the first deadline lasts; then as late as after any look."""
        self._asking = False
        self._again_at = now + deadline_s
        if heard_at > self._sent_at:
            return
        if found == "unable":
            if self._within_first(now, deadline_s):
                self._again_at = now
            return
        self.found = found
        if found == "alive":
            self.alive_at = now

    def vouched(self, now: float) -> bool:
        """Return whether somebody was seen a moment ago."""
        return self.alive_at is not None and now - self.alive_at < VOUCHED_S

    def _within_first(self, now: float, deadline_s: float) -> bool:
        return self._first_at is not None and now - self._first_at < deadline_s


class Looks:
    """Our own look and that of a second observer."""

    __slots__ = ("own", "second")

    def __init__(self) -> None:
        self.own = Look()
        self.second = Look()

    def restart(self) -> None:
        self.own.restart()
        self.second.restart()

    def nobody(self, now: float, alone: bool) -> bool:
        """Return whether the node is dead to both: our own port probe found nobody, nor did
        a second observer's, and none saw it alive a moment ago.

        Only who is `alone`, the one controld there is, decides without a second look: to one
        that is cut off, all nodes are silent and no observer answers.
        """
        own, second = self.own, self.second
        if own.found != "nobody" or second.vouched(now):
            return False
        return alone or second.found == "nobody"

    def alive(self, now: float) -> bool:
        """Return whether the node answers somebody, by the newest that is known."""
        return self.own.found == "alive" or self.second.vouched(now)
