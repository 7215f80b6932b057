"""Whether processes stay bound, and what is done about one that does not. Pure.

systemd's daemon-reload, a CPU that is taken offline and somebody's taskset change a binding
behind our back. A drifted process is bound again; one that cannot be is drained.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from corefleet.errors import IllegalTransition

VERIFY_EVERY_S = 10.0

State = Literal["bound", "repairing", "draining"]

TRANSITIONS: frozenset[tuple[State, State]] = frozenset(
    {
        ("bound", "repairing"),
        ("repairing", "bound"),
        ("repairing", "draining"),
    }
)


@dataclass(slots=True, frozen=True)
class Rebind:
    """Bind it again, then say what drift is left."""

    process: str
    drift: str


@dataclass(slots=True, frozen=True)
class Drain:
    """It cannot be bound: it finishes or gives back what it runs, and is replaced."""

    process: str
    drift: str


@dataclass(slots=True, frozen=True)
class Repaired:
    """For the log: it is bound again."""

    process: str
    drift: str


Action = Rebind | Drain | Repaired


@dataclass(slots=True)
class _Watched:
    state: State = "bound"
    drift: str = ""


class Bindings:
    """All processes of one node by name."""

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}
        self.repaired = 0
        """How often a process was bound again, since the start."""
        self.drained = 0

    def seen(self, process: str, drift: str | None) -> list[Action]:
        """A process was looked at; `drift` is what is wrong, None if nothing is."""
        watched = self._watched.setdefault(process, _Watched())
        match watched.state, drift:
            case "bound", str(wrong):
                watched.drift = wrong
                self._move(process, watched, "repairing")
                return [Rebind(process, wrong)]
            case "repairing", None:
                self.repaired += 1
                self._move(process, watched, "bound")
                return [Repaired(process, watched.drift)]
            case "repairing", str(wrong):
                self.drained += 1
                watched.drift = wrong
                self._move(process, watched, "draining")
                return [Drain(process, wrong)]
        return []

    def keep(self, processes: Collection[str]) -> None:
        """Forget all but `processes`: the others have ended."""
        for name in self._watched.keys() - set(processes):
            del self._watched[name]

    def lines(self) -> tuple[str, ...]:
        """Return one line for each process that is not bound as it should be."""
        return tuple(
            f"{name}: {watched.state}: {watched.drift}"
            for name, watched in self._watched.items()
            if watched.state != "bound"
        )

    def _move(self, process: str, watched: _Watched, state: State) -> None:
        if (watched.state, state) not in TRANSITIONS:
            raise IllegalTransition(process, watched.state, state, watched.drift)
        watched.state = state
