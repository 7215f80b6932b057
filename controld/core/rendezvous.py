"""Rendezvous hashing (Thaler and Ravishankar 1998): who of the members is responsible for a name.

Every controld comes to the same member without a word, and when members come or go, only
what they were or become responsible for moves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

_MASK = 2**64 - 1
_MIX = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB


def rightful_owner(name: str, members: Iterable[str]) -> str:
    """Return the member with the highest score for `name`, '' when there is none."""
    own = digest(name)
    return max(members, key=lambda member: (score(own, digest(member)), member), default="")


def digest(name: str) -> int:
    """Return 64 bits of a name, evenly spread."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def score(name: int, member: int) -> int:
    """Mix the digests of a name and of a member as splitmix64 does."""
    mixed = name ^ (member * _MIX & _MASK)
    mixed = (mixed ^ (mixed >> 30)) * _MIX & _MASK
    mixed = (mixed ^ (mixed >> 27)) * _MIX2 & _MASK
    return mixed ^ (mixed >> 31)
