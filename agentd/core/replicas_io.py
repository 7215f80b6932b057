"""What goes into and comes out of the core of replicas, and the phases of one. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from corefleet.errors import IllegalTransition


class Place(NamedTuple):
    """Names a replica: a model in a domain."""

    domain: int
    model: str


Phase = Literal[
    "absent", "mounting", "queued", "filling", "cooling", "ready", "removing", "direct", "refused"
]
"""`queued` waits for room, `cooling` for another try; `direct`: engines map the source file."""

_TABLE: frozenset[tuple[Phase, Phase]] = frozenset(
    {
        ("absent", "mounting"),
        ("absent", "queued"),
        ("absent", "direct"),
        ("absent", "refused"),
        ("absent", "ready"),
        ("mounting", "queued"),
        ("mounting", "direct"),
        ("mounting", "refused"),
        ("mounting", "absent"),
        ("queued", "filling"),
        ("queued", "mounting"),
        ("queued", "direct"),
        ("queued", "refused"),
        ("queued", "absent"),
        ("filling", "ready"),
        ("filling", "cooling"),
        ("filling", "direct"),
        ("filling", "refused"),
        ("filling", "absent"),
        ("cooling", "queued"),
        ("cooling", "mounting"),
        ("cooling", "direct"),
        ("cooling", "refused"),
        ("cooling", "absent"),
        ("ready", "removing"),
        ("ready", "absent"),
        ("removing", "absent"),
        ("direct", "absent"),
        ("refused", "absent"),
    }
)


@dataclass(slots=True)
class Replica:
    """One model in one domain. Times are the clock's; `size` in bytes."""

    place: Place
    size: int = 0
    phase: Phase = "absent"
    wanted: bool = False
    """Somebody waits for an answer."""
    engines: int = 0
    failures: int = 0
    until: float = 0.0
    """When its waiting ends, or its answer may be another."""
    turn: int = 0
    """Its place in the queue for room."""
    used_at: float = 0.0
    hold_until: float = 0.0
    why: str = ""


class ReplicaState(NamedTuple):
    """What `agentctl node show` and the metrics tell of a replica."""

    domain: int
    model: str
    state: Phase
    bytes: int
    why: str
    """Why it is not ready; '' if nothing is wrong."""
    engines: int


def move(replica: Replica, phase: Phase) -> None:
    """Change the phase; raises IllegalTransition for a move that the table does not have."""
    if (replica.phase, phase) not in _TABLE:
        raise IllegalTransition(
            f"replica of {replica.place.model} in domain {replica.place.domain}",
            replica.phase,
            phase,
            f"{replica.engines} engines, {replica.failures} failures, {replica.why!r}",
        )
    replica.phase = phase


# Events.


@dataclass(slots=True, frozen=True)
class Wanted:
    """An engine is to be started; `size` in bytes."""

    domain: int
    model: str
    size: int


@dataclass(slots=True, frozen=True)
class Unwanted:
    """Nobody waits any more."""

    domain: int
    model: str


@dataclass(slots=True, frozen=True)
class Mounted:
    """The domain's tmpfs is there; `size` in bytes is what replicas may have of it."""

    domain: int
    size: int


@dataclass(slots=True, frozen=True)
class MountFailed:
    domain: int
    why: str


@dataclass(slots=True, frozen=True)
class Filled:
    """The replica is verified: right bytes, all of them on the domain's node."""

    domain: int
    model: str


@dataclass(slots=True, frozen=True)
class FillFailed:
    """Nothing of it is left. `corrupt`: the source is not the model; `unmounted`: no tmpfs."""

    domain: int
    model: str
    why: str
    cause: Literal["passing", "corrupt", "unmounted"] = "passing"


@dataclass(slots=True, frozen=True)
class Evicted:
    """The replica's file is gone."""

    domain: int
    model: str


@dataclass(slots=True, frozen=True)
class Found:
    """An earlier agentd left this replica, and it is still right."""

    domain: int
    model: str
    size: int


@dataclass(slots=True, frozen=True)
class DomainLost:
    """Somebody unmounted the domain's tmpfs."""

    domain: int


@dataclass(slots=True, frozen=True)
class EngineStarted:
    domain: int
    model: str


@dataclass(slots=True, frozen=True)
class EngineEnded:
    domain: int
    model: str


Event = (
    Wanted
    | Unwanted
    | Mounted
    | MountFailed
    | Filled
    | FillFailed
    | Evicted
    | Found
    | DomainLost
    | EngineStarted
    | EngineEnded
)


# Actions.


@dataclass(slots=True, frozen=True)
class Mount:
    """Mount the domain's tmpfs with room for `size` bytes of replicas."""

    domain: int
    size: int


@dataclass(slots=True, frozen=True)
class Fill:
    domain: int
    model: str


@dataclass(slots=True, frozen=True)
class Remove:
    domain: int
    model: str


@dataclass(slots=True, frozen=True)
class Ready:
    """Answer: engines map the replica."""

    domain: int
    model: str


@dataclass(slots=True, frozen=True)
class Direct:
    """Answer: engines map the source file, for this reason."""

    domain: int
    model: str
    why: str


@dataclass(slots=True, frozen=True)
class Refused:
    """Answer: no engine of this model can be started here now."""

    domain: int
    model: str
    why: str


Action = Mount | Fill | Remove | Ready | Direct | Refused
