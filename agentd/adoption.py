"""Attempts that workers of an earlier agentd still run, until the node has its epoch."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from agentd.core.node_io import Adopted
from corefleet.messages.wire import Assignment

GATHER_S = 2.0
"""How long a new agentd waits for the workers that it adopted, before it registers: what they
run is called absent otherwise, and given to others."""

_log = structlog.get_logger(__name__)


class Adoption:
    """Hands attempts to the node's core: at once when it is registered, or as soon as it is."""

    def __init__(self, feed: Callable[[Adopted], None]) -> None:
        self._feed = feed
        self._waiting: list[Adopted] | None = []
        self._back: set[str] = set()

    def came_back(self, worker: str, held: tuple[Assignment, ...]) -> None:
        """A worker found this agentd, with what it runs."""
        self._back.add(worker)
        _log.info("Worker adopted", worker=worker, attempts=len(held))
        for item in held:
            if self._waiting is None:
                self._feed(Adopted(worker, item))
            else:
                self._waiting.append(Adopted(worker, item))

    def is_back(self, worker: str) -> bool:
        return worker in self._back

    def registered(self) -> None:
        """The node has its epoch: whose attempts these are can be judged now."""
        waiting, self._waiting = self._waiting or [], None
        for adopted in waiting:
            self._feed(adopted)
