"""Ended steps on their way into the journal: one append in flight, the rest waits. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from corefleet.messages.records import Step
from corefleet.messages.wire import TaskEvent

MAX_APPEND_BYTES = 512 * 1024
"""Results that one append carries; a single larger one still goes alone."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one append carries."""

    steps: tuple[Step, ...]
    events: tuple[TaskEvent, ...]


class Outbox:
    """Counts steps from their end to their acknowledgement.

    A step is `urgent` unless losing it costs nothing but doing it again.
    """

    def __init__(self) -> None:
        self.added = 0
        self.durable = 0
        self.in_flight = False
        self._flying = 0
        self._urgent = False
        self._bytes = 0
        self._waiting: list[Step] = []
        self._events: list[TaskEvent] = []

    @property
    def urgent(self) -> bool:
        """Whether a waiting step should be appended without waiting for more."""
        return self._urgent

    @property
    def must_append(self) -> bool:
        """Whether the waiting steps cannot ride with the end of the task."""
        return bool(self._events) or self._bytes > MAX_APPEND_BYTES

    def add(self, step: Step, event: TaskEvent | None = None, urgent: bool = True) -> None:
        """Take a step that ended; `event` is published once it is durable."""
        self.added += 1
        self._bytes += len(step.result) + len(step.error)
        self._urgent = self._urgent or urgent
        self._waiting.append(step)
        if event is not None:
            self._events.append(event)

    def take(self) -> Batch | None:
        """Return what to append now: None while an append is in flight, or for nothing.

        Steps leave in the order in which they came. Events leave with the last of them.
        """
        if self.in_flight or not self._waiting:
            return None
        if self._bytes <= MAX_APPEND_BYTES:
            steps = self.take_rest()
        else:
            count, size = self._fitting()
            steps, self._waiting = tuple(self._waiting[:count]), self._waiting[count:]
            self._bytes -= size
            self._urgent = bool(self._waiting)
        events: tuple[TaskEvent, ...] = ()
        if self._events and not self._waiting:
            events, self._events = tuple(self._events), []
        self.in_flight = True
        self._flying = len(steps)
        return Batch(steps, events)

    def acknowledged(self) -> None:
        """The append in flight is durable."""
        self.in_flight = False
        self.durable += self._flying
        self._flying = 0

    def take_rest(self) -> tuple[Step, ...]:
        """Return the waiting steps, which ride with the end of the task."""
        steps, self._waiting = tuple(self._waiting), []
        self._bytes = 0
        self._urgent = False
        return steps

    def _fitting(self) -> tuple[int, int]:
        """Return how many waiting steps one append carries, one at least, and their bytes."""
        count = size = 0
        for step in self._waiting:
            more = len(step.result) + len(step.error)
            if count and size + more > MAX_APPEND_BYTES:
                break
            count, size = count + 1, size + more
        return count, size
