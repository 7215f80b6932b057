"""A prefix in memory stays in step with the store, over compaction too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from controld.mirror import Mirror
from corefleet.adapters.memory_store import MemoryStore
from corefleet.background import Background
from corefleet.clock import SystemClock
from corefleet.errors import Unavailable
from corefleet.store import Change, Changes, KeyValue, Resync


class Seen:
    """Keeps what a mirror tells and lets a test wait for it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changes: list[Change] = []
        self._more = asyncio.Event()

    def __call__(self, change: Change) -> None:
        self.changes.append(change)
        if change.value is None:
            self.values.pop(change.key, None)
        else:
            self.values[change.key] = change.value
        self._more.set()

    async def until(self, values: dict[str, bytes]) -> None:
        async with asyncio.timeout(5):
            while self.values != values:
                self._more.clear()
                await self._more.wait()


class Compacting(MemoryStore):
    """Its first watch ends with a Resync, as if it had been away for too long."""

    resyncs = 1

    def watch(self, prefix: str, start: int) -> AsyncIterator[Changes | Resync]:  # type: ignore[override]
        if self.resyncs:
            self.resyncs -= 1
            return self._compacted()
        return super().watch(prefix, start)

    async def _compacted(self) -> AsyncIterator[Changes | Resync]:
        await self.put("/a/2", b"new")
        await self.delete("/a/1")
        yield Resync(5)


class Away(MemoryStore):
    """Does not answer the first times it is asked for a range."""

    refusals = 2

    async def range(self, prefix: str) -> tuple[list[KeyValue], int]:
        if self.refusals:
            self.refusals -= 1
            raise Unavailable("etcd: range: no answer")
        return await super().range(prefix)


def failed(error: BaseException) -> None:
    raise AssertionError(error)


@pytest.fixture
async def background() -> AsyncIterator[Background]:
    made = Background(failed)
    yield made
    await made.close()


async def test_what_is_there_is_told_first_then_what_changes(background: Background) -> None:
    store, seen = MemoryStore(SystemClock()), Seen()
    await store.put("/a/1", b"one")
    await store.put("/b/1", b"other")
    mirror = Mirror(store, background, "/a/", seen)
    await mirror.start()
    assert seen.values == {"/a/1": b"one"}
    await store.put("/a/2", b"two")
    await store.delete("/a/1")
    await seen.until({"/a/2": b"two"})
    await mirror.close()
    await store.close()


async def test_a_resync_tells_the_differences_only(background: Background) -> None:
    store, seen = Compacting(SystemClock()), Seen()
    await store.put("/a/1", b"one")
    await store.put("/a/3", b"same")
    mirror = Mirror(store, background, "/a/", seen)
    await mirror.start()
    await seen.until({"/a/2": b"new", "/a/3": b"same"})
    assert [change.key for change in seen.changes] == ["/a/1", "/a/3", "/a/1", "/a/2"]
    await store.put("/a/4", b"after")
    await seen.until({"/a/2": b"new", "/a/3": b"same", "/a/4": b"after"})
    await mirror.close()
    await store.close()


async def test_a_start_that_failed_is_begun_again_and_nothing_is_told_twice(
    background: Background,
) -> None:
    store, seen = Away(SystemClock()), Seen()
    await store.put("/a/1", b"one")
    mirror = Mirror(store, background, "/a/", seen)
    for _ in range(2):
        with pytest.raises(Unavailable):
            await mirror.start()
    for _ in range(2):
        await mirror.start()
    await store.put("/a/2", b"two")
    await seen.until({"/a/1": b"one", "/a/2": b"two"})
    assert [change.key for change in seen.changes] == ["/a/1", "/a/2"]
    await mirror.close()
