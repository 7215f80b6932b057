"""The holder of a quota: what it grants to whom, so that the sum is kept whatever is lost.

For each controld the holder knows a bound: the most that it may be spending now, which is
what its newest report says it holds itself to, or a grant sent to it that the report does
not know yet. A lower grant takes effect in the bound only when the controld has confirmed
it, or when all that it was granted has lapsed; only what is free by the bounds is given
to others. So the sum of what all may spend never exceeds the quota, for any delay, loss
or order of the reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from controld.core.quota_division import Quota, divide

_SLACK = 0.9
"""A share is left as it is while the wanted one is not below this part of it, unless
another one lacks it."""


@dataclass(slots=True, frozen=True)
class Follower:
    """A controld as its newest report shows it: what it asks for and holds itself to."""

    demand: float
    spend: float
    seen: int
    """Newest report of the holder that it had heard."""


@dataclass(slots=True)
class _Sent:
    number: int
    amount: float
    lapses_at: float


@dataclass(slots=True)
class QuotaGrants:
    """The grants of one quota by its holder."""

    _sent: dict[str, list[_Sent]] = field(default_factory=dict)

    def grant(
        self,
        quota: Quota,
        followers: Mapping[str, Follower],
        reserved: float,
        may_raise: bool,
    ) -> dict[str, float]:
        """Return what each follower may spend from now on.

        `reserved` is what others than the followers may be spending. Without `may_raise` no
        bound is raised: somebody else might be granting too. The caller sends the grants
        and says so by `sent`.
        """
        wanted = divide(quota, {name: follower.demand for name, follower in followers.items()})
        bounds = {name: self._bound(name, follower) for name, follower in followers.items()}
        lacking = {
            name: wanted[name] - bounds[name] for name in wanted if wanted[name] > bounds[name]
        }
        free = max(0.0, quota.ceiling - reserved - sum(bounds.values()))
        over = reserved + sum(bounds.values()) > quota.ceiling
        scarce = over or sum(lacking.values()) > free
        granted = {}
        for name, bound in bounds.items():
            keeps = not scarce and followers[name].demand > 0.0 and wanted[name] > bound * _SLACK
            granted[name] = bound if keeps else min(bound, wanted[name])
        if may_raise:
            for name, more in _part(lacking, free, quota.whole).items():
                granted[name] = bounds[name] + more
        return granted

    def sent(self, number: int, granted: Mapping[str, float], lapse_at: float, now: float) -> None:
        """Note that report `number` carries `granted`, which all lapse until `lapse_at`."""
        for name, amount in granted.items():
            kept = [sent for sent in self._sent.get(name, ()) if sent.lapses_at > now]
            kept.append(_Sent(number, amount, lapse_at))
            self._sent[name] = kept
        for name in [name for name in self._sent if name not in granted]:
            if self._sent[name][-1].lapses_at <= now:
                del self._sent[name]

    def _bound(self, name: str, follower: Follower) -> float:
        sent = self._sent.get(name, ())
        coming = [grant.amount for grant in sent if grant.number > follower.seen]
        return max([follower.spend, *coming])


def _part(lacking: Mapping[str, float], free: float, whole: bool) -> dict[str, float]:
    """Part what is free among those that lack, by what they lack; whole ones one by one."""
    if not whole:
        total = sum(lacking.values())
        part = min(1.0, free / total) if total > 0.0 else 0.0
        return {name: lack * part for name, lack in lacking.items()}
    given = {}
    left = int(free + 1e-9)
    for at, (name, lack) in enumerate(sorted(lacking.items(), key=lambda item: item[1])):
        given[name] = float(min(int(lack), -(-left // (len(lacking) - at))))
        left -= int(given[name])
    return given
