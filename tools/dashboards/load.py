"""A small fleet under load, for the pictures: a node and a controld are killed in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import structs

from agentctl.local.fleet import FleetPlan, LocalFleet
from corefleet.client import Client
from corefleet.errors import CorefleetError
from tools.bench.local_fleet import CHAIN, NOOP
from tools.bench.machine import progress

CONTROLDS, NODES = 3, 3
CHAINS = structs.replace(CHAIN, slots=16, spares=0, history_turns=4)
QUICK = structs.replace(NOOP, slots=8, history_turns=4)
LIMITED = structs.replace(NOOP, name="limited", slots=4, rate_per_s=1.0)
SESSIONS = 24
_EVERY_S = {"chain": 0.5, "noop": 0.25, "limited": 0.4}
_INPUTS = {"chain": "20 150 seed", "noop": "x", "limited": "x"}


@asynccontextmanager
async def fleet(directory: Path) -> AsyncIterator[LocalFleet]:
    """Yield a fleet that serves metrics."""
    plan = FleetPlan(
        data=directory, nodes=NODES, controlds=CONTROLDS, port=0, log_level="warning",
        pools=(CHAINS, QUICK, LIMITED), metrics=True,
    )  # fmt: skip
    async with LocalFleet(plan, report=progress) as running:
        yield running


async def play(running: LocalFleet, seconds: float) -> None:
    """Submit all the time; kill n1 and c3 in the middle, and bring both back."""
    ended = asyncio.Event()
    async with running.client() as client, asyncio.TaskGroup() as tasks:
        for pool, every_s in _EVERY_S.items():
            tasks.create_task(_submit(client, pool, every_s, ended))
        for share, what, act in _script(running):
            await asyncio.sleep(seconds * share)
            progress(what)
            await act()
        ended.set()


def _script(running: LocalFleet) -> list[tuple[float, str, Callable[[], Awaitable[object]]]]:
    async def kill_node() -> None:
        running.kill_node("n1")

    async def kill_controld() -> None:
        running.kill_controld("c3")

    async def nothing() -> None:
        pass

    port = int(running.ports["c3"].rpartition(":")[2])
    return [
        (0.35, "killing n1", kill_node),
        (0.15, "n1 comes back", lambda: running.start_node("n1")),
        (0.1, "killing c3", kill_controld),
        (0.15, "c3 comes back", lambda: running.start_controld("c3", port)),
        (0.25, "the end", nothing),
    ]


async def _submit(client: Client, pool: str, every_s: float, ended: asyncio.Event) -> None:
    """Submit to `pool` evenly until `ended`; what is refused is what the picture shows."""
    due = time.monotonic()
    for number in itertools.count():
        if ended.is_set():
            return
        # Refusals and a dead controld belong to the play; the metrics count them.
        with contextlib.suppress(CorefleetError):
            await client.submit(pool, _INPUTS[pool], session=f"s{number % SESSIONS}")
        due += every_s
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), max(0.0, due - time.monotonic()))
