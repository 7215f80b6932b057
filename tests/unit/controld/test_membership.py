"""A controld's registration: on a lease, made anew when that is lost, one id one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from controld.cluster import Cluster
from controld.membership import Membership, rejoin_pause_s
from corefleet.adapters.memory_store import MemoryStore
from corefleet.background import Background
from corefleet.clock import SystemClock
from corefleet.errors import Conflict
from corefleet.messages.records import ClusterSettings, ControldRegistration
from corefleet.store import Changes
from corefleet.subjects import CONTROLDS, Layout, controld_key


def failed(error: BaseException) -> None:
    raise AssertionError(error)


@pytest.fixture
async def background() -> AsyncIterator[Background]:
    made = Background(failed)
    yield made
    await made.close()


def membership(store: MemoryStore, background: Background, ttl_s: float = 0.3) -> Membership:
    cluster = Cluster(
        "c1", ClusterSettings(), Layout(16, 2), None, None, store, SystemClock()  # type: ignore[arg-type]
    )  # fmt: skip
    return Membership(
        cluster, background, ControldRegistration(controld="c1", address="a:1"), ttl_s
    )


async def test_joining_registers_and_leaving_removes(background: Background) -> None:
    store = MemoryStore(SystemClock())
    member = membership(store, background)
    await member.join(lambda: None)
    there = await store.get(controld_key("c1"))
    assert there is not None
    assert there.mod_revision == member.revision
    assert member.valid_until() > SystemClock().monotonic()
    await member.leave()
    assert await store.get(controld_key("c1")) is None
    assert member.valid_until() == 0.0
    await store.close()


async def test_a_lost_lease_is_told_and_registered_anew(background: Background) -> None:
    store = MemoryStore(SystemClock())
    lost = asyncio.Event()
    member = membership(store, background)
    watch = store.peer().watch(CONTROLDS, 0)
    await member.join(lost.set)
    first = member.revision
    store.stop_keepalives()
    async with asyncio.timeout(5):
        await lost.wait()
        async for item in watch:
            assert isinstance(item, Changes)
            if item.events[-1].value is not None and item.revision > first:
                break
    await watch.aclose()
    assert member.revision > first
    assert member.valid_until() > SystemClock().monotonic()
    await member.leave()
    await store.close()


async def test_an_id_that_is_in_use_is_refused(background: Background) -> None:
    store = MemoryStore(SystemClock())
    first = membership(store, background)
    await first.join(lambda: None)
    second = membership(store.peer(), background, ttl_s=0.1)
    with pytest.raises(Conflict, match="in use by the controld at a:1"):
        await second.join(lambda: None)
    await first.leave()
    await store.close()


async def test_a_restart_waits_for_its_former_self_to_expire(background: Background) -> None:
    dead, store = (first := MemoryStore(SystemClock())), first.peer()
    former = membership(dead, background)
    await former.join(lambda: None)
    await dead.close()
    again = membership(store, background)
    async with asyncio.timeout(5):
        await again.join(lambda: None)
    assert again.revision > former.revision
    await again.leave()
    await store.close()


def test_who_loses_one_lease_after_the_other_stays_away_for_longer_each_time() -> None:
    assert rejoin_pause_s(0, 0.9) == 0.0
    pauses = [rejoin_pause_s(losses, 0.0) for losses in range(1, 40)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.6, 15.0)
    assert rejoin_pause_s(3, 0.5) == pytest.approx(0.75 * rejoin_pause_s(3, 0.0))


async def test_a_membership_that_ended_soon_is_not_renewed_at_once(
    background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def pause(losses: int, chance: float) -> float:
        asked.append(losses)
        return 0.0

    monkeypatch.setattr("controld.membership.rejoin_pause_s", pause)
    store = MemoryStore(SystemClock())
    member = membership(store, background, ttl_s=60.0)
    watch = store.peer().watch(CONTROLDS, 0)
    await member.join(lambda: None)
    async with asyncio.timeout(5):
        async for item in watch:
            assert isinstance(item, Changes)
            if item.events[-1].value is None:
                continue
            if len(asked) == 3:
                break
            member.removed(item.revision + 1)
    await watch.aclose()
    assert asked == [1, 2, 3]
    await member.leave()
    await store.close()
