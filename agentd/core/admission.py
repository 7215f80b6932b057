"""Whether an offered attempt may be taken: docs/architecture.md, rules 8 and 9. Pure."""

from __future__ import annotations

from agentd.core.answers import Answers
from corefleet.ids import shard_of_task
from corefleet.messages.records import TaskRecord
from corefleet.messages.wire import HeldAttempt


class Admission:
    """What was answered before, and whose word counts. `epoch` 0: not registered."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.epoch = 0
        self.draining = ""
        """Why nothing new is taken, '' while that is not so."""
        self._answers = Answers()
        self._owner_epochs: dict[int, int] = {}

    def answered(self, task: str, attempt: int, life: int) -> tuple[bool, str] | None:
        """Return (accepted, reason) for an attempt that was answered before, else None."""
        return self._answers.find(task, attempt, life)

    def stale(self, record: TaskRecord) -> str:
        """Return why an offer comes from the past, '' if it does not.

        Not to be remembered: the same attempt may be offered again by whose word counts.
        """
        if record.node != self.node:
            return f"meant for node {record.node}, this is {self.node}"
        if record.node_epoch != self.epoch or not self.epoch:
            return f"meant for epoch {record.node_epoch}, this is {self.epoch}"
        return self.stale_owner(shard_of_task(record.task), record.owner_epoch)

    def stale_owner(self, shard: int, epoch: int) -> str:
        """Return why an owner's word no longer counts, '' if it does."""
        seen = self._owner_epochs.get(shard, 0)
        if epoch < seen:
            return f"owner epoch {epoch} of shard {shard} is over: {seen} was seen"
        self._owner_epochs[shard] = epoch
        return ""

    def finished(self, task: str, attempt: int, now: float, life: int) -> None:
        """The attempt was accepted and ended well: whoever asks again hears the same."""
        self._answers.keep(task, attempt, accepted=True, reason="", now=now, life=life)

    def deny(self, task: str, attempt: int, reason: str, now: float, life: int = 0) -> None:
        """This attempt, and every earlier one of the task, is never taken from now on."""
        self._answers.keep(task, attempt, accepted=False, reason=reason, now=now, life=life)

    def absent(self, held: HeldAttempt, now: float) -> None:
        """An inventory called it absent, so its owner places it anew: never take it later."""
        if self._answers.find(held.task, held.attempt) is None:
            self.deny(held.task, held.attempt, "an inventory called it absent", now)

    def expire(self, now: float) -> None:
        """Forget old answers."""
        self._answers.expire(now)
