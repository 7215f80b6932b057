"""What every launcher can do."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(slots=True, frozen=True)
class LaunchSpec:
    """A process to start, bound to `cpus` and to the memory of `domain`.

    `log` takes its stdout and stderr; None leaves it those of agentd's stderr.
    """

    name: str
    command: tuple[str, ...]
    cpus: tuple[int, ...]
    domain: int
    log: Path | None = None


@dataclass(slots=True, frozen=True)
class ExitStatus:
    """How a process ended: `code`, or the number of the `signal` that killed it."""

    code: int | None = None
    signal: int | None = None

    def __str__(self) -> str:
        if self.signal is not None:
            try:
                return f"killed by {signal.Signals(self.signal).name}"
            except ValueError:
                return f"killed by signal {self.signal}"
        return f"exit code {self.code}"


class Process(Protocol):
    """A started process, verified to be bound."""

    @property
    def pid(self) -> int: ...

    @property
    def name(self) -> str: ...

    async def wait(self) -> ExitStatus:
        """Return how it ended, as soon as it has. May be awaited by several."""

    def last_words(self) -> str:
        """Return the last line that it wrote to its log, '' without one."""

    def terminate(self) -> None:
        """Ask it to end (SIGTERM). No matter if it has."""

    def kill(self) -> None:
        """End it and what it started (SIGKILL). No matter if it has ended."""


class Launcher(Protocol):
    async def start(self, spec: LaunchSpec) -> Process:
        """Start a process and return it once it is the command, bound as asked.

        Raises LaunchFailed naming the process and what went wrong; nothing is left of it.
        """

    @property
    def unisolated(self) -> tuple[str, ...]:
        """Return one line for each isolation that this launcher cannot give here."""
