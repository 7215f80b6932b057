"""The share of each shared quota that this controld may spend now, agreed on by reports.

Names of quotas: `rate/<pool>`, `rate/<pool>/<tenant>` (a second), `in_flight/<pool>` (whole).

Each quota has a holder, the member that rendezvous hashing picks, so there are as many
holders as quotas and no central lock. Every controld tells what it asks for and holds itself
to (QuotaReport); the holder divides the quota and grants each its share. What is kept:

1. A grant is a lease. It lapses LEASE_S after the *sending* of the follower's report that it
   answers (`seen`), by the follower's own clock: however late messages are, the holder knows
   that whatever it granted has lapsed LEASE_S after it last heard the follower.
2. The holder gives only what is free by what all may be spending (core/quota_grants).
3. A controld takes grants only from the holder that its own list of members gives. While any
   member's list differs (`members`), or a member was not heard and not yet silent for
   LEASE_S, no share is raised: a new holder learns first what is being spent. It renews what
   there is, so that a change of members takes nothing away.
4. A controld that is no member any more is still counted until it was silent for LEASE_S.
   One that neither etcd nor NATS reaches can accept nothing anyhow.

What "never exceeds the quota" means with a burst: over any second the sum of admissions
over all controlds is at most 1.05 x rate + burst, the tokens of the burst being shared like the
rate. One thing comes on top: tokens are whole, so a controld whose part of the burst is less
than two tokens may have saved two (core/admission). The shares alone are never more than
1.01 x rate together.

The caller calls `tick` every TICK_S, and sends the report that it returns to all others.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Set

from controld.core.quota_division import Quota
from controld.core.quota_grants import Follower, QuotaGrants
from controld.core.rendezvous import rightful_owner
from corefleet.messages.wire import QuotaReport

TICK_S = 0.2
LEASE_S = 4.0
"""Longer than a controld's lease in etcd: a holder that died is replaced before it lapses."""
_SETTLE_S = 1.0
"""A controld that just started listens so long before it raises anybody's share."""
_KEEP_ALIVE_S = 1.0
_REPEATS = 4
"""Reports at every tick after a change of members, of our share, or the end of our demand:
what others wait for must come soon, and some may be lost."""
_FORGET_S = 10.0
"""A quota that is wanted no more, and is not one of all controlds', is forgotten."""
_SENT_KEPT = 64
_RISE, _FALL, _STEADY = 0.5, 0.4, 0.2
_DEVIATIONS = 1.5
"""Counts that differ by less than so many deviations of a Poisson count are no change: a share
that follows chance is too small half of the time, and what it gave up is on its way."""
_GONE = 8.0
"""So many expected, none seen: the demand is over (by chance once in e^8 ticks)."""
_NO_DEMAND_PER_S = 0.05


class _Own:
    """This controld's side of one quota."""

    __slots__ = ("after", "cap", "count", "demand", "in_use", "lapses_at", "wanted_at")

    def __init__(self, now: float, after: int) -> None:
        self.after = after
        """Number of the last report that did not name the quota."""
        self.cap = 0.0
        self.lapses_at = 0.0
        self.count = 0
        self.demand = 0.0
        self.in_use = 0.0
        self.wanted_at = now

    def spend(self, now: float) -> float:
        return max(self.cap if now < self.lapses_at else 0.0, self.in_use)

    def measure(self, dt: float) -> None:
        seen = self.count / dt
        if not self.count and self.demand * dt > _GONE:
            self.demand = 0.0
        expected = self.demand * dt
        by_chance = abs(self.count - expected) <= _DEVIATIONS * math.sqrt(expected)
        moved = _RISE if seen > self.demand else _FALL
        self.demand += (seen - self.demand) * (_STEADY if by_chance else moved)
        if self.demand < _NO_DEMAND_PER_S:
            self.demand = 0.0
        self.count = 0


class _Peer:
    """Another controld's newest report."""

    __slots__ = ("at", "report")

    def __init__(self, report: QuotaReport, at: float) -> None:
        self.report = report
        self.at = at


class QuotaShares:
    """One controld's part in the agreement. Times are its own monotonic seconds.

    `resolve`, set before anything else is asked, gives the quota of a name, None when there
    is none (any more). `number` is larger than all that earlier processes with this id
    used, e.g. milliseconds.
    """

    def __init__(
        self,
        me: str,
        now: float,
        number: int = 0,
        resolve: Callable[[str], Quota | None] = lambda name: None,
    ) -> None:
        self.me = me
        self.resolve = resolve
        self._started = self._ticked_at = now
        self._number = number
        self._own: dict[str, _Own] = {}
        self._always: frozenset[str] = frozenset()
        self._members: dict[str, float] = {}
        self._view = ""
        self._peers: dict[str, _Peer] = {}
        self._holders: dict[str, str] = {}
        self._grants: dict[str, QuotaGrants] = {}
        self._sent_at: dict[int, float] = {}
        self._reported_at = now - _KEEP_ALIVE_S
        self._due = 0
        self._told = False
        """The last report named something: when there is nothing any more, that is told once."""
        self._backlog: dict[str, int] = {}

    def set_members(self, names: Iterable[str], now: float) -> None:
        """Take the names of all registered controlds, this one too once it is one."""
        members = {name: self._members.get(name, now) for name in sorted(names)}
        if members.keys() == self._members.keys():
            return
        self._members = members
        self._view = hashlib.blake2b("\n".join(members).encode(), digest_size=4).hexdigest()
        self._holders.clear()
        self._due = _REPEATS
        for name, own in self._own.items():
            self._be_held(name, own, now)

    def set_quotas(self, names: Iterable[str], now: float) -> None:
        """Take the quotas of which this controld wants a share before anybody asks."""
        self._always = frozenset(names)
        for name in self._always:
            self._get(name, now)

    def want(self, name: str, now: float) -> None:
        """Count one that is asked of the quota, to be admitted or not."""
        own = self._get(name, now)
        own.count += 1
        own.wanted_at = now

    def set_places(self, name: str, wanted: int, in_use: int, now: float) -> None:
        """Set how many places of a whole quota this controld would use, and does use."""
        own = self._get(name, now)
        own.demand, own.in_use = float(max(wanted, in_use)), float(in_use)
        if wanted or in_use:
            own.wanted_at = now

    def share(self, name: str, now: float) -> float:
        """Return what this controld may spend of the quota: a second, or places."""
        own = self._own.get(name)
        return own.cap if own is not None and now < own.lapses_at else 0.0

    def names(self) -> Set[str]:
        """Return the names of all quotas that this controld asks for."""
        return self._own.keys()

    def names_held(self) -> list[str]:
        """Return the names, among those that it asks for, of the quotas that it divides."""
        return sorted(name for name in self._own if self._holder(name) == self.me)

    def alone(self) -> bool:
        """Return whether this controld is the only one that is known."""
        return not self._peers and list(self._members) == [self.me]

    def set_backlog(self, backlog: dict[str, int]) -> None:
        """Set how many tasks of each pool with a limit wait in this controld's shards."""
        if backlog != self._backlog:
            self._backlog = dict(backlog)
            self._due = max(self._due, 1)

    def backlog(self, pool: str) -> int:
        """Return how many tasks of `pool` wait at the other controlds, as last heard."""
        return sum(peer.report.backlog.get(pool, 0) for peer in self._peers.values())

    def heard(self, report: QuotaReport, now: float) -> None:
        """Take another controld's report; older ones than known are ignored."""
        if report.controld == self.me:
            return
        known = self._peers.get(report.controld)
        if known is not None and report.number <= known.report.number:
            return
        self._peers[report.controld] = _Peer(report, now)
        if self.me in report.holders.values():
            self._due = max(self._due, 1)
        for name, granted in report.grants.items():
            self._granted(name, report, granted.get(self.me), now)

    def tick(self, now: float) -> QuotaReport | None:
        """Measure demand, renew and change grants; return the report to send, if one is due."""
        self._drop_silent(now)
        dt = max(1e-3, now - self._ticked_at)
        self._ticked_at = now
        busy = False
        for name, own in list(self._own.items()):
            quota = self.resolve(name)
            forgotten = name not in self._always and now - own.wanted_at > _FORGET_S
            if quota is None or (forgotten and not own.in_use):
                del self._own[name]
                continue
            wanted = own.demand
            if not quota.whole:
                own.measure(dt)
            if wanted and not own.demand:
                self._due = max(self._due, _REPEATS)
            busy = busy or own.demand > 0.0
        granted = self._divide_all(now)
        silent = not self._own and not self._backlog and not granted
        if silent and not self._told:
            return None
        if not (busy or self._due or now - self._reported_at >= _KEEP_ALIVE_S):
            return None
        self._told = not silent
        return self._report(granted, now)

    def leave(self) -> QuotaReport:
        """Spend nothing from now on; return the report that tells so."""
        self._own.clear()
        self._always = frozenset()
        self._members = {}
        self._holders.clear()
        self._number += 1
        return QuotaReport(controld=self.me, number=self._number)

    def _report(self, granted: dict[str, dict[str, float]], now: float) -> QuotaReport:
        self._number += 1
        self._sent_at[self._number] = self._reported_at = now
        self._sent_at.pop(self._number - _SENT_KEPT, None)
        self._due = max(0, self._due - 1)
        for name, grants in granted.items():
            self._grants[name].sent(self._number, grants, now + LEASE_S, now)
        holders = {name: self._holder(name) for name in self._own}
        dealt_with = {*holders.values(), *(peer for part in granted.values() for peer in part)}
        return QuotaReport(
            controld=self.me,
            number=self._number,
            demand={name: own.demand for name, own in self._own.items() if own.demand},
            spend={name: own.spend(now) for name, own in self._own.items() if own.spend(now)},
            holders=holders,
            seen={
                name: self._peers[name].report.number for name in dealt_with if name in self._peers
            },
            members=self._view,
            grants=granted,
            backlog=self._backlog,
        )

    def _granted(self, name: str, report: QuotaReport, amount: float | None, now: float) -> None:
        own = self._own.get(name)
        if own is None or amount is None or self._holder(name) != report.controld:
            return
        number = report.seen.get(self.me, 0)
        answered = self._sent_at.get(number)
        if answered is None or number <= own.after:
            return
        if abs(amount - own.cap) > 1e-9:
            self._due = max(self._due, _REPEATS)
        own.cap, own.lapses_at = amount, answered + LEASE_S

    def _divide_all(self, now: float) -> dict[str, dict[str, float]]:
        """Divide the quotas that this controld holds; return the grants to others."""
        followed: dict[str, dict[str, QuotaReport]] = {}
        for peer, heard in self._peers.items():
            for name, holder in heard.report.holders.items():
                if holder == self.me and self._holder(name) == self.me:
                    followed.setdefault(name, {})[peer] = heard.report
        for name in self._own:
            if self._holder(name) == self.me:
                followed.setdefault(name, {})
        self._grants = {name: self._grants.get(name) or QuotaGrants() for name in followed}
        may_raise = self._may_raise(now)
        granted = {}
        for name, reports in followed.items():
            quota = self.resolve(name)
            if quota is not None:
                granted[name] = self._divide(name, quota, reports, may_raise, now)
        return {name: part for name, part in granted.items() if part}

    def _divide(
        self,
        name: str,
        quota: Quota,
        reports: dict[str, QuotaReport],
        may_raise: bool,
        now: float,
    ) -> dict[str, float]:
        followers = {
            peer: Follower(
                report.demand.get(name, 0.0),
                report.spend.get(name, 0.0),
                report.seen.get(self.me, 0),
            )
            for peer, report in reports.items()
        }
        own = self._own.get(name)
        if own is not None:
            followers[self.me] = Follower(own.demand, own.spend(now), self._number)
        reserved = sum(
            heard.report.spend.get(name, 0.0)
            for peer, heard in self._peers.items()
            if peer not in reports
        )
        granted = self._grants[name].grant(quota, followers, reserved, may_raise)
        mine = granted.pop(self.me, None)
        if own is not None and mine is not None:
            own.cap, own.lapses_at = mine, now + LEASE_S
        return granted

    def _may_raise(self, now: float) -> bool:
        """Return whether all members are known to see the members that we see (3.)."""
        others = [name for name in self._members if name != self.me]
        if others and now - self._started < _SETTLE_S:
            return False
        for name in others:
            peer = self._peers.get(name)
            if peer is None:
                if now - max(self._started, self._members[name]) < LEASE_S:
                    return False
            elif peer.report.members != self._view:
                return False
        return True

    def _drop_silent(self, now: float) -> None:
        for name in [n for n, peer in self._peers.items() if now - peer.at > LEASE_S]:
            del self._peers[name]

    def _get(self, name: str, now: float) -> _Own:
        own = self._own.get(name)
        if own is None:
            own = self._own[name] = _Own(now, self._number)
            self._due = max(self._due, 1)
            self._be_held(name, own, now)
        return own

    def _be_held(self, name: str, own: _Own, now: float) -> None:
        """Have all at once when there is nobody else."""
        quota = self.resolve(name)
        if quota is not None and self.alone():
            own.cap, own.lapses_at = quota.amount, now + LEASE_S

    def _holder(self, name: str) -> str:
        """Return who divides the quota, by rendezvous hashing; '' without members."""
        holder = self._holders.get(name)
        if holder is None:
            holder = self._holders[name] = rightful_owner(name, self._members)
        return holder
