"""The store: few, small, consistent records with watches and leases (etcd).

One protocol with an etcd and an in-memory implementation, held to one contract test
(tests/contract/test_store.py). Every call has a deadline and raises Unavailable (or
Timeout) when no endpoint answers within it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, frozen=True)
class KeyValue:
    """A key with its value. Revisions are those of the whole store."""

    key: str
    value: bytes
    mod_revision: int
    create_revision: int
    lease: int = 0


@dataclass(slots=True, frozen=True)
class Compare:
    """What must hold: the key's mod revision; 0 means that the key does not exist."""

    key: str
    mod_revision: int


@dataclass(slots=True, frozen=True)
class Put:
    """Write a value; with `lease`, the key goes when the lease ends."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(slots=True, frozen=True)
class Delete:
    key: str


@dataclass(slots=True, frozen=True)
class Committed:
    """Answer of a transaction. `revision` is the store's after it."""

    succeeded: bool
    revision: int


@dataclass(slots=True, frozen=True)
class Change:
    """One event of a watch: the new value, or None for a key that went."""

    key: str
    value: bytes | None
    mod_revision: int


@dataclass(slots=True, frozen=True)
class Changes:
    """Events of one or more revisions, in order, each once. `revision` is the newest."""

    events: tuple[Change, ...]
    revision: int


@dataclass(slots=True, frozen=True)
class Resync:
    """The revisions from which the watch should go on are compacted away.

    The watcher must read the range again and watch from there; the iterator ends.
    """

    compact_revision: int


class Lease(Protocol):
    """A lease kept alive in the background until it is revoked or lost."""

    @property
    def id(self) -> int: ...

    def valid_until(self) -> float:
        """Monotonic seconds until which the holder may act on the lease.

        Send time of the last answered keep-alive + TTL - margin (docs/architecture.md, rule 7).
        """

    async def lost(self) -> None:
        """Return when the lease has ended: expired, revoked elsewhere, or past valid_until."""

    async def revoke(self) -> None:
        """End the lease at once; its keys go with it. Idempotent."""


class Store(Protocol):
    async def get(self, key: str) -> KeyValue | None:
        """Return the key's newest value (linearizable)."""

    async def range(self, prefix: str) -> tuple[list[KeyValue], int]:
        """Return all keys under `prefix` in order, and the revision they were read at."""

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """Write without condition; return the revision."""

    async def delete(self, key: str) -> bool:
        """Remove a key; return whether it was there."""

    async def commit(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete]
    ) -> Committed:
        """Do all `operations` if all `compares` hold, else none.

        Raises Timeout when the outcome is unknown; it is never retried inside.
        """

    async def lease(self, ttl_s: float) -> Lease:
        """Grant a lease and keep it alive."""

    def watch(self, prefix: str, start: int) -> AsyncIterator[Changes | Resync]:
        """Yield what changes under `prefix` from revision `start` on, across reconnects.

        Ends after a Resync; never skips or repeats an event.
        """

    async def close(self) -> None:
        """End watches and leases' keep-alives (leases are not revoked). Idempotent."""
