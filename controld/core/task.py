"""One live task as its shard's owner knows it, with its story."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from controld.core.eligibility import Slot
from controld.core.shard_io import EndTask
from corefleet.messages.records import Failure, TaskRecord

TaskState = Literal["queued", "placing", "offered", "running", "moving", "ending", "ended"]
"""queued   waits; its record says queued
placing  a write that places it is under way
offered  placed; its node has not answered yet
running  its node has it
moving   a write is under way that takes it from its node: to another one or to the queue
ending   the owner ends it: cancel, deadline, dead letter
ended    its record is terminal; it is forgotten at once"""

Cause = Literal[
    "lost",
    "refused",
    "unanswered",
    "returned",
    "stuck",
    "absent",
    "node",
    "order",
    "preempted",
    "draining",
    "drained",
]
"""Why an attempt was given up: see attempt_policy."""

Timer = Literal["", "wake", "offer", "move", "end", "look"]
"""What a task's one timer does: see Attempts.timer."""

_STORY_LENGTH = 24


@dataclass(slots=True, frozen=True)
class Leaving:
    """Why the current attempt is being given up."""

    cause: Cause
    reason: str


class Task:
    """A task with what is under way for it. Written by its ShardCore only."""

    __slots__ = (
        "asked_ms",
        "calls",
        "delayed",
        "doomed",
        "end",
        "id",
        "leaving",
        "node",
        "occupies",
        "preempt_at",
        "ready",
        "record",
        "retry_at",
        "revision",
        "seq",
        "since",
        "slot",
        "state",
        "story",
        "timer",
        "timer_number",
        "told",
        "tries",
        "unsure",
        "waits_for_head",
        "watched",
        "wish",
        "write",
    )

    def __init__(self, record: TaskRecord, revision: int) -> None:
        self.id = record.task
        self.record = record
        """As last seen or durably written."""
        self.revision = revision
        self.seq = record.create_seq or revision
        """Sequence of the create: the order within the session."""
        self.state: TaskState = "queued"
        self.since = 0.0
        """When it came into its state."""
        self.node = ""
        """Node of the attempt that is live or being placed."""
        self.slot: Slot | None = None
        self.write: TaskRecord | None = None
        """A WriteRecord under way."""
        self.unsure = False
        """The write was refused and the stream has not shown why."""
        self.end: EndTask | None = None
        """An EndTask under way or to be repeated."""
        self.wish: Failure | None = None
        """How to end it once the write under way is decided."""
        self.leaving: Leaving | None = None
        """Set while `moving`."""
        self.doomed: Leaving | None = None
        """The attempt must be given up as soon as its placing write is decided."""
        self.asked_ms = 0
        """Wall-clock time at which the attempt was first asked to yield; 0: never."""
        self.preempt_at = 0.0
        """Until then no other batch attempt is asked to yield for it."""
        self.waits_for_head = False
        """Offered once the stream has shown all that precedes the placing write."""
        self.ready = False
        """First of an idle session, not delayed: stands in its pool's queue."""
        self.occupies = False
        """No other task of the session may start."""
        self.delayed = False
        """Backs off until its timer wakes it."""
        self.retry_at = 0.0
        self.tries = 0
        self.timer: Timer = ""
        self.timer_number = 0
        self.calls: list[int] = []
        """Cancel calls to be answered."""
        self.told = ""
        """Reason of waiting that watchers were told last."""
        self.watched = False
        """Stands in line for being told why it waits."""
        self.story: deque[tuple[float, str, str]] = deque(maxlen=_STORY_LENGTH)

    def tell_story(self) -> str:
        """Return the last events of the task, oldest first, in one line."""
        return "; ".join(
            f"{at:.3f} {what}{f' ({note})' if note else ''}" for at, what, note in self.story
        )
