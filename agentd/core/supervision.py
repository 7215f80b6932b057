"""Which processes should run, which do, and when a dead one is started again. Pure.

The supervisor carries the actions out and reports what happened. Each process is one
`instance` of a unit; an instance that ends is followed by a new one with a new name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from corefleet.errors import IllegalTransition

BACKOFF_FIRST_S = 0.1
BACKOFF_LIMIT_S = 30.0
FORGIVEN_AFTER_S = 2.0
"""Each such span that an instance was ready makes up for one failure."""
CRASH_LOOP = 4
"""So many failures one after the other are reported."""
START_TIMEOUT_S = {"worker": 60.0, "engine": 300.0}
HOPELESS_EXIT = 3
"""Exit code of an engine whose model, or of a worker whose pool, cannot be loaded: starting it
again soon is of no use."""


class UnitKey(NamedTuple):
    """Names a unit: the workers of a pool, or the engine of a model, in a domain."""

    kind: Literal["engine", "worker"]
    name: str
    domain: int


class Random(Protocol):
    def random(self) -> float:
        """Return a number from 0 up to 1."""


Phase = Literal["starting", "ready", "stopping", "over"]

_TABLE: frozenset[tuple[Phase, Phase]] = frozenset(
    {
        ("starting", "ready"),
        ("starting", "stopping"),
        ("starting", "over"),
        ("ready", "stopping"),
        ("ready", "over"),
        ("stopping", "over"),
    }
)


@dataclass(slots=True)
class Instance:
    name: str
    unit: UnitKey
    started_at: float
    phase: Phase = "starting"
    ready_at: float = 0.0


@dataclass(slots=True)
class Unit:
    key: UnitKey
    wanted: int
    version: object
    """What the processes were started with: another version replaces them."""
    failures: int = 0
    not_before: float = 0.0
    reason: str = ""
    """Why the last instance failed."""
    instances: dict[str, Instance] = field(default_factory=dict)


# Actions.


@dataclass(slots=True, frozen=True)
class Start:
    instance: str
    unit: UnitKey


@dataclass(slots=True, frozen=True)
class StopInstance:
    """End it politely; it is killed when its grace is over."""

    instance: str
    unit: UnitKey
    reason: str


@dataclass(slots=True, frozen=True)
class KillInstance:
    instance: str
    unit: UnitKey
    reason: str


@dataclass(slots=True, frozen=True)
class CrashLoop:
    """Reported once when a unit begins to fail again and again."""

    unit: UnitKey
    failures: int
    reason: str
    again_in_s: float


Action = Start | StopInstance | KillInstance | CrashLoop


class Supervision:
    """Wanted and running processes of one node."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._units: dict[UnitKey, Unit] = {}
        self._names: dict[str, UnitKey] = {}
        self._leaving: dict[str, Instance] = {}
        """Instances of units that are wanted no more, or were replaced."""
        self._serial = 0

    def want(self, units: Mapping[UnitKey, tuple[int, object]], now: float) -> list[Action]:
        """Set what should run: for each unit how many, and with what version of it."""
        actions = self._strays()
        for key in [key for key in self._units if key not in units]:
            actions += self._leave(self._units.pop(key), "no longer wanted")
        for key, (wanted, version) in units.items():
            unit = self._units.get(key)
            if unit is not None and unit.version != version:
                actions += self._leave(unit, "replaced by a new configuration")
                unit = None
            if unit is None:
                unit = self._units[key] = Unit(key, wanted, version)
            unit.wanted = wanted
            actions += self._shrink(unit)
            actions += self._grow(unit, now)
        return actions

    def adopt(self, instance: str, key: UnitKey, version: object, now: float) -> None:
        """Take in a process that an earlier agentd started; call it before `want`.

        `want` keeps it if it wants such a one, and stops it otherwise.
        """
        unit = self._units.get(key)
        if unit is None:
            unit = self._units[key] = Unit(key, 0, version)
        found = Instance(instance, key, now)
        self._names[instance] = key
        if unit.version == version:
            unit.instances[instance] = found
        else:
            self._leaving[instance] = found

    def _strays(self) -> list[Action]:
        """Stop adopted processes of another version than their siblings."""
        actions: list[Action] = []
        for instance in self._leaving.values():
            if instance.phase == "starting":
                self._move(instance, "stopping")
                actions.append(StopInstance(instance.name, instance.unit, "of another version"))
        return actions

    def ready(self, instance: str, now: float) -> None:
        """The process answers: it can work."""
        known = self._find(instance)
        if known is not None and known.phase == "starting":
            self._move(known, "ready")
            known.ready_at = now

    def ended(self, instance: str, reason: str, now: float, hopeless: bool = False) -> list[Action]:
        """The process ended or could not be started. `hopeless`: wait as long as allowed."""
        known = self._find(instance)
        if known is None:
            return []
        phase = known.phase
        self._move(known, "over")
        del self._names[instance]
        unit = self._units.get(known.unit)
        if self._leaving.pop(instance, None) is None and unit is not None:
            del unit.instances[instance]
            lived_s = now - known.ready_at if phase == "ready" else 0.0
            actions = self._failed(unit, lived_s, reason, now, hopeless)
        else:
            actions = []
        return [*actions, *self._grow(unit, now)] if unit is not None else actions

    def drain(self, instance: str, reason: str, now: float) -> list[Action]:
        """Stop the process politely and start another in its place, a worker's beside it."""
        known = self._find(instance)
        if known is None or instance in self._leaving:
            return []
        self._move(known, "stopping")
        self._leaving[instance] = known
        unit = self._units[known.unit]
        del unit.instances[instance]
        return [StopInstance(instance, known.unit, reason), *self._grow(unit, now)]

    def stuck(self, instance: str, reason: str) -> list[Action]:
        """The process lives and does not answer."""
        known = self._find(instance)
        return [KillInstance(instance, known.unit, reason)] if known is not None else []

    def tick(self, now: float) -> list[Action]:
        """Start what has waited long enough, kill what does not become ready."""
        actions: list[Action] = []
        for unit in self._units.values():
            for instance in unit.instances.values():
                patience = START_TIMEOUT_S[unit.key.kind]
                if instance.phase == "starting" and now - instance.started_at > patience:
                    actions.append(KillInstance(instance.name, unit.key, "did not become ready"))
            actions += self._grow(unit, now)
        return actions

    def next_start(self) -> float | None:
        """Return when a unit that backs off starts again, None if none does."""
        times = [u.not_before for u in self._units.values() if len(u.instances) < u.wanted]
        return min(times, default=None)

    def unit_of(self, instance: str) -> UnitKey | None:
        return self._names.get(instance)

    def phase_of(self, instance: str) -> Phase:
        known = self._find(instance)
        return known.phase if known is not None else "over"

    def running(self) -> tuple[str, ...]:
        """Return the names of all instances that are not over."""
        return tuple(self._names)

    def settled(self) -> bool:
        """Whether each unit has what it wants ready, or is known to fail."""
        return all(
            unit.failures >= CRASH_LOOP
            or sum(i.phase == "ready" for i in unit.instances.values()) >= unit.wanted
            for unit in self._units.values()
        )

    def troubled(self, unit: UnitKey) -> bool:
        """Whether `unit` fails again and again."""
        known = self._units.get(unit)
        return known is not None and known.failures >= CRASH_LOOP

    def troubles(self) -> tuple[str, ...]:
        """Return one line for each unit that fails again and again, or cannot work."""
        return tuple(
            f"{unit.key.kind} {unit.key.name} in domain {unit.key.domain}: "
            f"failed {unit.failures} times: {unit.reason}"
            for unit in list(self._units.values())  # at once: metrics ask from a thread
            if unit.failures >= CRASH_LOOP
        )

    def _failed(
        self, unit: Unit, lived_s: float, reason: str, now: float, hopeless: bool
    ) -> list[Action]:
        unit.failures = max(0, unit.failures - int(lived_s / FORGIVEN_AFTER_S)) + 1
        unit.reason = reason
        if hopeless:
            unit.failures = max(unit.failures, CRASH_LOOP)
        # The first failure costs no pause: a worker that was killed once is replaced now.
        pause = 0.0
        if unit.failures > 1:
            pause = min(BACKOFF_LIMIT_S, BACKOFF_FIRST_S * 2.0 ** min(unit.failures - 2, 16))
        if hopeless:
            pause = BACKOFF_LIMIT_S
        pause *= 0.5 + self._rng.random() / 2
        unit.not_before = max(unit.not_before, now + pause)
        if unit.failures == CRASH_LOOP or hopeless:
            return [CrashLoop(unit.key, unit.failures, reason, pause)]
        return []

    def _grow(self, unit: Unit, now: float) -> list[Action]:
        """Start what is missing; an engine only once the one that it replaces has gone."""
        actions: list[Action] = []
        if unit.key.kind == "engine" and any(i.unit == unit.key for i in self._leaving.values()):
            return actions
        while len(unit.instances) < unit.wanted and unit.not_before <= now:
            self._serial += 1
            # Never the name of an earlier agentd's process, which may still be there.
            tag = f"{int(self._rng.random() * 16**6):06x}"
            name = f"{unit.key.name}-d{unit.key.domain}-{self._serial}-{tag}"
            unit.instances[name] = Instance(name, unit.key, now)
            self._names[name] = unit.key
            actions.append(Start(name, unit.key))
        return actions

    def _shrink(self, unit: Unit) -> list[Action]:
        """Stop the youngest that are too many."""
        actions: list[Action] = []
        for instance in list(unit.instances.values())[unit.wanted :]:
            self._move(instance, "stopping")
            del unit.instances[instance.name]
            self._leaving[instance.name] = instance
            actions.append(StopInstance(instance.name, unit.key, "fewer are wanted"))
        return actions

    def _leave(self, unit: Unit, reason: str) -> list[Action]:
        actions: list[Action] = []
        for instance in unit.instances.values():
            self._move(instance, "stopping")
            self._leaving[instance.name] = instance
            actions.append(StopInstance(instance.name, unit.key, reason))
        return actions

    def _find(self, instance: str) -> Instance | None:
        if instance in self._leaving:
            return self._leaving[instance]
        key = self._names.get(instance)
        return self._units[key].instances.get(instance) if key in self._units else None

    def _move(self, instance: Instance, phase: Phase) -> None:
        if (instance.phase, phase) not in _TABLE:
            story = f"{instance.unit}, started at {instance.started_at:.3f}"
            raise IllegalTransition(instance.name, instance.phase, phase, story)
        instance.phase = phase
