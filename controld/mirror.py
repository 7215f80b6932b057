"""A prefix of the store, kept in memory and in step with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from corefleet.background import Background, stop
from corefleet.errors import Unavailable
from corefleet.store import Change, Resync, Store

_log = structlog.get_logger(__name__)

_RETRY_S = 0.5


class Mirror:
    """All keys under `prefix`; tells `seen` of every change, each once, in order.

    After a Resync the range is read again and only the differences are told.
    """

    def __init__(
        self,
        store: Store,
        background: Background,
        prefix: str,
        seen: Callable[[Change], None],
    ) -> None:
        self._store = store
        self._background = background
        self._prefix = prefix
        self._seen = seen
        self._known: dict[str, int] = {}
        self._revision = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the range, tell all of it, then follow it. Raises Unavailable.

        Begun again after that it goes on; once it follows, that does nothing.
        """
        if self._task is not None:
            return
        await self._load()
        self._task = self._background.spawn(self._follow(), f"mirror {self._prefix}")

    async def close(self) -> None:
        """Stop following. Idempotent."""
        await stop(self._task)
        self._task = None

    async def _load(self) -> None:
        entries, revision = await self._store.range(self._prefix)
        there = {entry.key for entry in entries}
        for key in [key for key in self._known if key not in there]:
            self._tell(Change(key, None, revision))
        for entry in entries:
            if self._known.get(entry.key) != entry.mod_revision:
                self._tell(Change(entry.key, entry.value, entry.mod_revision))
        self._revision = revision

    async def _follow(self) -> None:
        while True:
            try:
                await self._watch()
                await self._load()
            except Unavailable as error:
                _log.warning("store watch interrupted", prefix=self._prefix, error=str(error))
                await asyncio.sleep(_RETRY_S)

    async def _watch(self) -> None:
        """Return when the range must be read again."""
        async for item in self._store.watch(self._prefix, self._revision + 1):
            if isinstance(item, Resync):
                return
            for change in item.events:
                self._tell(change)
            self._revision = item.revision
        await asyncio.sleep(_RETRY_S)

    def _tell(self, change: Change) -> None:
        if change.value is None:
            self._known.pop(change.key, None)
        else:
            self._known[change.key] = change.mod_revision
        self._seen(change)
