"""What this node answered and denied, remembered so that it never says otherwise. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

KEPT_S = 900.0
KEPT_MOST = 200_000


@dataclass(slots=True)
class _Said:
    attempt: int
    accepted: bool
    reason: str
    at: float
    life: int


class Answers:
    """The newest answer about each task that is not held any more, for a quarter of an hour.

    An attempt at or below a denied one is denied too: a late assignment stays refused. A
    task's `life` is the sequence of its create, 0 if unknown: when its result has expired its
    request id may create it again, and what was said of the life before is void.
    """

    def __init__(self) -> None:
        self._said: OrderedDict[str, _Said] = OrderedDict()

    def __len__(self) -> int:
        return len(self._said)

    def find(self, task: str, attempt: int, life: int = 0) -> tuple[bool, str] | None:
        """Return (accepted, reason) for an attempt that was answered or overtaken."""
        said = self._said.get(task)
        if said is None or said.attempt < attempt or life > said.life > 0:
            return None
        if said.attempt > attempt:
            return False, f"attempt {said.attempt} of the task was here since"
        return said.accepted, said.reason

    def keep(
        self, task: str, attempt: int, accepted: bool, reason: str, now: float, life: int = 0
    ) -> None:
        """Remember an answer, unless a newer attempt of the task was answered."""
        known = self._said.get(task)
        if known is not None and not life > known.life > 0:
            if known.attempt > attempt:
                return
            life = life or known.life
        self._said[task] = _Said(attempt, accepted, reason, now, life)
        self._said.move_to_end(task)
        if len(self._said) > KEPT_MOST:
            self._said.popitem(last=False)

    def expire(self, now: float) -> None:
        """Forget what is older than KEPT_S."""
        while self._said:
            task, said = next(iter(self._said.items()))
            if now - said.at < KEPT_S:
                return
            del self._said[task]
