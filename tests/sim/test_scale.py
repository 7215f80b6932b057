"""The reference plan with the pure cores: 100 controlds and 4096 nodes in 103 racks, of which
30 controlds and 5 racks vanish at one moment."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest

from controld.core.fleet import Fleet
from controld.core.liveness import LivenessTimes, RackLiveness
from controld.core.liveness_io import (
    BeatReceived,
    Found,
    LivenessAction,
    LivenessTick,
    NodeRegisteredEvent,
    Observe,
    Observed,
    PeersSeen,
    Probe,
    ProbeAnswered,
    PublishDigest,
    PushVerdict,
)
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
    Start,
    UnitSeen,
    UnitsKnown,
)
from corefleet.messages.records import NodeRegistration, Ownership, PoolSpec
from corefleet.messages.wire import Heartbeat, SlotUse
from tests.sim.loop import START_S, Scheduler
from tests.sim.wires import drawn

NODES, A_RACK, CONTROLDS, SHARDS = 4096, 40, 100, 256
LOST_RACKS, LOST_CONTROLDS = 5, 30
LEASE_S = 2.0
TICK_S = 0.05
BEAT_S = 0.2
STORE_S = 0.005
"""Until a write to the store is answered, or seen by a watcher."""
WIRE_S = 0.001
DIES_AT_S = 2.0


class Racks(Scheduler):
    """Every rack's liveness, the beats of all nodes, and one controld's picture of them."""

    def __init__(self) -> None:
        super().__init__(0)
        self._rng = self.rng("racks")
        self._times = LivenessTimes()
        self.fleet = Fleet()
        self.fleet.set_pools({"p": PoolSpec(name="p", agent="a:B")})
        self.dead: set[str] = set()
        self.verdicts: dict[str, float] = {}
        self.told: dict[str, float] = {}
        """When the fleet's picture had each lost node."""
        self._racks: dict[str, RackLiveness] = {}
        for number in range(NODES):
            self._add(f"n{number}", f"r{number // A_RACK}")
        for rack in self._racks:
            self.after(drawn(self._rng, 0.0, TICK_S), self._tick, rack)

    def _add(self, node: str, rack: str) -> None:
        core = self._racks.get(rack)
        if core is None:
            core = self._racks[rack] = RackLiveness(rack, "c0", 1, self._times)
        core.handle(PeersSeen(("c1", "c2"), ()), self.now, 0)
        made = NodeRegistration(node=node, rack=rack, epoch=1, probe_address="there:1")
        core.handle(NodeRegisteredEvent(made), self.now, 0)
        self.fleet.registered(made, self.now)
        self.after(drawn(self._rng, 0.0, BEAT_S), self._beat, node, rack, 1)

    def _beat(self, node: str, rack: str, number: int) -> None:
        if node in self.dead:
            return
        slots = (SlotUse("p", 0, 8, 0),)
        made = Heartbeat(node=node, rack=rack, epoch=1, number=number, slots=slots)
        self._feed(rack, self._racks[rack].handle(BeatReceived(made), self.now, 0))
        self.after(BEAT_S, self._beat, node, rack, number + 1)

    def _tick(self, rack: str) -> None:
        self._feed(rack, self._racks[rack].handle(LivenessTick(), self.now, 0))
        self.after(TICK_S, self._tick, rack)

    def _feed(self, rack: str, actions: Iterable[LivenessAction]) -> None:
        for action in actions:
            match action:
                case Probe():
                    alive = action.node not in self.dead
                    wait = WIRE_S if alive else self._times.probe_timeout_s
                    found: Found = "alive" if alive else "nobody"
                    answer = ProbeAnswered(action.node, action.node_epoch, found)
                    self.after(wait, self._looked, rack, answer)
                case Observe():
                    alive = action.node not in self.dead
                    wait = WIRE_S if alive else self._times.probe_timeout_s
                    found = "alive" if alive else "nobody"
                    seen = Observed(action.node, action.node_epoch, action.observer, found)
                    self.after(wait + 2 * WIRE_S, self._looked, rack, seen)
                case PublishDigest():
                    self.fleet.digest(action.digest, self.now)
                case PushVerdict():
                    self.verdicts.setdefault(action.verdict.node, self.now)
                    delta = self.fleet.verdict(action.verdict, self.now)
                    for gone in delta.gone:
                        self.told.setdefault(gone.node, self.now)

    def _looked(self, rack: str, answer: ProbeAnswered | Observed) -> None:
        self._feed(rack, self._racks[rack].handle(answer, self.now, 0))


class Owners(Scheduler):
    """Every controld's ownership core over one store with compare-and-set and leases."""

    def __init__(self) -> None:
        super().__init__(1)
        self._rng = self.rng("owners")
        racks = -(-NODES // A_RACK)
        self.units = [f"shard/{n}" for n in range(SHARDS)] + [f"rack/r{n}" for n in range(racks)]
        self.stored: dict[str, tuple[Ownership, int]] = {}
        self.revision = 0
        self.started: dict[str, float] = {}
        self.writes = 0
        self.refused = 0
        self.registered = {f"c{number}" for number in range(CONTROLDS)}
        self.alive = set(self.registered)
        self._lease: dict[str, float] = {}
        self.cores = {
            name: OwnershipCore(name, Random(f"core {name}")) for name in sorted(self.registered)
        }
        for name in self.cores:
            self._feed(name, UnitsKnown(frozenset(self.units)))
            self._keep_alive(name)
            self._feed(name, MembersSeen(frozenset(self.registered)))
            self.after(drawn(self._rng, 0.0, TICK_S), self._tick, name)

    def die(self, names: Iterable[str]) -> None:
        """Let controlds vanish; their leases end later."""
        for name in names:
            self.alive.discard(name)
            self.at(self._lease[name], self._expire, name)

    def owned_by_the_living(self) -> bool:
        return all(
            unit in self.stored and self.stored[unit][0].controld in self.alive
            for unit in self.units
        )

    def _keep_alive(self, name: str) -> None:
        if name in self.alive:
            sent = self.now - drawn(self._rng, 0.0, WIRE_S)
            self._lease[name] = sent + LEASE_S
            self._feed(name, LeaseValidity(sent + LEASE_S * 0.9))
            self.after(LEASE_S / 3 * drawn(self._rng, 0.5, 1.0), self._keep_alive, name)

    def _expire(self, name: str) -> None:
        self.registered.discard(name)
        members = frozenset(self.registered)
        for each in sorted(self.alive):
            self.after(STORE_S, self._feed, each, MembersSeen(members))

    def _tick(self, name: str) -> None:
        if name in self.alive:
            self._feed(name, OwnershipTick())
            self.after(TICK_S, self._tick, name)

    def _feed(self, name: str, event: OwnershipEvent) -> None:
        if name in self.alive:
            for action in self.cores[name].handle(event, self.now):
                self._carry_out(name, action)

    def _carry_out(self, name: str, action: OwnershipAction) -> None:
        match action:
            case Claim():
                self.after(STORE_S, self._claim, name, action)
            case Start():
                self.started[action.unit] = self.now
            case _:
                raise AssertionError(f"{name} moves what need not move: {action}")

    def _claim(self, name: str, claim: Claim) -> None:
        if name not in self.alive:
            return
        self.writes += 1
        before = self.stored.get(claim.unit)
        stale = (before[1] if before else 0) != claim.expected
        if stale or (claim.dead and claim.dead in self.registered):
            self.refused += 1
            self._feed(name, ClaimLost(claim.unit))
            return
        self.revision += 1
        made = Ownership(controld=name, epoch=claim.epoch)
        self.stored[claim.unit] = (made, self.revision)
        self._feed(name, ClaimWon(claim.unit, claim.epoch, self.revision))
        for each in sorted(self.alive):
            self.after(STORE_S, self._feed, each, UnitSeen(claim.unit, made, self.revision))


@pytest.mark.timeout(300)
def test_five_racks_lost_at_once_are_found_within_the_budget_and_nobody_else() -> None:
    racks = Racks()
    racks.run_until(START_S + DIES_AT_S)
    assert not racks.verdicts
    dead = [f"n{number}" for number in range(17 * A_RACK, (17 + LOST_RACKS) * A_RACK)]
    racks.dead.update(dead)
    racks.run_until(START_S + DIES_AT_S + 2.0)
    took = sorted(racks.verdicts[node] - START_S - DIES_AT_S for node in dead)
    assert set(racks.verdicts) == set(racks.told) == set(dead)
    assert took[-1] < 1.5
    assert took[len(took) // 2] < 0.8


@pytest.mark.timeout(300)
def test_thirty_controlds_gone_at_once_lose_their_units_and_no_unit_moves_without_need() -> None:
    owners = Owners()
    owners.run_until(START_S + 1.0)
    assert owners.owned_by_the_living()
    assert owners.writes == len(owners.units)
    assert owners.refused == 0
    before = {unit: owners.stored[unit][0] for unit in owners.units}
    dead = [f"c{number}" for number in range(LOST_CONTROLDS)]
    lost = {unit for unit, found in before.items() if found.controld in dead}
    died_at = owners.now
    owners.die(dead)
    owners.run_until(died_at + 3.0, owners.owned_by_the_living)
    assert owners.owned_by_the_living()
    assert owners.now - died_at < 3.0
    moved = {unit for unit in owners.units if owners.stored[unit][0] != before[unit]}
    assert moved == lost
    shares: dict[str, int] = {}
    for found, _ in owners.stored.values():
        shares[found.controld] = shares.get(found.controld, 0) + 1
    assert max(shares.values()) <= 4 * len(owners.units) / len(owners.alive)
    owners.run_until(owners.now + 2.0)
    assert owners.writes - len(owners.units) <= 1.5 * len(lost), "a herd of claims"
