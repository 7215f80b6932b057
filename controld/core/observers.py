"""Whom a rack's owner asks for a second look: other controlds, one after another."""

from __future__ import annotations

_FAILED_S = 2.0
"""Who could not look is left alone for so long."""


class Observers:
    """Takes turns over the living controlds; those that own another rack come first.

    Turns begin at `offset`, so that not all owners ask the same one.
    """

    def __init__(self, offset: int = 0) -> None:
        self._turn = offset
        self._preferred: tuple[str, ...] = ()
        self._others: tuple[str, ...] = ()
        self._failed: dict[str, float] = {}

    def seen(self, preferred: tuple[str, ...], others: tuple[str, ...]) -> None:
        """Take all living controlds but ourselves."""
        self._preferred, self._others = preferred, others
        living = {*preferred, *others}
        self._failed = {name: at for name, at in self._failed.items() if name in living}

    @property
    def none(self) -> bool:
        """Whether there is no other controld."""
        return not self._preferred and not self._others

    def failed(self, observer: str, now: float) -> None:
        """The observer gave no answer, or could not look."""
        self._failed[observer] = now

    def pick(self, now: float) -> str:
        """Return whom to ask, '' when there is nobody that could look."""
        for names in (self._preferred, self._others):
            able = [name for name in names if now - self._failed.get(name, -_FAILED_S) >= _FAILED_S]
            if able:
                self._turn += 1
                return able[self._turn % len(able)]
        return ""
