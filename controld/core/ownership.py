"""Which units (shards and racks) this controld owns, claims and gives up.

Every unit belongs to the living controld with the highest rendezvous hash for it, so
that a change of members moves only the units that must move. The store's
compare-and-set decides; this core only chooses when to try (rules 7 and 12).
"""

from __future__ import annotations

from dataclasses import dataclass

from controld.core.ownership_io import (
    Claim,
    ClaimLost,
    ClaimWon,
    LeaseValidity,
    MembersSeen,
    OwnershipAction,
    OwnershipEvent,
    OwnershipTick,
    PeerHint,
    Release,
    Released,
    Start,
    Stop,
    UnitSeen,
    UnitsKnown,
)
from controld.core.rendezvous import digest, score
from controld.core.rng import Rng, between
from corefleet.messages.records import Ownership


@dataclass(slots=True, frozen=True)
class OwnershipSettings:
    """Times in seconds."""

    grace_min_s: float = 0.2
    grace_max_s: float = 0.6
    """How long a vanished controld's units are left to it: drawn anew for each unit."""
    settle_s: float = 1.0
    """Members must not have changed for this long before a unit is given to a better one."""
    claims_in_flight: int = 128
    releases_per_s: float = 32.0
    retry_min_s: float = 0.2
    retry_max_s: float = 0.6
    """Back-off after a claim that was lost or undecided."""


class _Unit:
    """One unit as stored, and what we do about it."""

    __slots__ = (
        "best",
        "best_score",
        "claim_at",
        "claimed",
        "claiming",
        "controld",
        "digest",
        "epoch",
        "known",
        "name",
        "releasing",
        "revision",
        "running",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.digest = digest(name)
        self.known = False
        """Exists, as UnitsKnown says; what the store holds of others is only remembered."""
        self.controld = ""
        self.epoch = 0
        self.revision = 0
        self.best = ""
        self.best_score = -1
        self.claim_at = 0.0
        """Not claimed before; 0 when no wait was begun."""
        self.claiming = 0
        """Epoch of the claim under way, 0 for none."""
        self.claimed = 0
        """Highest epoch that we claimed and did not stop since: if it stands, it is ours."""
        self.running = 0
        """Epoch at which we own it now, 0 when we do not."""
        self.releasing = False


class OwnershipCore:
    """Decides for one controld."""

    def __init__(self, controld: str, rng: Rng, settings: OwnershipSettings | None = None) -> None:
        self._controld = controld
        self._rng = rng
        self._settings = settings or OwnershipSettings()
        self._units: dict[str, _Unit] = {}
        self._members: dict[str, int] = {}
        self._hinted: set[str] = set()
        self._changed_at = float("-inf")
        self._valid_until = float("-inf")
        self._in_flight = 0
        self._allowance = 0.0
        self._allowance_at: float | None = None

    @property
    def owned(self) -> dict[str, int]:
        """Units that we own now, with their epochs."""
        return {unit.name: unit.running for unit in self._units.values() if unit.running}

    def owner_of(self, unit: str) -> str:
        """Return the unit's owner as stored, '' when there is none or it is not known."""
        found = self._units.get(unit)
        return found.controld if found else ""

    def handle(self, event: OwnershipEvent, now: float) -> list[OwnershipAction]:
        """Take in what happened; `now` in monotonic seconds."""
        out: list[OwnershipAction] = []
        match event:
            case OwnershipTick():
                self._on_tick(now, out)
            case LeaseValidity():
                self._valid_until = event.until
                self._check_lease(now, out)
            case UnitSeen():
                self._on_unit_seen(event, now, out)
            case ClaimWon():
                self._on_claim_won(event, now, out)
            case ClaimLost():
                self._on_claim_lost(event, now)
            case Released():
                self._on_released(event)
            case MembersSeen():
                self._on_members(event.controlds, now)
            case UnitsKnown():
                self._on_units(event.units, out)
            case PeerHint():
                self._hinted.add(event.controld)
        return out

    # What is seen.

    def _on_members(self, controlds: frozenset[str], now: float) -> None:
        gone = self._members.keys() - controlds
        new = controlds - self._members.keys()
        if not gone and not new:
            return
        self._changed_at = now
        for name in gone:
            del self._members[name]
        for name in new:
            self._members[name] = digest(name)
            self._hinted.discard(name)
        for unit in self._units.values():
            if unit.best in gone:
                self._elect(unit)
            else:
                for name in new:
                    self._consider(unit, name)

    def _on_units(self, units: frozenset[str], out: list[OwnershipAction]) -> None:
        for name in units:
            self._unit(name).known = True
        for unit in self._units.values():
            if unit.name not in units:
                unit.known = False
                if unit.running:
                    self._stop(unit, "the unit is no more", out)

    def _on_unit_seen(self, event: UnitSeen, now: float, out: list[OwnershipAction]) -> None:
        unit = self._unit(event.unit)
        found = event.ownership or Ownership(controld="", epoch=0)
        if event.revision < unit.revision or found.epoch < unit.epoch:
            return
        if event.revision != unit.revision or found.controld != unit.controld:
            unit.claim_at = 0.0
            unit.releasing = False
        unit.controld, unit.epoch, unit.revision = found.controld, found.epoch, event.revision
        ours = found.controld == self._controld
        if unit.running and (not ours or found.epoch != unit.running):
            self._stop(unit, f"owned by {found.controld or 'nobody'} at epoch {found.epoch}", out)
        elif ours and not unit.running and found.epoch == unit.claimed:
            self._end_claim(unit)
            self._start(unit, now, out)

    def _on_claim_won(self, event: ClaimWon, now: float, out: list[OwnershipAction]) -> None:
        unit = self._unit(event.unit)
        self._end_claim(unit)
        if event.epoch < unit.epoch or unit.running == event.epoch:
            return
        unit.controld, unit.epoch, unit.revision = self._controld, event.epoch, event.revision
        if unit.claimed == event.epoch:
            self._start(unit, now, out)

    def _on_claim_lost(self, event: ClaimLost, now: float) -> None:
        unit = self._unit(event.unit)
        self._end_claim(unit)
        settings = self._settings
        unit.claim_at = now + between(self._rng, settings.retry_min_s, settings.retry_max_s)

    def _on_released(self, event: Released) -> None:
        unit = self._unit(event.unit)
        unit.releasing = False
        if event.revision > unit.revision:
            unit.controld, unit.revision = "", event.revision

    # Time.

    def _on_tick(self, now: float, out: list[OwnershipAction]) -> None:
        if not self._check_lease(now, out) or self._controld not in self._members:
            return
        self._refill(now)
        settled = now - self._changed_at >= self._settings.settle_s
        for unit in self._units.values():
            if unit.running:
                if settled and unit.best != self._controld and self._allowance >= 1.0:
                    self._allowance -= 1.0
                    self._give_up(unit, f"{unit.best} is the unit's rightful owner", out)
            elif not unit.known or unit.claiming:
                continue
            elif unit.best == self._controld:
                self._try_claim(unit, now, out)
            elif unit.controld == self._controld:
                self._return(unit, out)

    def _check_lease(self, now: float, out: list[OwnershipAction]) -> bool:
        """Stop everything when the lease is over; return whether it is valid."""
        if now < self._valid_until:
            return True
        for unit in self._units.values():
            unit.claimed = 0
            if unit.running:
                self._stop(unit, "our lease is over", out)
        return False

    def _refill(self, now: float) -> None:
        rate = self._settings.releases_per_s
        if self._allowance_at is not None:
            self._allowance += (now - self._allowance_at) * rate
        self._allowance = min(self._allowance, max(1.0, rate / 2))
        self._allowance_at = now

    def _try_claim(self, unit: _Unit, now: float, out: list[OwnershipAction]) -> None:
        """Claim a unit that is rightfully ours as soon as it is free."""
        holder = unit.controld
        dead = ""
        if holder and holder != self._controld:
            if holder in self._members:
                unit.claim_at = 0.0
                return
            dead = holder
            if unit.claim_at == 0.0:
                settings = self._settings
                grace = between(self._rng, settings.grace_min_s, settings.grace_max_s)
                if holder in self._hinted:
                    grace -= settings.grace_min_s
                unit.claim_at = now + grace
        if now < unit.claim_at or self._in_flight >= self._settings.claims_in_flight:
            return
        unit.claiming = unit.claimed = unit.epoch + 1
        self._in_flight += 1
        out.append(Claim(unit.name, unit.epoch + 1, unit.revision, dead))

    def _return(self, unit: _Unit, out: list[OwnershipAction]) -> None:
        """Give away what the store says is ours from an earlier life or lease."""
        if not unit.releasing and unit.best in self._members:
            unit.releasing = True
            out.append(Release(unit.name, unit.epoch, unit.revision))

    def _give_up(self, unit: _Unit, reason: str, out: list[OwnershipAction]) -> None:
        self._stop(unit, reason, out)
        unit.releasing = True
        out.append(Release(unit.name, unit.epoch, unit.revision))

    def _start(self, unit: _Unit, now: float, out: list[OwnershipAction]) -> None:
        if now >= self._valid_until:
            unit.claimed = 0
            return
        if unit.running and unit.running != unit.epoch:
            self._stop(unit, "claimed anew", out)
        unit.running = unit.claimed = unit.epoch
        unit.claim_at = 0.0
        out.append(Start(unit.name, unit.epoch))

    def _stop(self, unit: _Unit, reason: str, out: list[OwnershipAction]) -> None:
        unit.running = unit.claimed = 0
        out.append(Stop(unit.name, reason))

    def _end_claim(self, unit: _Unit) -> None:
        if unit.claiming:
            unit.claiming = 0
            self._in_flight -= 1

    # Rendezvous.

    def _unit(self, name: str) -> _Unit:
        unit = self._units.get(name)
        if unit is None:
            unit = self._units[name] = _Unit(name)
            self._elect(unit)
        return unit

    def _elect(self, unit: _Unit) -> None:
        unit.best, unit.best_score = "", -1
        for name in self._members:
            self._consider(unit, name)

    def _consider(self, unit: _Unit, name: str) -> None:
        found = score(unit.digest, self._members[name])
        if (found, name) > (unit.best_score, unit.best):
            unit.best, unit.best_score = name, found
