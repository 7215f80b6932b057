"""Slots and workers of each place (a pool in a domain). Pure."""

from __future__ import annotations

from collections.abc import Mapping

from agentd.core.node_io import Place, PlaceSpec
from corefleet.messages.wire import SlotUse

_DEFAULT_PROGRESS_TIMEOUT_S = 120.0


class Places:
    """Who is ready to work where, and what is taken."""

    def __init__(self) -> None:
        self._specs: dict[Place, PlaceSpec] = {}
        self._used: dict[Place, int] = {}
        self._workers: dict[Place, dict[str, int]] = {}
        """By place, in order of age: how many attempts each ready worker has."""
        self._place_of: dict[str, Place] = {}
        self._broken_engines: set[tuple[str, int]] = set()

    def set(self, specs: Mapping[Place, PlaceSpec]) -> None:
        """Replace all places; what is taken in a place that went stays so until released."""
        self._specs = dict(specs)

    def engine_usable(self, model: str, domain: int, usable: bool) -> None:
        """Count on the engine, or offer nothing of the pools that need it."""
        if usable:
            self._broken_engines.discard((model, domain))
        else:
            self._broken_engines.add((model, domain))

    def refusal(self, place: Place) -> str:
        """Return why no attempt can be taken at `place`, '' if one can."""
        spec = self._specs.get(place)
        if spec is None:
            if any(known.pool == place.pool for known in self._specs):
                return f"pool {place.pool} is not offered in domain {place.domain}"
            return f"pool {place.pool} is not offered here"
        if (spec.model, place.domain) in self._broken_engines:
            return f"the engine of model {spec.model} in domain {place.domain} does not start"
        if not self._workers.get(place):
            return f"no worker of pool {place.pool} is ready in domain {place.domain}"
        if self._used.get(place, 0) >= spec.slots:
            return f"all {spec.slots} slots of pool {place.pool} in domain {place.domain} are taken"
        return ""

    def slots(self) -> tuple[SlotUse, ...]:
        """Return the use of all places; nothing is offered where nothing can run."""
        return tuple(
            SlotUse(place.pool, place.domain, self._offered(place, spec), self._used.get(place, 0))
            for place, spec in self._specs.items()
        )

    def progress_timeout_s(self, place: Place) -> float:
        spec = self._specs.get(place)
        return spec.progress_timeout_s if spec is not None else _DEFAULT_PROGRESS_TIMEOUT_S

    def take(self, place: Place) -> None:
        """Take a slot."""
        self._used[place] = self._used.get(place, 0) + 1

    def release(self, place: Place, worker: str) -> None:
        """Free a slot, and the room at `worker` ('' for none) that `pick` took."""
        self._used[place] -= 1
        ready = self._workers.get(place)
        if ready and worker in ready:
            ready[worker] -= 1

    def pick(self, place: Place) -> str | None:
        """Return the worker with the fewest attempts among those at work, and count one more.

        The oldest are at work, the youngest are spare: a spare steps up when one dies.
        """
        ready = self._workers.get(place)
        if not ready:
            return None
        if len(ready) == 1:
            worker = next(iter(ready))
        else:
            spec = self._specs.get(place)
            at_work = list(ready)[: spec.workers if spec is not None else 1]
            worker = min(at_work, key=ready.__getitem__)
        ready[worker] += 1
        return worker

    def assign(self, worker: str) -> None:
        """The worker has an attempt that was not given to it by `pick`."""
        place = self._place_of.get(worker)
        if place is not None:
            self._workers[place][worker] += 1

    def add_worker(self, worker: str, place: Place) -> None:
        """A worker is ready, the youngest of its place."""
        self._workers.setdefault(place, {})[worker] = 0
        self._place_of[worker] = place

    def remove_worker(self, worker: str) -> None:
        """A worker is gone, with the room it had. Unknown ones are no matter."""
        place = self._place_of.pop(worker, None)
        if place is not None:
            del self._workers[place][worker]

    def at_work(self, place: Place) -> int:
        """Return how many workers of `place` are ready."""
        return len(self._workers.get(place, ()))

    def _offered(self, place: Place, spec: PlaceSpec) -> int:
        broken = (spec.model, place.domain) in self._broken_engines
        return spec.slots if self._workers.get(place) and not broken else 0
