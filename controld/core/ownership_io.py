"""What goes into the ownership core and what comes out of it.

A unit is a shard (`shard/17`) or a rack (`rack/r1`).
"""

from __future__ import annotations

from dataclasses import dataclass

from corefleet.messages.records import Ownership


@dataclass(slots=True, frozen=True)
class MembersSeen:
    """The living controlds, ours included."""

    controlds: frozenset[str]


@dataclass(slots=True, frozen=True)
class UnitSeen:
    """A unit's ownership as stored; None and revision 0 when nobody ever owned it."""

    unit: str
    ownership: Ownership | None
    revision: int


@dataclass(slots=True, frozen=True)
class UnitsKnown:
    """All units that exist (shards from the settings, racks from registrations)."""

    units: frozenset[str]


@dataclass(slots=True, frozen=True)
class ClaimWon:
    unit: str
    epoch: int
    revision: int


@dataclass(slots=True, frozen=True)
class ClaimLost:
    """The compare-and-set failed or its outcome is unknown: UnitSeen will tell."""

    unit: str


@dataclass(slots=True, frozen=True)
class Released:
    unit: str
    revision: int


@dataclass(slots=True, frozen=True)
class LeaseValidity:
    """Monotonic seconds until which our lease lets us act."""

    until: float


@dataclass(slots=True, frozen=True)
class PeerHint:
    """A peer tells that a controld died before its lease shows it: look sooner."""

    controld: str


@dataclass(slots=True, frozen=True)
class OwnershipTick:
    pass


OwnershipEvent = (
    MembersSeen
    | UnitSeen
    | UnitsKnown
    | ClaimWon
    | ClaimLost
    | Released
    | LeaseValidity
    | PeerHint
    | OwnershipTick
)


@dataclass(slots=True, frozen=True)
class Claim:
    """Write ownership with `epoch` if the unit's revision is `expected` and `dead` is gone.

    `dead` is the controld whose registration must not exist, or '' when the unit
    was released or never owned. Answered by ClaimWon or ClaimLost.
    """

    unit: str
    epoch: int
    expected: int
    dead: str


@dataclass(slots=True, frozen=True)
class Release:
    """Give a unit up for its rightful owner: first Stop, then write controld ''.

    Answered by Released or a newer UnitSeen.
    """

    unit: str
    epoch: int
    expected: int


@dataclass(slots=True, frozen=True)
class Start:
    """We own the unit from now on, at `epoch`."""

    unit: str
    epoch: int


@dataclass(slots=True, frozen=True)
class Stop:
    """We own the unit no longer: no decision of ours about it may follow."""

    unit: str
    reason: str


OwnershipAction = Claim | Release | Start | Stop
