"""The overview of all controlds: asked of each when somebody looks, and the balance now and then.

Nothing is sent while nobody asks, and callers at the same time share one round.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from controld.cluster import Cluster
from controld.core.fleet import Fleet
from controld.core.overview import FleetTally
from controld.gauges import Gauges
from controld.heard import heard
from controld.registry import Registry
from corefleet.background import Background, stop
from corefleet.bus import Incoming
from corefleet.codec import encode
from corefleet.messages.wire import AskOverview, ControldOverview
from corefleet.subjects import OVERVIEW, overview_of

ANSWER_S = 0.5
"""How long the slowest controld is waited for."""

BALANCE_INTERVAL_S = 15.0
_FRESH_S = 2.0
"""A sum over all nodes that is younger serves another caller."""

_NODES_A_TURN = 128
"""Nodes summed up in one turn of the loop: about two milliseconds."""


@dataclass(slots=True, frozen=True)
class Seen:
    """What is known of the whole: `answers` by controld, of `living` ones."""

    living: tuple[str, ...]
    answers: Mapping[str, ControldOverview]
    nodes: FleetTally
    at_ms: int


@dataclass(slots=True)
class _Round:
    """One question to all controlds."""

    number: int
    living: frozenset[str]
    answers: dict[str, ControldOverview] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class Overview:
    """Answers other controlds for this one, and asks all of them.

    `own` returns what this controld tells: shards that it decides for, tasks queued and
    in flight by pool. `export` keeps the gauges of balance current.
    """

    def __init__(
        self,
        cluster: Cluster,
        background: Background,
        registry: Registry,
        gauges: Gauges,
        fleet: Fleet,
        own: Callable[[], tuple[int, Mapping[str, int], Mapping[str, int]]],
        export: bool,
    ) -> None:
        self._cluster = cluster
        self._background = background
        self._registry = registry
        self._gauges = gauges
        self._fleet = fleet
        self._own = own
        self._export = export
        self._started_ms = cluster.clock.wall_ms()
        self._rounds = 0
        self._round: _Round | None = None
        self._asking: asyncio.Task[Seen] | None = None
        self._tally: FleetTally | None = None
        self._tallied_at = 0.0
        self._exported: set[str] = set()
        self._open = AsyncExitStack()

    async def start(self) -> None:
        """Begin to answer. Raises Unavailable."""
        bus = self._cluster.bus
        for subject, handler in (
            (OVERVIEW, self._asked),
            (overview_of(self._cluster.controld), self._answered),
        ):
            subscription = await bus.subscribe(subject, handler)
            self._open.push_async_callback(subscription.close)
        if self._export:
            keeping = self._background.spawn(self._keep_balance(), "balance")
            self._open.push_async_callback(stop, keeping)

    async def close(self) -> None:
        """Answer no more; callers under way end with CancelledError. Idempotent."""
        await stop(self._asking)
        await self._open.aclose()

    async def look(self) -> Seen:
        """Return what all controlds that answer within ANSWER_S tell."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(), name="overview")
        # One caller that goes away must not end the round of the others.
        return await asyncio.shield(self._asking)

    async def _ask(self) -> Seen:
        self._rounds += 1
        cluster = self._cluster
        living = frozenset(self._registry.controlds.records)
        asked = self._round = _Round(self._rounds, living)
        self._take(asked, self._tell(asked.number))
        question = AskOverview(asked_by=cluster.controld, number=asked.number)
        cluster.bus.publish(OVERVIEW, encode(question))
        try:
            async with asyncio.timeout(ANSWER_S):
                nodes = await self.nodes()
                await asked.complete.wait()
        except TimeoutError:
            nodes = self._tally or FleetTally()
        self._round = None
        return Seen(
            living=tuple(sorted(living | asked.answers.keys())),
            answers=asked.answers,
            nodes=nodes,
            at_ms=cluster.clock.wall_ms(),
        )

    async def nodes(self) -> FleetTally:
        """Return all nodes summed up, at most _FRESH_S ago."""
        clock = self._cluster.clock
        if self._tally is not None and clock.monotonic() - self._tallied_at < _FRESH_S:
            return self._tally
        tally = FleetTally()
        nodes = self._fleet.all_nodes()
        for first in range(0, len(nodes), _NODES_A_TURN):
            tally.add(nodes[first : first + _NODES_A_TURN])
            await asyncio.sleep(0)
        self._tally, self._tallied_at = tally, clock.monotonic()
        return tally

    def _asked(self, message: Incoming) -> None:
        asked = heard(message, AskOverview, "question for the overview")
        if asked is None:
            return
        if asked.asked_by != self._cluster.controld:
            told = self._tell(asked.number)
            self._cluster.bus.publish(overview_of(asked.asked_by), encode(told))

    def _tell(self, number: int) -> ControldOverview:
        shards, queued, in_flight = self._own()
        return ControldOverview(
            controld=self._cluster.controld,
            number=number,
            started_ms=self._started_ms,
            at_ms=self._cluster.clock.wall_ms(),
            shards=shards,
            loop_lag_s=self._gauges.loop_lag_s.value(),
            cpu_s=time.process_time(),
            pools=self._gauges.tallies.counts(queued, in_flight),
        )

    def _answered(self, message: Incoming) -> None:
        asked = self._round
        if asked is None:
            return
        told = heard(message, ControldOverview, "overview of a controld")
        if told is None:
            return
        if told.number == asked.number:
            self._take(asked, told)

    @staticmethod
    def _take(asked: _Round, told: ControldOverview) -> None:
        asked.answers[told.controld] = told
        if asked.living <= asked.answers.keys():
            asked.complete.set()

    async def _keep_balance(self) -> None:
        while True:
            self._show(await self.nodes())
            await asyncio.sleep(BALANCE_INTERVAL_S)

    def _show(self, tally: FleetTally) -> None:
        gauges = self._gauges
        gauges.balance().set(tally.places.balance)
        for pool, places in tally.pools.items():
            gauges.pool_balance(pool).set(places.balance)
        for pool in self._exported - tally.pools.keys():
            gauges.pool_balance.forget(pool)
        self._exported = set(tally.pools)
        for state in gauges.nodes.known() | {(state,) for state in tally.states}:
            gauges.nodes(*state).set(tally.states.get(state[0], 0))
