"""Feeds systemd's watchdog while this loop turns and heartbeats go out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from corefleet.notify import Notifier

LEAST_PAUSE_S = 1.5
"""Beats are counted once a second: no feeding is judged by less than that."""


class Watchdog:
    """`sent` tells how many beats have gone out; before `expect` none are asked for.

    A watchdog that is fed by a loop alone hides a node that nobody hears.
    """

    def __init__(self, notifier: Notifier, sent: Callable[[], int]) -> None:
        self._notifier = notifier
        self._sent = sent
        self._seen = 0
        self._expected = False
        self._alarm: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to feed, several times within the limit."""
        if self._notifier.watchdog_s:
            self._feed()

    def expect(self) -> None:
        """The node is registered: beats must go out from now on."""
        self._expected = True

    def close(self) -> None:
        """Feed no more. Idempotent."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _feed(self) -> None:
        sent = self._sent()
        if sent != self._seen or not self._expected:
            self._notifier.alive()
        self._seen = sent
        pause = max(LEAST_PAUSE_S, self._notifier.watchdog_s / 5)
        self._alarm = asyncio.get_running_loop().call_later(pause, self._feed)
