"""Ownership on the store: feeds the ownership core and carries out what it decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import structlog

from controld.cluster import Cluster
from controld.core.ownership import OwnershipCore
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
from controld.heard import heard
from controld.membership import Membership
from controld.registry import Registry
from corefleet.background import Background, stop
from corefleet.bus import Incoming, Subscription
from corefleet.codec import decode, encode
from corefleet.errors import Unavailable
from corefleet.messages.records import ControldRegistration, NodeRegistration, Ownership
from corefleet.messages.wire import PeerSuspected
from corefleet.store import Compare, Put
from corefleet.subjects import PEERS, controld_key, rack_key, shard_key

_log = structlog.get_logger(__name__)

_TICK_S = 0.05
_WRITES_AT_ONCE = 32
_RELEASES_A_COMMIT = 48
_RETRY_S = 0.3


class Units(Protocol):
    """What is owned: shards and racks in motion."""

    def halt(self, unit: str) -> None:
        """No decision of ours about `unit` may follow from now on."""

    async def start_unit(self, unit: str, epoch: int, revision: int) -> None:
        """Take the unit into motion; `revision` is that of its ownership in the store."""

    async def stop_unit(self, unit: str) -> None:
        """Return when nothing of the unit moves any more. Idempotent."""


class Owner:
    """One controld's share of shards and racks, while its lease is valid."""

    def __init__(
        self,
        cluster: Cluster,
        background: Background,
        registry: Registry,
        core: OwnershipCore,
        membership: Membership,
        units: Units,
        decided: Callable[[OwnershipAction], None] = lambda action: None,
    ) -> None:
        self._decided = decided
        self._cluster = cluster
        self._background = background
        self._registry = registry
        self._core = core
        self._membership = membership
        self._units = units
        self._revisions: dict[str, int] = {}
        self._epochs: dict[str, int] = {}
        self._changing: dict[str, asyncio.Task[None]] = {}
        self._writes = asyncio.Semaphore(_WRITES_AT_ONCE)
        self._ticking: asyncio.Task[None] | None = None
        self._draining = False
        self._hints: Subscription | None = None
        self._units_known: frozenset[str] = frozenset()

    async def start(self) -> None:
        """Join the cluster and begin to own. Raises Conflict, Unavailable."""
        await self._membership.join(self._lease_lost)
        self._feed(LeaseValidity(self._membership.valid_until()))
        self._registry.shards.listen(self._shard_seen)
        self._registry.racks.listen(self._rack_seen)
        self._registry.nodes.listen(self._node_seen)
        self._registry.controlds.listen(self._controld_seen)
        self._tell_units()
        self._hints = await self._cluster.bus.subscribe(PEERS, self._hinted)
        self._ticking = self._background.spawn(self._tick(), "ownership ticks")

    async def close(self) -> None:
        """Stop all units, release them for the others, leave the cluster. Idempotent."""
        if self._draining:
            return
        self._draining = True
        await stop(self._ticking)
        if self._hints is not None:
            await self._hints.close()
        owned = list(self._epochs)
        for unit in owned:
            self._units.halt(unit)
        await asyncio.gather(*self._changing.values(), return_exceptions=True)
        await asyncio.gather(*(self._units.stop_unit(unit) for unit in owned))
        try:
            await self._release_all(owned)
        except Unavailable as error:
            _log.warning("units not released; they are taken over", error=str(error))
        await self._membership.leave()

    def owned(self) -> dict[str, int]:
        """Return the units that are ours, with their epochs."""
        return dict(self._epochs)

    def may_act(self) -> bool:
        """Whether our lease lets us decide now; once it does not, all units are halted."""
        now = self._cluster.clock.monotonic()
        if now < self._membership.valid_until():
            return True
        self._feed(LeaseValidity(self._membership.valid_until()))
        self._feed(OwnershipTick())
        return False

    def superseded(self, shard: int, newer: int) -> None:
        """A newer owner's mark was found in the shard's stream: see what the store says."""
        self._background.spawn(self._look(f"shard/{shard}"))

    def _lease_lost(self) -> None:
        self._feed(LeaseValidity(0.0))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._feed(LeaseValidity(self._membership.valid_until()))
            self._feed(OwnershipTick())

    def _feed(self, event: OwnershipEvent) -> None:
        if self._draining:
            return
        for action in self._core.handle(event, self._cluster.clock.monotonic()):
            self._carry_out(action)

    def _carry_out(self, action: OwnershipAction) -> None:
        self._decided(action)
        match action:
            case Start():
                revision = self._revisions.get(action.unit, 0)
                self._epochs[action.unit] = action.epoch
                _log.debug("unit starts", unit=action.unit, epoch=action.epoch)
                self._change(
                    action.unit, self._units.start_unit(action.unit, action.epoch, revision)
                )
            case Stop():
                self._halt(action.unit, action.reason)
            case Claim():
                self._background.spawn(self._claim(action), f"claim {action.unit}")
            case Release():
                self._halt(action.unit, "released to another controld")
                self._change(action.unit, self._release(action))

    def _halt(self, unit: str, reason: str) -> None:
        self._units.halt(unit)
        if self._epochs.pop(unit, None) is not None:
            _log.debug("unit stops", unit=unit, reason=reason)
            self._change(unit, self._units.stop_unit(unit))

    def _change(self, unit: str, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` once the unit's changes before it are done."""
        before = self._changing.get(unit)

        async def in_turn() -> None:
            if before is not None:
                await asyncio.gather(before, return_exceptions=True)
            await work

        task = self._background.spawn(in_turn(), f"change {unit}")
        self._changing[unit] = task
        task.add_done_callback(lambda done: self._changed(unit, done))

    def _changed(self, unit: str, task: asyncio.Task[None]) -> None:
        if self._changing.get(unit) is task:
            del self._changing[unit]

    async def _claim(self, action: Claim) -> None:
        compares = [Compare(key_of(action.unit), action.expected)]
        if action.dead:
            compares.append(Compare(controld_key(action.dead), 0))
        # A claim of ours counts only while we are a member ourselves.
        compares.append(Compare(controld_key(self._cluster.controld), self._membership.revision))
        made = Ownership(controld=self._cluster.controld, epoch=action.epoch)
        async with self._writes:
            try:
                done = await self._cluster.store.commit(
                    compares, [Put(key_of(action.unit), encode(made))]
                )
            except Unavailable as error:
                _log.debug("claim undecided", unit=action.unit, error=str(error))
                await self._look(action.unit)
                self._feed(ClaimLost(action.unit))
                return
        if not done.succeeded:
            await self._look(action.unit)
            self._feed(ClaimLost(action.unit))
            return
        self._revisions[action.unit] = done.revision
        self._feed(ClaimWon(action.unit, action.epoch, done.revision))

    async def _release(self, action: Release) -> None:
        await self._units.stop_unit(action.unit)
        put = Put(key_of(action.unit), encode(Ownership(controld="", epoch=action.epoch)))
        while True:
            try:
                async with self._writes:
                    done = await self._cluster.store.commit(
                        [Compare(put.key, action.expected)], [put]
                    )
            except Unavailable as error:
                _log.debug("release undecided", unit=action.unit, error=str(error))
                await asyncio.sleep(_RETRY_S)
                continue
            if done.succeeded:
                self._feed(Released(action.unit, done.revision))
            else:
                await self._look(action.unit)
            return

    async def _release_all(self, units: Sequence[str]) -> None:
        """Give up all units at once, in few transactions, ownership checked in each."""
        for start in range(0, len(units), _RELEASES_A_COMMIT):
            puts, compares = [], []
            for unit in units[start : start + _RELEASES_A_COMMIT]:
                entry = await self._cluster.store.get(key_of(unit))
                if entry is None:
                    continue
                found = decode(entry.value, Ownership)
                if found.controld == self._cluster.controld:
                    compares.append(Compare(entry.key, entry.mod_revision))
                    puts.append(Put(entry.key, encode(Ownership(controld="", epoch=found.epoch))))
            if puts:
                await self._cluster.store.commit(compares, puts)

    async def _look(self, unit: str) -> None:
        """Tell the core what the store says of the unit now."""
        try:
            entry = await self._cluster.store.get(key_of(unit))
        except Unavailable:
            # The watch will tell once the store is back.
            return
        if entry is not None:
            self._seen(unit, decode(entry.value, Ownership), entry.mod_revision)

    def _seen(self, unit: str, found: Ownership | None, revision: int) -> None:
        if found is not None:
            self._revisions[unit] = max(revision, self._revisions.get(unit, 0))
        self._feed(UnitSeen(unit, found, revision if found else 0))

    def _shard_seen(self, name: str, found: Ownership | None, revision: int) -> None:
        self._seen(f"shard/{int(name)}", found, revision)

    def _rack_seen(self, name: str, found: Ownership | None, revision: int) -> None:
        self._seen(f"rack/{name}", found, revision)

    def _node_seen(self, name: str, found: NodeRegistration | None, revision: int) -> None:
        self._tell_units()

    def _hinted(self, message: Incoming) -> None:
        told = heard(message, PeerSuspected, "word of a peer")
        if told is None:
            return
        self._feed(PeerHint(told.controld))

    def _controld_seen(self, name: str, found: ControldRegistration | None, revision: int) -> None:
        if found is None and name == self._cluster.controld and not self._draining:
            self._membership.removed(revision)
        self._feed(MembersSeen(frozenset(self._registry.controlds.records)))

    def _tell_units(self) -> None:
        shards = {f"shard/{number}" for number in range(self._cluster.settings.shards)}
        racks = {f"rack/{node.rack}" for node in self._registry.nodes.records.values()}
        units = frozenset(shards | racks)
        if units != self._units_known:
            self._units_known = units
            self._feed(UnitsKnown(units))


def key_of(unit: str) -> str:
    """Return the store's key of a unit: `shard/17` or `rack/r1`."""
    kind, _, name = unit.partition("/")
    return shard_key(int(name)) if kind == "shard" else rack_key(name)
