"""A large fleet: what one controld of a hundred costs, and what a hundred bear when many die.

Two parts, both on real etcd, NATS and controld processes, with nodes simulated by
tools.fleet over the real protocol:

1. one real controld among 99 that only watch racks (tools.fleet.ghosts), with 4096 nodes
   that beat five times a second: CPU and memory of one controld in the reference plan;
2. as many real controlds and nodes as two cores carry at full rates, under load: then 30
   of 100 controlds are killed at once, then five racks.

A turn is lost when it is accepted and does not end; it is duplicated when its journal
holds a step twice.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil
import uvloop

from agentctl.local.fleet import FleetPlan, LocalFleet
from corefleet import logs
from corefleet.client import Client
from corefleet.config import LogConfig
from corefleet.ids import shard_of
from corefleet.messages.records import PoolSpec
from corefleet.rpc import tasks_pb2
from tools.bench.machine import Measured, percentile, progress
from tools.bench.sim_fleet import SimFleetProcess
from tools.fleet.ghosts import Ghosts
from tools.fleet.plan import rack_name

POOL = PoolSpec(name="p", agent="simulated:Agent", slots=64, max_attempts=20)
SHARDS, STREAMS = 256, 4
REFERENCE_NODES, REFERENCE_CONTROLDS = 4096, 100
SETTLE_S = 5.0
LONG_STEPS, LONG_STEP_S = 24, 0.25
"""Turns that run while nodes die: some six seconds."""
LEASE_TTL_S = 10.0
"""Processes that share two cores stand still for seconds; dead ones are found by their ports."""
END_S = 60.0
"""By then every accepted turn must have ended."""


@dataclass(slots=True, frozen=True)
class Size:
    """How large each part is."""

    nodes: int
    """Of the first part."""
    measured_s: float
    controlds: int
    some_nodes: int
    """Of the second part."""
    racks_killed: int
    controlds_killed: int
    turns_per_s: float


FULL = Size(4096, 20.0, 12, 400, 5, 4, 40.0)
QUICK = Size(400, 4.0, 6, 120, 1, 2, 40.0)


@dataclass(slots=True)
class Turn:
    """One turn as its events told it; times in wall-clock milliseconds."""

    session: str
    shard: int
    steps: int
    submitted_ms: int
    task: str = ""
    placed: list[tuple[int, str]] = field(default_factory=list)
    created_ms: int = 0
    finished: tasks_pb2.Task | None = None

    def placed_after(self, wall_ms: int) -> float | None:
        """Seconds from `wall_ms` to the first placement after it."""
        found = [at for at, _ in self.placed if at >= wall_ms]
        return (min(found) - wall_ms) / 1000 if found else None


def run(*, quick: bool, peer: str) -> Measured:
    """Measure both parts; `quick` is a tenth of them."""
    if peer:
        raise SystemExit("fleet has no peer")
    logs.configure(LogConfig(level="warning"), "bench")
    size = QUICK if quick else FULL
    results: dict[str, object] = uvloop.run(_one_of_many(size))
    results |= uvloop.run(_many(size))
    return Measured(results)


async def _one_of_many(size: Size) -> dict[str, object]:
    """Measure one controld of REFERENCE_CONTROLDS."""
    async with _plane(1) as fleet, _nodes(fleet, size.nodes) as nodes:
        ghosts = Ghosts(fleet.nats_url, fleet.etcd_endpoint, REFERENCE_CONTROLDS - 1)
        watched = await ghosts.start()
        try:
            progress(
                f"{size.nodes} nodes up in {nodes.ready['took_s']} s, {watched} racks elsewhere"
            )
            await asyncio.sleep(SETTLE_S)
            before = await nodes.tell("stats")
            process = psutil.Process(fleet.controlds["c1"].pid)
            cpu_s, began = _cpu_s(process), time.monotonic()
            await asyncio.sleep(size.measured_s)
            took_s = time.monotonic() - began
            used_s = _cpu_s(process) - cpu_s
            after = await nodes.tell("stats")
            rss = process.memory_info().rss
        finally:
            await ghosts.close()
    beats = (after["counts"]["beats"] - before["counts"]["beats"]) / took_s
    return {
        "nodes": size.nodes,
        "beats_per_s": round(beats),
        "beats_late_s": after["beats_late_s"],
        "controld_cpu_percent": round(100 * used_s / took_s, 1),
        "controld_rss_mb": round(rss / 2**20),
    }


async def _many(size: Size) -> dict[str, object]:
    """Run many controlds under load, and kill many of them, then many nodes."""
    rng = Random(1)
    async with (
        _plane(size.controlds) as fleet,
        _nodes(fleet, size.some_nodes) as nodes,
        fleet.client() as client,
    ):
        await _all_owned(client, size.controlds)
        load = _Load(client, rng, size.turns_per_s)
        began = {name: _cpu_s(psutil.Process(each.pid)) for name, each in fleet.controlds.items()}
        start = time.monotonic()
        await load.run_for(10 * SETTLE_S if size is FULL else SETTLE_S)
        took_s = time.monotonic() - start
        used = [
            (_cpu_s(psutil.Process(each.pid)) - began[name]) / took_s
            for name, each in fleet.controlds.items()
        ]
        calm = [turn for turn in load.turns if turn.placed and turn.created_ms]
        decisions = [(turn.placed[0][0] - turn.created_ms) / 1.0 for turn in calm]
        shards_back = await _kill_controlds(fleet, client, load, size, rng)
        tasks_back = await _kill_racks(nodes, client, load, size)
        await load.ended()
        stats = await nodes.tell("stats")
        progress(f"nodes: {stats}")
    return {
        "controlds": size.controlds,
        "controlds_nodes": size.some_nodes,
        "load_turns_per_s": round(len(calm) / took_s, 1),
        "busy_controld_cpu_percent": round(100 * sum(used) / len(used), 2),
        "decision_p50_ms": percentile(decisions, 0.5),
        "decision_p99_ms": percentile(decisions, 0.99),
        "controlds_killed": size.controlds_killed,
        "racks_killed": size.racks_killed,
        "shards_back_p50_s": round(percentile(shards_back, 0.5), 3),
        "shards_back_p99_s": round(percentile(shards_back, 0.99), 3),
        "tasks_moved": len(tasks_back),
        "tasks_back_p50_s": round(percentile(tasks_back, 0.5), 3),
        "tasks_back_p99_s": round(percentile(tasks_back, 0.99), 3),
        **load.verdict(),
    }


async def _kill_controlds(
    fleet: LocalFleet, client: Client, load: _Load, size: Size, rng: Random
) -> list[float]:
    """Kill many controlds; return the seconds until each of their shards places again."""
    victims = rng.sample(sorted(fleet.controlds), size.controlds_killed)
    shards = {
        shard
        for each in await client.controlds()
        if each.controld in victims
        for shard in each.shards
    }
    progress(f"killing {len(victims)} controlds, which own {len(shards)} shards")
    for name in victims:
        fleet.kill_controld(name)
    killed_ms = _now_ms()
    living = [each for name, each in fleet.ports.items() if name not in victims]
    async with Client(living) as left:
        turns = [load.submit(left, shard=shard, steps=1) for shard in sorted(shards)]
        await load.wait(turns)
    back = [turn.placed_after(killed_ms) for turn in turns]
    return [seconds for seconds in back if seconds is not None]


async def _kill_racks(
    nodes: SimFleetProcess, client: Client, load: _Load, size: Size
) -> list[float]:
    """Kill whole racks while turns run; return the seconds until each is placed elsewhere."""
    turns = [
        load.submit(load.client, steps=LONG_STEPS, seconds=LONG_STEP_S)
        for _ in range(size.some_nodes)
    ]
    await load.placed(turns)
    racks = [rack_name(number) for number in range(size.racks_killed)]
    dead = {node.node for node in await client.nodes() if node.rack in racks}
    progress(f"killing {len(dead)} nodes: {', '.join(racks)}")
    killed_ms = (await nodes.tell("kill", *racks))["at_ms"]
    hit = [turn for turn in turns if turn.placed[-1][1] in dead and turn.finished is None]
    await load.wait(turns)
    back = [turn.placed_after(killed_ms) for turn in hit]
    return [seconds for seconds in back if seconds is not None]


class _Load:
    """Turns submitted all the time, and what became of them."""

    def __init__(self, client: Client, rng: Random, per_s: float) -> None:
        self.client = client
        self.turns: list[Turn] = []
        self._rng = rng
        self._per_s = per_s
        self._following: dict[int, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    async def run_for(self, seconds: float) -> None:
        """Submit turns of two short steps, evenly."""
        until = time.monotonic() + seconds
        due = time.monotonic()
        while due < until:
            self.submit(self.client, steps=2, seconds=0.02)
            due += 1 / self._per_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        await self.wait(self.turns)

    def submit(self, client: Client, *, shard: int = -1, steps: int, seconds: float = 0.0) -> Turn:
        """Begin one turn, in a session of `shard` if that is given."""
        session = self._session(shard)
        turn = Turn(session, shard_of(POOL.name, session, SHARDS), steps, _now_ms())
        self.turns.append(turn)
        self._following[id(turn)] = asyncio.create_task(self._follow(client, turn, seconds))
        return turn

    async def wait(self, turns: list[Turn]) -> None:
        """Return when all of `turns` have ended, or could not within END_S."""
        following = [self._following[id(turn)] for turn in turns]
        await asyncio.wait(following, timeout=END_S)

    async def placed(self, turns: list[Turn]) -> None:
        """Return when all of `turns` have a place."""
        async with asyncio.timeout(END_S):
            while not all(turn.placed for turn in turns):
                self._changed.clear()
                await self._changed.wait()

    async def ended(self) -> None:
        """Wait for all, then give up on the rest, and say how they stand."""
        await self.wait(self.turns)
        for turn in self.turns:
            if turn.finished is None and turn.task:
                stands = await self.client.get(turn.task)
                progress(f"not ended: {turn}, stands {stands}")
        for task in self._following.values():
            task.cancel()
        await asyncio.gather(*self._following.values(), return_exceptions=True)

    def verdict(self) -> dict[str, object]:
        """Count what was accepted, lost, duplicated."""
        accepted = [turn for turn in self.turns if turn.task]
        done = [turn for turn in accepted if turn.finished is not None]
        twice = 0
        for turn in done:
            numbers = [step.step for step in turn.finished.steps if step.kind == "tool"]  # type: ignore[union-attr]
            twice += len(numbers) - len(set(numbers))
            twice += abs(len(set(numbers)) - turn.steps)
        good = sum(turn.finished.state == tasks_pb2.TASK_STATE_DONE for turn in done)  # type: ignore[union-attr]
        return {"accepted": len(accepted), "lost": len(accepted) - good, "duplicated": twice}

    async def _follow(self, client: Client, turn: Turn, seconds: float) -> None:
        text = f"{turn.steps} {seconds}"
        async for event in client.run(POOL.name, text, session=turn.session):
            turn.task = event.task
            match event.WhichOneof("what"):
                case "placed":
                    turn.placed.append((event.at_ms, event.placed.node))
                case "snapshot":
                    turn.created_ms = event.snapshot.created_ms
                case "finished":
                    turn.finished = event.finished
                    turn.created_ms = event.finished.created_ms
            self._changed.set()

    def _session(self, shard: int) -> str:
        while True:
            session = f"s{self._rng.getrandbits(48):x}"
            if shard in (-1, shard_of(POOL.name, session, SHARDS)):
                return session


@asynccontextmanager
async def _plane(controlds: int) -> AsyncIterator[LocalFleet]:
    with tempfile.TemporaryDirectory(prefix="corefleet-bench-") as scratch:
        plan = FleetPlan(
            data=Path(scratch), nodes=0, controlds=controlds, port=0, pools=(POOL,),
            shards=SHARDS, streams=STREAMS, log_level="warning",
            controld=f"lease_ttl_s = {LEASE_TTL_S}\n",
        )  # fmt: skip
        began = time.monotonic()
        async with LocalFleet(plan) as fleet:
            progress(f"{controlds} controlds up in {time.monotonic() - began:.0f} s")
            yield fleet


@asynccontextmanager
async def _nodes(fleet: LocalFleet, nodes: int) -> AsyncIterator[SimFleetProcess]:
    arguments = ("--nats", fleet.nats_url, "--nodes", str(nodes), "--pool", f"{POOL.name}=64")
    async with SimFleetProcess(*arguments) as process:
        yield process


async def _all_owned(client: Client, controlds: int) -> None:
    """Return when all controlds own all shards together."""
    async with asyncio.timeout(END_S):
        while True:
            living = await client.controlds()
            shards = sum(len(each.shards) for each in living)
            if len(living) == controlds and shards == SHARDS:
                return
            await asyncio.sleep(0.2)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
