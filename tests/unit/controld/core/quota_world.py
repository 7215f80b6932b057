"""Many controlds that share quotas, under a simulated clock, network and registry."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from controld.core.admission import Admission, AdmissionSettings
from controld.core.quota_shares import TICK_S, QuotaShares
from corefleet.messages.records import PoolSpec
from corefleet.messages.wire import QuotaReport

POOL = "p"
_SAME_DELAY = 8
"""So many receivers, other ones each time, get a report at once: less to simulate."""


@dataclass
class Net:
    """Delay of each message is drawn from 0 to `delay_s`; `loss` of them never arrive."""

    delay_s: float = 0.3
    loss: float = 0.2
    watch_s: float = 0.3
    """The registry's news reach each controld after 0 to so many seconds."""


@dataclass
class World:
    """Controlds of one pool; `admitted` is (time, controld) of all that was let in."""

    spec: PoolSpec
    seed: int
    net: Net = field(default_factory=Net)
    now: float = 1000.0
    alive: dict[str, Admission] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    admitted: list[tuple[float, str]] = field(default_factory=list)
    members: set[str] = field(default_factory=set)
    tenant: Callable[[], str] = lambda: ""

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._order), what))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, what = heapq.heappop(self._queue)
            what()
        self.now = end

    def join(self, name: str) -> None:
        shares = QuotaShares(name, self.now, int(self.now * 1000))
        found = Admission(AdmissionSettings(), shares)
        found.set_pools({POOL: self.spec}, self.now)
        self.alive[name] = found
        self.members.add(name)
        self._tell_members()
        self.at(self.now + self._rng.random() * TICK_S, lambda: self._tick(name, found))

    def die(self, name: str, after_s: float = 3.0) -> None:
        """Kill one; the registry notices `after_s` seconds later."""
        del self.alive[name]
        self.rates.pop(name, None)

        def gone() -> None:
            self.members.discard(name)
            self._tell_members()

        self.at(self.now + after_s, gone)

    def demand(self, rates: dict[str, float]) -> None:
        """Set submissions a second at each; the others are idle."""
        started = [name for name in rates if name not in self.rates]
        self.rates = dict(rates)
        for name in started:
            self.at(self.now + self._rng.random() / rates[name], lambda name=name: self._ask(name))  # type: ignore[misc]

    def most_in_a_second(self, since: float = 0.0) -> int:
        times = [at for at, _ in self.admitted if at >= since]
        most = first = 0
        for last, at in enumerate(times):
            while times[first] <= at - 1.0:
                first += 1
            most = max(most, last - first + 1)
        return most

    def let_in(self, start: float, end: float, name: str = "") -> int:
        return sum(start <= at < end and name in ("", who) for at, who in self.admitted)

    def _ask(self, name: str) -> None:
        rate, found = self.rates.get(name), self.alive.get(name)
        if rate is None or found is None:
            return
        if found.admit(POOL, 1, self.now, self.tenant()) is None:
            self.admitted.append((self.now, name))
        self.at(self.now + self._rng.uniform(0.5, 1.5) / rate, lambda: self._ask(name))

    def _tick(self, name: str, found: Admission) -> None:
        if self.alive.get(name) is not found:
            return
        report = found.shares.tick(self.now)
        found.refresh(self.now)
        if report is not None:
            others = [each for each in self.alive if each != name]
            self._rng.shuffle(others)
            for at in range(0, len(others), _SAME_DELAY):
                self._send(others[at : at + _SAME_DELAY], report)
        self.at(self.now + TICK_S * self._rng.uniform(0.9, 1.2), lambda: self._tick(name, found))

    def _send(self, others: list[str], report: QuotaReport) -> None:
        def arrive() -> None:
            for other in others:
                if other in self.alive and self._rng.random() >= self.net.loss:
                    self.alive[other].shares.heard(report, self.now)

        self.at(self.now + self._rng.random() * self.net.delay_s, arrive)

    def _tell_members(self) -> None:
        seen = frozenset(self.members)
        for name in self.alive:
            due = self.now + self._rng.random() * self.net.watch_s
            due = max(due, self._told.get(name, 0.0))
            self._told[name] = due
            self.at(due, lambda name=name: self._see(name, seen))  # type: ignore[misc]

    def _see(self, name: str, seen: frozenset[str]) -> None:
        if name in self.alive:
            self.alive[name].shares.set_members(seen, self.now)

    _told: dict[str, float] = field(default_factory=dict)
