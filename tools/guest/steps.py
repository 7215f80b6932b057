"""How long each step of making and using guests took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Steps:
    """Records named steps in seconds; `say` hears of each one that ends."""

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self.taken: list[tuple[str, float]] = []
        self._say = say

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Record how long the block takes, also if it fails."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.taken.append((name, time.monotonic() - started))
            if self._say is not None:
                self._say(self.lines()[-1])

    def lines(self) -> list[str]:
        """Return one line for each step."""
        return [f"{seconds:6.1f} s  {name}" for name, seconds in self.taken]
