"""Who may do what in etcd: the users, their roles, and the way there from what is there. Pure.

A user is the CN of a certificate, which is the holder's role; none has a password.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from corefleet.subjects import EVERY_KEY

ROOT = "root"
"""etcd's own role for everything: keys, users, snapshots, defragmentation."""
KEYS = "corefleet-keys"
"""Reads and writes every key of corefleet, and no other."""

USERS: Mapping[str, str] = {ROOT: ROOT, "controld": KEYS, "operator": ROOT}
"""Each user's one role. etcd wants a user `root` before it checks anything; no certificate has
that name. Snapshots take ROOT: etcd has no smaller right for them."""

RANGE_END = f"{EVERY_KEY[:-1]}{chr(ord(EVERY_KEY[-1]) + 1)}"
"""The first key behind all that begin with EVERY_KEY."""


@dataclass(frozen=True, slots=True)
class Found:
    """What etcd has now: users with their roles, and whether KEYS is there and right."""

    enabled: bool = False
    users: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    roles: frozenset[str] = frozenset()
    keys_granted: bool = False


Verb = Literal["add role", "grant keys", "add user", "grant role", "revoke role", "enable"]


@dataclass(frozen=True, slots=True)
class Step:
    """One call to etcd; `role` and `user` where the verb needs them."""

    verb: Verb
    user: str = ""
    role: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.verb, self.role, self.user and f"for {self.user}")))


def plan(found: Found) -> list[Step]:
    """Return the steps from `found` to USERS, the switch last; none when all is as it must be.

    Users of other names are left alone: they are somebody's who shares the cluster.
    """
    steps = [Step("add role", role=role) for role in (KEYS, ROOT) if role not in found.roles]
    if not found.keys_granted:
        steps.append(Step("grant keys", role=KEYS))
    for user, role in USERS.items():
        has = found.users.get(user)
        if has is None:
            steps.append(Step("add user", user))
        if role not in (has or ()):
            steps.append(Step("grant role", user, role))
        steps += [Step("revoke role", user, each) for each in sorted(has or ()) if each != role]
    if not found.enabled:
        steps.append(Step("enable"))
    return steps
