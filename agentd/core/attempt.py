"""One attempt at this node and the moves that it can make. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from agentd.core.node_io import Place
from corefleet.errors import IllegalTransition
from corefleet.messages.links import FinishTask
from corefleet.messages.records import Step
from corefleet.messages.wire import Assignment, TaskEvent

Phase = Literal["opening", "waiting", "running", "finishing", "returning", "over"]

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

    def move(self, phase: Phase) -> None:
        """Go on to `phase`; raises IllegalTransition with the attempt's story."""
        if (self.phase, phase) not in TABLE:
            story = (
                f"attempt {self.number} on worker {self.worker or 'none'}, "
                f"{len(self.steps)} steps, {self.deaths} workers died"
            )
            raise IllegalTransition(self.task, self.phase, phase, story)
        self.phase = phase
