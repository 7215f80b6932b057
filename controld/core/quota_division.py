"""How one shared quota is divided among the controlds that want of it: a pure function."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

HEADROOM = 1.02
"""A share is so much larger than what was asked: small growth needs no new share."""

IDLE_SHARE = 0.5
"""Share of what nobody asks for that the idle ones get to begin with; the rest goes to
those that ask, by what they ask."""

FLOOR = 0.01
"""The idle ones have this share of the quota together, on top of it when all is asked for."""


@dataclass(slots=True, frozen=True)
class Quota:
    """What all controlds may spend together.

    `amount`: a second, or, of a `whole` quota, places that are held at once. `burst`: tokens
    that a bucket of the whole quota would hold; each controld's bucket holds the part that
    its share is of `amount`. `whole`: shares are whole numbers, and nothing comes on top.
    """

    amount: float
    burst: float = 1.0
    whole: bool = False

    @property
    def least(self) -> float:
        """Smallest share to have in advance: its bucket holds one token."""
        return 1.0 if self.whole else self.amount / max(1.0, self.burst)

    @property
    def ceiling(self) -> float:
        """Most that all shares are together."""
        return self.amount if self.whole else self.amount * (1.0 + FLOOR)


def divide(quota: Quota, demand: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each controld in `demand` (0: idle).

    Max-min fair: who asks for less than an even part gets what it asks for, the others part
    the rest evenly. What nobody asks for is spread (IDLE_SHARE). An idle one's share is at
    least `quota.least` or nothing: tokens that lie ready in many buckets of one token each
    would be more than the burst. One that is alone has all of it. The sum is at most
    `quota.ceiling`.
    """
    if len(demand) == 1:
        return dict.fromkeys(demand, quota.amount)
    asked = {
        name: math.ceil(wanted) if quota.whole else wanted * HEADROOM
        for name, wanted in sorted(demand.items())
        if wanted > 0.0
    }
    shares = _level(quota.amount, asked)
    spare = max(0.0, quota.amount - sum(shares.values()))
    idle = [name for name in sorted(demand) if name not in asked]
    floor = 0.0 if quota.whole else FLOOR * quota.amount
    given = _to_idle(idle, max(floor, spare * IDLE_SHARE), quota.least)
    spare -= sum(given.values())
    total = sum(asked.values())
    if spare > 0.0 and total > 0.0:
        shares = {name: share + spare * asked[name] / total for name, share in shares.items()}
    shares |= given
    return _whole(shares, int(quota.amount)) if quota.whole else shares


def _level(amount: float, asked: Mapping[str, float]) -> dict[str, float]:
    """Return min(asked, level) of each, the level such that the sum is at most `amount`."""
    shares: dict[str, float] = {}
    left, waiting = amount, sorted(asked.items(), key=lambda item: item[1])
    for at, (name, wanted) in enumerate(waiting):
        shares[name] = min(wanted, left / (len(waiting) - at))
        left -= shares[name]
    return shares


def _to_idle(idle: list[str], pot: float, least: float) -> dict[str, float]:
    fed = min(len(idle), int(pot / least + 1e-9)) if least > 0.0 else 0
    return {name: pot / fed if at < fed else 0.0 for at, name in enumerate(idle)}


def _whole(shares: Mapping[str, float], amount: int) -> dict[str, float]:
    """Round down, and give what that left to the largest remainders."""
    rounded = {name: float(int(share)) for name, share in shares.items()}
    left = min(amount, round(sum(shares.values()))) - round(sum(rounded.values()))
    by_rest = sorted(shares, key=lambda name: (rounded[name] - shares[name], name))
    for name in by_rest[: max(0, left)]:
        rounded[name] += 1.0
    return rounded
