"""Which models lie in which domain's memory, which come next and which go. Pure.

The shell carries the actions out and reports what happened as events. Each `Wanted` is
answered by one Ready, Direct or Refused, unless an `Unwanted` comes first.
"""

from __future__ import annotations

from collections.abc import Mapping

from agentd.core.replicas_io import (
    Action,
    Direct,
    DomainLost,
    EngineEnded,
    EngineStarted,
    Event,
    Evicted,
    Fill,
    Filled,
    FillFailed,
    Found,
    Mount,
    Mounted,
    MountFailed,
    Phase,
    Place,
    Ready,
    Refused,
    Remove,
    Replica,
    ReplicaState,
    Unwanted,
    Wanted,
    move,
)

FAILURES_LIMIT = 3
"""So many failed fills one after the other, and engines map the source instead."""
BACKOFF_FIRST_S = 1.0
BACKOFF_LIMIT_S = 30.0
RETRY_AFTER_S = 300.0
"""So long a Direct or Refused answer, and a failed mount, hold for those who ask again."""
HOLD_S = 60.0
"""So long after an answer a replica without an engine stays: its engine is being started."""
ROOM_PATIENCE_S = 30.0
"""So long a model waits for others to go: an engine that is told to end takes 10 s at most."""
MIB = 1 << 20
CHARGE_UNIT_BYTES = 1 << 16
"""Files are charged in whole pages of the largest kind that kernels have."""

_HOLDING: frozenset[Phase] = frozenset({"filling", "ready", "removing"})
_FOREVER = float("inf")


class _Room:
    """One domain's mount: whether it is there, and how much may lie in it."""

    __slots__ = ("budget", "mounted_bytes", "phase", "until", "why")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.phase = "unmounted"
        self.mounted_bytes = 0
        self.until = 0.0
        self.why = ""

    @property
    def limit(self) -> int:
        return min(self.budget, self.mounted_bytes) if self.phase == "mounted" else self.budget


class Replicas:
    """The replicas of one node.

    `budgets`: bytes by domain. `why_not`: why there can be none here, '' if there can. `must`:
    a model without a replica is refused, not mapped where it lies (`require` has it).
    """

    def __init__(self, budgets: Mapping[int, int], why_not: str = "", must: bool = False) -> None:
        self._rooms = {domain: _Room(budget) for domain, budget in budgets.items()}
        self._why_not = why_not
        self._must = must
        self._replicas: dict[Place, Replica] = {}
        self._turns = 0

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in what happened; return what to do. Raises IllegalTransition."""
        match event:
            case Wanted():
                return self._wanted(event, now)
            case Unwanted():
                return self._unwanted(event, now)
            case Mounted():
                return self._mounted(event, now)
            case MountFailed():
                return self._mount_failed(event, now)
            case Filled():
                return self._filled(event, now)
            case FillFailed():
                return self._fill_failed(event, now)
            case Evicted():
                return self._evicted(event, now)
            case Found():
                return self._found(event, now)
            case DomainLost(domain=domain):
                return self._lost(domain, now)
            case EngineStarted():
                replica = self._at(event.domain, event.model)
                replica.engines += 1
                replica.hold_until = replica.used_at = now
                return []
            case EngineEnded():
                replica = self._at(event.domain, event.model)
                replica.engines = max(0, replica.engines - 1)
                replica.used_at = now
                return self._fill_room(event.domain, now)

    def tick(self, now: float) -> list[Action]:
        """Do what is due."""
        actions: list[Action] = []
        for replica in self._in("cooling"):
            if now >= replica.until:
                actions += self._begin(replica, now)
        for domain in self._rooms:
            actions += self._fill_room(domain, now)
        return actions

    def next_due(self, now: float) -> float | None:
        """Return when `tick` has something to do after `now`, None if nothing waits."""
        times = [replica.until for replica in self._in("cooling")]
        for replica in self._in("queued"):
            times.append(replica.until)
            times += (
                other.hold_until
                for other in self._in("ready", replica.place.domain)
                if other.engines == 0 and now < other.hold_until < replica.until
            )
        return min(times, default=None)

    def states(self) -> tuple[ReplicaState, ...]:
        """Return what is known of each model that was ever asked for, by domain and name."""
        return tuple(
            ReplicaState(place.domain, place.model, replica.phase, replica.size, replica.why,
                         replica.engines)
            for place, replica in sorted(self._replicas.items())
        )  # fmt: skip

    def used(self, domain: int) -> int:
        """Return the bytes that replicas take in a domain, with those on their way in or out."""
        return sum(
            _charged(replica.size)
            for place, replica in self._replicas.items()
            if place.domain == domain and replica.phase in _HOLDING
        )

    # Events.

    def _wanted(self, event: Wanted, now: float) -> list[Action]:
        replica = self._at(event.domain, event.model)
        replica.wanted = True
        if replica.phase == "ready":
            return self._answer(replica, now)
        if replica.phase in ("direct", "refused"):
            if now < replica.until:
                return self._answer(replica, now)
            move(replica, "absent")
        if replica.phase == "absent":
            replica.size = event.size
            return self._begin(replica, now)
        return []

    def _unwanted(self, event: Unwanted, now: float) -> list[Action]:
        replica = self._at(event.domain, event.model)
        replica.wanted = False
        replica.hold_until = min(replica.hold_until, now)
        # What is being filled may finish: it is wanted soon again, or gives way.
        if replica.phase in ("mounting", "queued", "cooling"):
            move(replica, "absent")
        return self._fill_room(event.domain, now)

    def _mounted(self, event: Mounted, now: float) -> list[Action]:
        room = self._rooms[event.domain]
        room.phase, room.mounted_bytes, room.why = "mounted", event.size, ""
        actions: list[Action] = []
        for replica in self._in("mounting", event.domain):
            actions += self._begin(replica, now)
        return actions

    def _mount_failed(self, event: MountFailed, now: float) -> list[Action]:
        room = self._rooms[event.domain]
        room.phase, room.why, room.until = "failed", event.why, now + RETRY_AFTER_S
        actions: list[Action] = []
        for replica in self._in("mounting", event.domain):
            actions += self._give_up(replica, event.why, now)
        return actions

    def _filled(self, event: Filled, now: float) -> list[Action]:
        replica = self._at(event.domain, event.model)
        move(replica, "ready")
        replica.failures, replica.why, replica.used_at = 0, "", now
        actions = self._answer(replica, now) if replica.wanted else []
        return [*actions, *self._fill_room(event.domain, now)]

    def _fill_failed(self, event: FillFailed, now: float) -> list[Action]:
        replica = self._at(event.domain, event.model)
        replica.failures += 1
        replica.why = event.why
        if event.cause == "corrupt":
            actions = self._give_up(replica, event.why, now, must=True)
        elif replica.failures >= FAILURES_LIMIT:
            actions = self._give_up(replica, event.why, now)
        elif replica.wanted:
            move(replica, "cooling")
            pause = BACKOFF_FIRST_S * 2.0 ** (replica.failures - 1)
            replica.until = now + min(pause, BACKOFF_LIMIT_S)
            actions = []
        else:
            move(replica, "absent")
            actions = []
        if event.cause == "unmounted":
            return [*actions, *self._lost(event.domain, now)]
        return [*actions, *self._fill_room(event.domain, now)]

    def _evicted(self, event: Evicted, now: float) -> list[Action]:
        replica = self._at(event.domain, event.model)
        move(replica, "absent")
        again = self._begin(replica, now) if replica.wanted else []
        return [*self._fill_room(event.domain, now), *again]

    def _found(self, event: Found, now: float) -> list[Action]:
        """Take in a replica of an earlier agentd; its engine may be adopted a moment later."""
        replica = self._at(event.domain, event.model)
        replica.size = event.size
        move(replica, "ready")
        replica.used_at, replica.hold_until = now, now + HOLD_S
        return []

    def _lost(self, domain: int, now: float) -> list[Action]:
        room = self._rooms[domain]
        if room.phase == "mounted":
            room.phase, room.mounted_bytes = "unmounted", 0
        for replica in self._in("ready", domain):
            move(replica, "absent")
        actions: list[Action] = []
        for replica in self._in("queued", domain):
            actions += self._begin(replica, now)
        return actions

    # Decisions.

    def _begin(self, replica: Replica, now: float) -> list[Action]:
        """Take the next step of a replica that is wanted and not there."""
        domain = replica.place.domain
        room = self._rooms.get(domain)
        if self._why_not:
            return self._give_up(replica, self._why_not, now)
        if room is None:
            return self._give_up(replica, f"domain {domain} keeps no models", now)
        size = _charged(replica.size)
        if size > room.limit:
            why = f"it needs {_mib(size)}, the domain's models may have {_mib(room.limit)}"
            return self._give_up(replica, why, now)
        if room.phase == "mounted":
            move(replica, "queued")
            replica.until = now + ROOM_PATIENCE_S
            self._turns += 1
            replica.turn = self._turns
            return self._fill_room(domain, now)
        if room.phase == "failed" and now < room.until:
            return self._give_up(replica, room.why, now)
        move(replica, "mounting")
        if room.phase == "mounting":
            return []
        room.phase = "mounting"
        return [Mount(domain, room.budget)]

    def _fill_room(self, domain: int, now: float) -> list[Action]:
        """Let in who waits, first come first served, making room where that helps."""
        actions: list[Action] = []
        for replica in sorted(self._in("queued", domain), key=lambda r: r.turn):
            free = self._rooms[domain].limit - self.used(domain)
            size = _charged(replica.size)
            if size <= free:
                move(replica, "filling")
                actions.append(Fill(domain, replica.place.model))
                continue
            actions += self._evict(domain, size - free, now)
            if now < replica.until:
                # A smaller one behind it must not take the room that it waits for.
                break
            why = f"no room: it needs {_mib(size)}, {_mib(free)} are left beside models in use"
            actions += self._give_up(replica, why, now)
        return actions

    def _evict(self, domain: int, short: int, now: float) -> list[Action]:
        """Remove the least recently used models, if all that may go are enough."""
        short -= sum(_charged(replica.size) for replica in self._in("removing", domain))
        idle = [
            replica
            for replica in self._in("ready", domain)
            if not replica.engines and not replica.wanted and replica.hold_until <= now
        ]
        if sum(_charged(replica.size) for replica in idle) < short:
            return []
        actions: list[Action] = []
        for replica in sorted(idle, key=lambda r: (r.used_at, r.place)):
            if short <= 0:
                break
            move(replica, "removing")
            short -= _charged(replica.size)
            actions.append(Remove(domain, replica.place.model))
        return actions

    def _give_up(self, replica: Replica, why: str, now: float, must: bool = False) -> list[Action]:
        move(replica, "refused" if must or self._must else "direct")
        replica.why, replica.failures, replica.until = why, 0, now + RETRY_AFTER_S
        if self._why_not:
            replica.until = _FOREVER
        return self._answer(replica, now) if replica.wanted else []

    def _answer(self, replica: Replica, now: float) -> list[Action]:
        domain, model = replica.place
        replica.wanted = False
        if replica.phase == "direct":
            return [Direct(domain, model, replica.why)]
        if replica.phase == "refused":
            return [Refused(domain, model, replica.why)]
        replica.used_at, replica.hold_until = now, now + HOLD_S
        return [Ready(domain, model)]

    def _at(self, domain: int, model: str) -> Replica:
        place = Place(domain, model)
        return self._replicas.setdefault(place, Replica(place))

    def _in(self, phase: Phase, domain: int | None = None) -> list[Replica]:
        return [
            replica
            for place, replica in self._replicas.items()
            if replica.phase == phase and domain in (None, place.domain)
        ]


def _charged(size: int) -> int:
    return -(-size // CHARGE_UNIT_BYTES) * CHARGE_UNIT_BYTES


def _mib(size: int) -> str:
    return f"{max(size, 0) / MIB:.0f} MiB"
