"""A simulated process that is over leaves nothing that anybody hears of later."""

from __future__ import annotations

import asyncio
import gc
import sys

import pytest

from tests.sim.loop import Process, World


async def _last_word() -> None:
    raise AssertionError("a process that is over runs nothing")


async def _shields_its_end() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.gather(_last_word(), asyncio.shield(_last_word()))


def test_what_a_buried_process_began_at_its_end_is_never_heard_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Once a loop was here, asyncio makes no other: `gather` outside of one leaves its coroutines.
    asyncio.run(asyncio.sleep(0))
    world = World(seed=0)
    process = Process(world, "c1", "controld")
    process.run(_shields_its_end(), "main")
    world.run_until(world.now + 1.0)
    heard: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: heard.append(told.exc_value))
    world.bury([process])
    gc.collect()
    assert heard == []
    assert not asyncio.all_tasks(process.loop)
