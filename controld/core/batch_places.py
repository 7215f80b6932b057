"""The batch attempts of one controld's shards, for those who need their places."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from controld.core.fleet import Fleet
from controld.core.rng import Rng
from corefleet.messages.records import TaskRecord

_LOOKED_AT = 64
"""Attempts looked at for one that may yield, the youngest first."""


class BatchAttempt(NamedTuple):
    """One attempt that its node has taken."""

    task: str
    attempt: int
    node: str
    domain: int


class BatchPlaces:
    """Running batch attempts in the order in which they began, shared by all shards."""

    def __init__(self) -> None:
        self._running: dict[str, BatchAttempt] = {}
        self._asked: dict[str, float] = {}
        """Until when an attempt that was asked to yield is not asked again."""

    def __bool__(self) -> bool:
        return bool(self._running)

    def began(self, record: TaskRecord) -> None:
        """A node has taken the attempt that the record names."""
        attempt = BatchAttempt(record.task, record.attempt, record.node, record.domain)
        self._running[record.task] = attempt

    def over(self, task: str) -> None:
        """The task's attempt runs no more, or is no longer ours."""
        if self._running.pop(task, None) is not None:
            self._asked.pop(task, None)

    def youngest(self, fleet: Fleet, pool: str, rng: Rng, now: float) -> BatchAttempt | None:
        """Return the youngest attempt whose yield may give `pool` a place; None for none.

        It has lost the least. One that was asked already is left out.
        """
        slot = fleet.preemptable(pool, rng)
        if slot is None:
            return None
        wanted = (slot.node.name, slot.domain)
        return self._find(lambda attempt: (attempt.node, attempt.domain) == wanted, now)

    def asked(self, attempt: BatchAttempt, until: float) -> None:
        """The attempt was asked to yield; `until` then nobody asks it again."""
        self._asked[attempt.task] = until

    def _find(self, fits: Callable[[BatchAttempt], bool], now: float) -> BatchAttempt | None:
        for attempt in islice(reversed(self._running.values()), _LOOKED_AT):
            if self._asked.get(attempt.task, 0.0) <= now and fits(attempt):
                return attempt
        return None
