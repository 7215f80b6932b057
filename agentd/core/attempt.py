"""One attempt at this node and the moves that it can make. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from agentd.core.node_io import Place
from corefleet.errors import IllegalTransition
from corefleet.messages.links import AttemptOver, FinishTask
from corefleet.messages.records import Step
from corefleet.messages.wire import Assignment, TaskEvent, TaskReturned

Phase = Literal["opening", "waiting", "running", "finishing", "returning", "over"]
Outcome = Literal["finished", "returned", "dropped"]

TABLE: frozenset[tuple[Phase, Phase]] = frozenset(
    {
        ("opening", "waiting"),
        ("opening", "running"),
        ("opening", "returning"),
        ("opening", "over"),
        ("waiting", "running"),
        ("waiting", "finishing"),
        ("waiting", "returning"),
        ("waiting", "over"),
        ("running", "waiting"),
        ("running", "finishing"),
        ("running", "returning"),
        ("running", "over"),
        ("finishing", "returning"),
        ("finishing", "over"),
        ("returning", "over"),
    }
)


@dataclass(slots=True)
class Attempt:
    """One attempt that this node accepted."""

    item: Assignment
    place: Place
    progress_at: float
    phase: Phase = "opening"
    worker: str = ""
    steps: list[Step] = field(default_factory=list)
    """Committed ones, of all attempts."""
    appending: tuple[Step, ...] | None = None
    events: tuple[TaskEvent, ...] = ()
    """Published once the append in flight is durable."""
    finish: FinishTask | None = None
    """Waits for the append in flight."""
    deaths: int = 0
    yields: str = ""
    """Why its owner wants it back at its next step boundary; '' while it does not."""
    reason: str = ""
    return_at: float = 0.0
    returned_since: float = 0.0

    @property
    def task(self) -> str:
        return self.item.record.task

    @property
    def number(self) -> int:
        return self.item.record.attempt

    def committed(self, steps: tuple[Step, ...]) -> bool:
        """Return whether `steps` are in the journal already."""
        known = {(step.step, step.kind == "intent") for step in self.steps}
        return all((step.step, step.kind == "intent") in known for step in steps)

    def returned(self) -> TaskReturned:
        """Return what its owner is told of an attempt that is given back."""
        record = self.item.record
        return TaskReturned(
            task=self.task,
            attempt=self.number,
            node=record.node,
            node_epoch=record.node_epoch,
            reason=self.reason,
        )

    def over(self, outcome: Outcome, reason: str) -> AttemptOver:
        """Return what its worker is told at its end."""
        return AttemptOver(task=self.task, attempt=self.number, outcome=outcome, reason=reason)

    def move(self, phase: Phase) -> None:
        """Go on to `phase`; raises IllegalTransition with the attempt's story."""
        if (self.phase, phase) not in TABLE:
            story = (
                f"attempt {self.number} on worker {self.worker or 'none'}, "
                f"{len(self.steps)} steps, {self.deaths} workers died"
            )
            raise IllegalTransition(self.task, self.phase, phase, story)
        self.phase = phase
