"""What the store says, in memory: members, owners, pools, nodes and lost nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import structlog

from controld.mirror import Mirror
from corefleet.background import Background
from corefleet.codec import decode
from corefleet.errors import CorruptRecord
from corefleet.messages.records import (
    ControldRegistration,
    Drain,
    LostNode,
    NodeRegistration,
    Ownership,
    PoolSpec,
)
from corefleet.store import Change, Store
from corefleet.subjects import CONTROLDS, DRAINS, LOST, NODES, POOLS, RACKS, SHARDS, name_in_key

_log = structlog.get_logger(__name__)

R = TypeVar("R")

Listener = Callable[[str, R | None, int], None]
"""Told the record's name, its new value (None: it went) and the store's revision."""


class Table(Generic[R]):
    """The records under one prefix, by name."""

    def __init__(self, store: Store, background: Background, prefix: str, kind: type[R]) -> None:
        self._kind = kind
        self._mirror = Mirror(store, background, prefix, self._seen)
        self._listeners: list[Listener[R]] = []
        self.records: dict[str, R] = {}
        self.revisions: dict[str, int] = {}

    def listen(self, listener: Listener[R]) -> None:
        """Tell `listener` what is known already, then every change."""
        self._listeners.append(listener)
        for name, record in list(self.records.items()):
            listener(name, record, self.revisions[name])

    def unlisten(self, listener: Listener[R]) -> None:
        """Tell `listener` nothing more. Idempotent."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    async def start(self) -> None:
        """Read all, then follow. Raises Unavailable."""
        await self._mirror.start()

    async def close(self) -> None:
        """Stop following. Idempotent."""
        await self._mirror.close()

    def _seen(self, change: Change) -> None:
        name = name_in_key(change.key)
        if change.value is None:
            record = None
            self.records.pop(name, None)
            self.revisions.pop(name, None)
        else:
            try:
                record = decode(change.value, self._kind)
            except CorruptRecord as error:
                # One bad record must not stop the others; it counts as unchanged.
                _log.error("record in the store is not usable", key=change.key, error=str(error))
                return
            self.records[name] = record
            self.revisions[name] = change.mod_revision
        for listener in tuple(self._listeners):
            listener(name, record, change.mod_revision)


class Registry:
    """All tables that a controld follows. Shards are named by their number as `00017`."""

    def __init__(self, store: Store, background: Background) -> None:
        self.controlds = Table(store, background, CONTROLDS, ControldRegistration)
        self.shards = Table(store, background, SHARDS, Ownership)
        self.racks = Table(store, background, RACKS, Ownership)
        self.pools = Table(store, background, POOLS, PoolSpec)
        self.nodes = Table(store, background, NODES, NodeRegistration)
        self.lost = Table(store, background, LOST, LostNode)
        self.drains = Table(store, background, DRAINS, Drain)

    async def start(self) -> None:
        """Read all tables, then follow them. Raises Unavailable; may be called again then."""
        for table in self._tables():
            await table.start()

    async def close(self) -> None:
        """Stop following. Idempotent."""
        for table in self._tables():
            await table.close()

    def pools_revision(self) -> int:
        """Return the revision of the newest change of a pool."""
        return max(self.pools.revisions.values(), default=0)

    def shard_owner(self, shard: int) -> str:
        """Return the controld that owns `shard` as far as we know, '' for none."""
        found = self.shards.records.get(f"{shard:05d}")
        return found.controld if found else ""

    def _tables(self) -> Sequence[Table[Any]]:
        # Members last: who is gone must not be seen before what it owned.
        return (
            *(self.pools, self.nodes, self.lost, self.drains),
            *(self.racks, self.shards, self.controlds),
        )
