"""Who owns which unit: several cores over one simulated store."""

from __future__ import annotations

from random import Random

from controld.core.ownership import OwnershipCore, OwnershipSettings
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
from corefleet.messages.records import Ownership

TICK_S = 0.05


class Member:
    """One controld: its core, and whether it is alive."""

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.core = OwnershipCore(name, Random(seed), OwnershipSettings())
        self.alive = True
        self.running: dict[str, int] = {}
        self.actions: list[tuple[float, OwnershipAction]] = []


class Cluster:
    """A store of ownerships, leases of 3 s, and the members that use them."""

    def __init__(self, units: int = 32) -> None:
        self.units = frozenset(f"shard/{number}" for number in range(units))
        self.stored: dict[str, tuple[Ownership, int]] = {}
        self.revision = 0
        self.members: dict[str, Member] = {}
        self.registered: set[str] = set()
        self.now = 100.0
        self.overlaps: list[str] = []
        self.writes: list[float] = []

    def join(self, name: str) -> Member:
        member = self.members[name] = Member(name, seed=len(self.members))
        self.feed(member, UnitsKnown(self.units))
        for unit, (ownership, revision) in self.stored.items():
            self.feed(member, UnitSeen(unit, ownership, revision))
        self.registered.add(name)
        self.feed(member, LeaseValidity(self.now + 2.5))
        self.tell_members()
        return member

    def die(self, name: str) -> None:
        self.members.pop(name).alive = False

    def expire(self, *names: str) -> None:
        """The leases of dead members end."""
        self.registered -= set(names)
        self.tell_members()

    def tell_members(self) -> None:
        for member in list(self.members.values()):
            self.feed(member, MembersSeen(frozenset(self.registered)))

    def feed(self, member: Member, event: OwnershipEvent) -> None:
        for action in member.core.handle(event, self.now):
            member.actions.append((self.now, action))
            self.carry_out(member, action)

    def carry_out(self, member: Member, action: OwnershipAction) -> None:
        if isinstance(action, Start):
            for other in self.members.values():
                if action.unit in other.running:
                    self.overlaps.append(f"{action.unit}: {other.name} and {member.name}")
            member.running[action.unit] = action.epoch
        elif isinstance(action, Stop):
            member.running.pop(action.unit, None)
        elif isinstance(action, Claim):
            self.claim(member, action)
        else:
            self.release(member, action)

    def claim(self, member: Member, action: Claim) -> None:
        _, revision = self.stored.get(action.unit, (None, 0))
        if revision != action.expected or action.dead in self.registered:
            self.feed(member, ClaimLost(action.unit))
            return
        self.put(action.unit, Ownership(controld=member.name, epoch=action.epoch))
        self.feed(member, ClaimWon(action.unit, action.epoch, self.revision))
        self.show(action.unit)

    def release(self, member: Member, action: Release) -> None:
        _, revision = self.stored[action.unit]
        if revision == action.expected:
            assert action.unit not in member.running, "Stop comes before Release"
            self.put(action.unit, Ownership(controld="", epoch=action.epoch))
            self.feed(member, Released(action.unit, self.revision))
            self.show(action.unit)

    def put(self, unit: str, ownership: Ownership) -> None:
        self.revision += 1
        self.writes.append(self.now)
        self.stored[unit] = (ownership, self.revision)

    def show(self, unit: str) -> None:
        ownership, revision = self.stored[unit]
        for member in list(self.members.values()):
            self.feed(member, UnitSeen(unit, ownership, revision))

    def run(self, seconds: float, without_lease: str = "") -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            for member in list(self.members.values()):
                if member.name != without_lease:
                    self.feed(member, LeaseValidity(self.now + 2.5))
                self.feed(member, OwnershipTick())

    def owners(self) -> dict[str, list[str]]:
        """Return who runs each unit."""
        found: dict[str, list[str]] = {unit: [] for unit in self.units}
        for member in self.members.values():
            for unit in member.running:
                found[unit].append(member.name)
        return found

    def all_owned_once(self) -> bool:
        return all(len(owners) == 1 for owners in self.owners().values())


def cluster_of(*names: str, units: int = 32) -> Cluster:
    cluster = Cluster(units)
    for name in names:
        cluster.join(name)
    cluster.run(5.0)
    assert cluster.all_owned_once()
    return cluster


def test_units_never_owned_are_claimed_at_once_by_their_rightful_owner() -> None:
    cluster = Cluster(units=200)
    cluster.join("a")
    cluster.run(2 * TICK_S)
    assert cluster.all_owned_once()
    assert {ownership.epoch for ownership, _ in cluster.stored.values()} == {1}
    assert cluster.members["a"].core.owned == dict.fromkeys(cluster.units, 1)
    assert cluster.members["a"].core.owner_of("shard/3") == "a"


def test_units_spread_about_evenly() -> None:
    cluster = cluster_of("a", "b", "c", "d", units=256)
    sizes = [len(member.running) for member in cluster.members.values()]
    assert sum(sizes) == 256
    assert min(sizes) > 40


def test_a_new_member_takes_only_what_is_its_own_by_right() -> None:
    cluster = cluster_of("a", "b", "c", units=256)
    before = cluster.owners()
    cluster.join("d")
    cluster.run(8.0)
    after = cluster.owners()
    moved = [unit for unit in cluster.units if before[unit] != after[unit]]
    assert all(after[unit] == ["d"] for unit in moved)
    assert 40 < len(moved) < 90
    assert cluster.overlaps == []


def test_a_new_member_causes_no_stampede() -> None:
    cluster = cluster_of("a", units=256)
    start = cluster.now
    cluster.writes.clear()
    cluster.join("b")
    cluster.run(0.9)
    assert cluster.writes == [], "members must have settled first"
    cluster.run(8.0)
    assert cluster.all_owned_once()
    each_second = [sum(int(at - start) == second for at in cluster.writes) for second in range(9)]
    assert max(each_second) <= 2 * (32 + 16), "a release and a claim for each move"


def test_a_flapping_member_moves_nothing() -> None:
    cluster = cluster_of("a")
    for _ in range(5):
        cluster.join("b")
        cluster.run(0.5)
        cluster.die("b")
        cluster.expire("b")
        cluster.run(0.5)
    assert cluster.members["a"].running.keys() == cluster.units


def test_rule_12_a_vanished_leases_units_are_claimed_after_a_jittered_grace() -> None:
    cluster = cluster_of("a", "b", "c", units=128)
    cluster.die("c")
    cluster.run(1.0)
    assert not cluster.all_owned_once(), "its lease still stands"
    vanished = cluster.now
    cluster.writes.clear()
    cluster.expire("c")
    cluster.run(1.0)
    assert cluster.all_owned_once()
    waits = [at - vanished for at in cluster.writes]
    assert min(waits) >= 0.2 - TICK_S
    assert max(waits) <= 0.6 + 2 * TICK_S
    assert len({round(wait, 2) for wait in waits}) >= 5, "spread, not all at once"
    dead = [
        action.dead
        for member in cluster.members.values()
        for at, action in member.actions
        if isinstance(action, Claim) and at > vanished
    ]
    assert set(dead) == {"c"}


def test_rule_12_thirty_of_a_hundred_vanish_and_nobody_claims_much_at_once() -> None:
    cluster = Cluster(units=256)
    names = [f"c{index}" for index in range(40)]
    for name in names:
        cluster.join(name)
    cluster.run(2.0)
    for name in names[:12]:
        cluster.die(name)
    cluster.expire(*names[:12])
    cluster.writes.clear()
    cluster.run(1.5)
    assert cluster.all_owned_once()
    busiest = max(cluster.writes.count(at) for at in set(cluster.writes))
    assert busiest < len(cluster.writes) / 3


def test_rule_12_the_old_owner_may_claim_first() -> None:
    cluster = cluster_of("a", "b")
    cluster.die("b")
    cluster.run(0.5)
    mine = [unit for unit, (ownership, _) in cluster.stored.items() if ownership.controld == "b"]
    cluster.join("b")
    cluster.run(2 * TICK_S)
    assert set(cluster.members["b"].running) == set(mine)
    assert {cluster.stored[unit][0].epoch for unit in mine} == {2}


def test_a_hint_from_a_peer_shortens_the_grace_but_never_precedes_the_lease() -> None:
    cluster = cluster_of("a", "b", units=64)
    cluster.die("b")
    cluster.feed(cluster.members["a"], PeerHint("b"))
    cluster.run(1.0)
    assert len(cluster.members["a"].running) < 64
    vanished = cluster.now
    cluster.writes.clear()
    cluster.expire("b")
    cluster.run(0.5)
    assert cluster.all_owned_once()
    assert min(cluster.writes) - vanished <= 2 * TICK_S


def test_rule_7_everything_stops_when_the_lease_ends_before_another_can_begin() -> None:
    cluster = cluster_of("a", "b")
    held = cluster.now
    cluster.run(2.4, without_lease="a")
    assert cluster.members["a"].running
    cluster.run(0.2, without_lease="a")
    assert not cluster.members["a"].running
    stops = [at for at, action in cluster.members["a"].actions if isinstance(action, Stop)]
    assert min(at for at in stops if at > held) <= held + 2.5 + TICK_S
    cluster.expire("a")
    cluster.run(1.0, without_lease="a")
    assert cluster.members["b"].running.keys() == cluster.units
    assert cluster.overlaps == []


def test_rule_7_a_lease_regained_means_a_new_epoch() -> None:
    cluster = cluster_of("a")
    cluster.run(3.0, without_lease="a")
    assert not cluster.members["a"].running
    cluster.run(0.3)
    assert cluster.members["a"].core.owned == dict.fromkeys(cluster.units, 2)


def test_rule_7_nothing_starts_or_is_claimed_without_a_lease() -> None:
    core = OwnershipCore("a", Random(0))
    core.handle(UnitsKnown(frozenset({"shard/0"})), 1.0)
    core.handle(MembersSeen(frozenset({"a"})), 1.0)
    assert core.handle(OwnershipTick(), 1.0) == []
    core.handle(LeaseValidity(3.0), 2.0)
    assert core.handle(OwnershipTick(), 2.0) == [Claim("shard/0", 1, 0, "")]
    assert core.handle(ClaimWon("shard/0", 1, 9), 3.5) == [], "won too late"
    core.handle(LeaseValidity(6.0), 4.0)
    assert core.handle(OwnershipTick(), 4.0) == [Claim("shard/0", 2, 9, "")]


def test_a_controld_that_is_no_member_claims_nothing() -> None:
    core = OwnershipCore("a", Random(0))
    core.handle(LeaseValidity(9.0), 1.0)
    core.handle(UnitsKnown(frozenset({"shard/0"})), 1.0)
    core.handle(MembersSeen(frozenset({"b"})), 1.0)
    assert core.handle(OwnershipTick(), 1.0) == []


def test_an_undecided_claim_is_resolved_by_what_the_store_shows() -> None:
    core = ready_core()
    assert core.handle(OwnershipTick(), 1.0) == [Claim("shard/0", 1, 0, "")]
    assert core.handle(ClaimLost("shard/0"), 1.1) == []
    seen = UnitSeen("shard/0", Ownership(controld="a", epoch=1), 9)
    assert core.handle(seen, 1.2) == [Start("shard/0", 1)]
    assert core.handle(seen, 1.3) == []


def test_a_lost_claim_backs_off_and_tries_again() -> None:
    core = ready_core()
    core.handle(OwnershipTick(), 1.0)
    core.handle(ClaimLost("shard/0"), 1.0)
    assert core.handle(OwnershipTick(), 1.1) == []
    assert core.handle(OwnershipTick(), 1.7) == [Claim("shard/0", 1, 0, "")]


def test_an_ownership_of_an_earlier_life_is_claimed_anew_not_resumed() -> None:
    core = ready_core()
    assert core.handle(UnitSeen("shard/0", Ownership(controld="a", epoch=6), 40), 1.0) == []
    assert core.handle(OwnershipTick(), 1.0) == [Claim("shard/0", 7, 40, "")]


def test_an_ownership_of_an_earlier_life_that_belongs_to_another_is_given_back() -> None:
    cluster = cluster_of("a", "b")
    theirs = next(iter(cluster.members["b"].running))
    core = OwnershipCore("a", Random(0))
    core.handle(LeaseValidity(9.0), 1.0)
    core.handle(UnitsKnown(frozenset({theirs})), 1.0)
    core.handle(MembersSeen(frozenset({"a", "b"})), 1.0)
    core.handle(UnitSeen(theirs, Ownership(controld="a", epoch=6), 40), 1.0)
    assert core.handle(OwnershipTick(), 1.0) == [Release(theirs, 6, 40)]
    assert core.handle(OwnershipTick(), 1.1) == []


def test_a_unit_that_another_took_stops_at_once() -> None:
    core = ready_core()
    core.handle(OwnershipTick(), 1.0)
    core.handle(ClaimWon("shard/0", 1, 9), 1.0)
    seen = UnitSeen("shard/0", Ownership(controld="b", epoch=2), 11)
    assert core.handle(seen, 1.1) == [Stop("shard/0", "owned by b at epoch 2")]
    older = UnitSeen("shard/0", Ownership(controld="a", epoch=1), 9)
    assert core.handle(older, 1.2) == []


def test_a_unit_that_is_no_more_stops_and_what_was_seen_of_it_is_kept() -> None:
    core = ready_core()
    core.handle(OwnershipTick(), 1.0)
    core.handle(ClaimWon("shard/0", 1, 9), 1.0)
    assert core.handle(UnitsKnown(frozenset()), 1.1) == [Stop("shard/0", "the unit is no more")]
    assert core.handle(OwnershipTick(), 1.2) == []
    core.handle(UnitsKnown(frozenset({"shard/0"})), 1.3)
    assert core.handle(OwnershipTick(), 1.3) == [Claim("shard/0", 2, 9, "")]


def ready_core() -> OwnershipCore:
    core = OwnershipCore("a", Random(0))
    core.handle(LeaseValidity(9.0), 1.0)
    core.handle(UnitsKnown(frozenset({"shard/0"})), 1.0)
    core.handle(MembersSeen(frozenset({"a"})), 1.0)
    return core


def test_random_deaths_and_joins_never_overlap_and_always_settle() -> None:
    for seed in range(15):
        rng = Random(seed)
        cluster = Cluster(units=24)
        cluster.join("m0")
        dead: list[str] = []
        for number in range(1, 14):
            kind = rng.random()
            if kind < 0.5:
                cluster.join(f"m{number}")
            elif kind < 0.8 and len(cluster.members) > 1:
                name = rng.choice(sorted(cluster.members))
                cluster.die(name)
                dead.append(name)
            elif dead:
                cluster.expire(dead.pop())
            cluster.run(rng.choice([0.05, 0.4, 2.0]))
        cluster.expire(*dead)
        cluster.run(6.0)
        assert cluster.all_owned_once(), f"seed {seed}"
        assert cluster.overlaps == [], f"seed {seed}"
        rightful = {
            m.core.owner_of(u) == m.name for m in cluster.members.values() for u in m.running
        }
        assert rightful == {True}, f"seed {seed}"
