"""kill -9 in the middle of turns: how long until the next step runs, and is all still right."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field

import psutil
import uvloop

from agentctl.local.fleet import LocalFleet
from corefleet.client import Client
from corefleet.ids import shard_of
from corefleet.rpc import tasks_pb2
from tools.bench.agents import expected_chain
from tools.bench.local_fleet import CHAIN, SPEAK, running_fleet
from tools.bench.machine import Measured, percentile, progress

STEPS, PAUSE_MS = 30, 40
KILLS = {"worker": 30, "node": 100, "controld": 30, "engine": 30}
QUICK_KILLS = dict.fromkeys(KILLS, 10)
TOKENS_ON_THE_WAY_MS = 60
WORDS = "Write the first ten letters of the alphabet, separated by spaces."
_PID = re.compile(r"pid=(\d+)")


@dataclass(slots=True)
class Turn:
    """One turn as its events told it."""

    session: str
    seed: str
    started: asyncio.Event = field(default_factory=asyncio.Event)
    node: str = ""
    pid: int = 0
    """Process that ran the newest step."""
    steps: list[tasks_pb2.Step] = field(default_factory=list)
    tokens_ms: list[int] = field(default_factory=list)
    """When tokens came."""
    finished: tasks_pb2.Task | None = None

    def next_step_after(self, wall_ms: int, *, not_pid: int = 0) -> float | None:
        """Seconds from `wall_ms` to the start of the first step that ran after it."""
        for step in self.steps:
            pid = _PID.search(step.summary)
            if step.started_ms >= wall_ms and not (pid and int(pid[1]) == not_pid):
                return (step.started_ms - wall_ms) / 1000
        return None


@dataclass(slots=True)
class Tally:
    """Gaps in seconds by what was killed, and what went wrong."""

    gaps: dict[str, list[float]] = field(default_factory=dict)
    kills: int = 0
    lost: int = 0
    duplicated: int = 0
    wrong: int = 0

    def judge(self, what: str, turn: Turn, gap: float | None, expected: str) -> None:
        """Count one kill: whether the turn's end is right, and the gap if there was one.

        A kill right before the turn's end makes none.
        """
        self.kills += 1
        if turn.finished is None or turn.finished.state != tasks_pb2.TASK_STATE_DONE:
            self.lost += 1
            progress(f"{what}: the turn was lost: {turn.finished}")
            return
        numbers = [step.step for step in turn.finished.steps if step.kind not in ("open", "intent")]
        self.duplicated += len(numbers) - len(set(numbers))
        if turn.finished.output != expected:
            self.wrong += 1
            progress(f"{what}: answered {turn.finished.output!r}, expected {expected!r}")
        if gap is not None:
            self.gaps.setdefault(what, []).append(gap)


def run(*, quick: bool, peer: str) -> Measured:
    """Kill each kind of process ten times; without `quick` thirty times, nodes a hundred."""
    if peer:
        raise SystemExit("takeover has no peer")
    return uvloop.run(_run(QUICK_KILLS if quick else KILLS))


async def _run(plan: dict[str, int]) -> Measured:
    tally = Tally()
    rng = random.Random()
    async with (
        running_fleet((CHAIN, SPEAK), nodes=3, controlds=3) as fleet,
        fleet.client() as client,
    ):
        for what, trial in (
            ("worker", _worker_trial), ("node", _node_trial), ("controld", _controld_trial),
            ("engine", _engine_trial),
        ):  # fmt: skip
            began = time.monotonic()
            kills = plan[what]
            for number in range(kills):
                await trial(fleet, client, tally, rng, number)
            while _coming_back:
                await _coming_back.pop()
            progress(
                f"{what}: {kills} kills in {time.monotonic() - began:.0f} s, "
                f"gaps {[round(gap, 2) for gap in tally.gaps.get(what, [])]}"
            )
    results: dict[str, object] = {
        "kills": tally.kills, "lost": tally.lost,
        "duplicated": tally.duplicated, "wrong": tally.wrong,
    }  # fmt: skip
    for what, gaps in tally.gaps.items():
        results[f"{what}_p50_s"] = round(percentile(gaps, 0.5), 3)
        results[f"{what}_p99_s"] = round(percentile(gaps, 0.99), 3)
        results[f"{what}_max_s"] = round(max(gaps), 3)
    return Measured(results)


async def _worker_trial(
    fleet: LocalFleet, client: Client, tally: Tally, rng: random.Random, number: int
) -> None:
    turn, following = _start_chain(client, f"worker-{number}")
    await _random_moment(turn, rng)
    victim = turn.pid
    killed = _now_ms()
    psutil.Process(victim).kill()
    await following
    gap = turn.next_step_after(killed, not_pid=victim)
    tally.judge("worker", turn, gap, expected_chain(STEPS, turn.seed))


async def _node_trial(
    fleet: LocalFleet, client: Client, tally: Tally, rng: random.Random, number: int
) -> None:
    turn, following = _start_chain(client, f"node-{number}")
    await _random_moment(turn, rng)
    victim = turn.node
    killed = _now_ms()
    fleet.kill_node(victim)
    await following
    tally.judge("node", turn, turn.next_step_after(killed), expected_chain(STEPS, turn.seed))
    await _come_back(_restart_node(fleet, victim))


async def _controld_trial(
    fleet: LocalFleet, client: Client, tally: Tally, rng: random.Random, number: int
) -> None:
    """Kill the owner of a running turn's shard.

    The running turn needs no owner and goes on; the gap is that of another session of
    the shard, whose turn is submitted right after the kill and waits for a new owner.
    """
    turn, following = _start_chain(client, f"controld-{number}")
    await _random_moment(turn, rng)
    owner = await _owner(fleet, client, turn.session)
    killed = _now_ms()
    fleet.kill_controld(owner)
    waiting, following_waiting = _start_chain(client, _same_shard(fleet, turn.session))
    await asyncio.gather(following, following_waiting)
    for each in (turn, waiting):
        gap = each.next_step_after(killed) if each is waiting else None
        tally.judge("controld", each, gap, expected_chain(STEPS, each.seed))
    tally.kills -= 1
    await _come_back(_restart_controld(fleet, owner))


async def _engine_trial(
    fleet: LocalFleet, client: Client, tally: Tally, rng: random.Random, number: int
) -> None:
    """Kill the engine while it generates; the gap is the time until it generates again."""
    expected, span = await _reference(client)
    turn = Turn(session=f"engine-{number}", seed="")
    following = asyncio.create_task(_follow(client, "speak", WORDS.encode(), turn))
    await turn.started.wait()
    await asyncio.sleep(span * rng.uniform(0.1, 0.8))
    killed = _now_ms()
    for process in psutil.Process(fleet.nodes[turn.node].pid).children(recursive=True):
        if "agentd.engine" in " ".join(process.cmdline()):
            process.kill()
    await following
    again = [at for at in turn.tokens_ms if at > killed + TOKENS_ON_THE_WAY_MS]
    tally.judge("engine", turn, (again[0] - killed) / 1000 if again else None, expected)


async def _come_back(restart: Coroutine[None, None, None]) -> None:
    """Start what was killed again, beside the next trial: two of three are left for it."""
    if _coming_back:
        await _coming_back.pop()
    _coming_back.append(asyncio.create_task(restart))


async def _restart_node(fleet: LocalFleet, name: str) -> None:
    await fleet.nodes[name].stop()
    await fleet.start_node(name)


async def _restart_controld(fleet: LocalFleet, name: str) -> None:
    await fleet.controlds[name].stop()
    await fleet.start_controld(name)


_coming_back: list[asyncio.Task[None]] = []
_reference_turn: list[tuple[str, float]] = []


async def _reference(client: Client) -> tuple[str, float]:
    """Return the answer and the seconds of an undisturbed generation; made once."""
    if not _reference_turn:
        turn = Turn(session="reference", seed="")
        began = time.monotonic()
        await _follow(client, "speak", WORDS.encode(), turn)
        if turn.finished is None:
            raise SystemExit("the reference generation did not end")
        _reference_turn.append((turn.finished.output, time.monotonic() - began))
    return _reference_turn[0]


def _start_chain(client: Client, session: str) -> tuple[Turn, asyncio.Task[None]]:
    turn = Turn(session=session, seed=session)
    text = f"{STEPS} {PAUSE_MS} {turn.seed}".encode()
    return turn, asyncio.create_task(_follow(client, "chain", text, turn))


async def _follow(client: Client, pool: str, text: bytes, turn: Turn) -> None:
    async for event in client.run(pool, text, session=turn.session):
        match event.WhichOneof("what"):
            case "placed":
                turn.node = event.placed.node
                if pool == "speak":
                    turn.started.set()
            case "token":
                turn.tokens_ms.append(_now_ms())
            case "step":
                turn.steps.append(event.step)
                if pid := _PID.search(event.step.summary):
                    turn.pid = int(pid[1])
                turn.started.set()
            case "finished":
                turn.finished = event.finished
    turn.started.set()


async def _random_moment(turn: Turn, rng: random.Random) -> None:
    """Wait for the first step, then for a random part of the turn."""
    await turn.started.wait()
    await asyncio.sleep(STEPS * PAUSE_MS / 1000 * rng.uniform(0.0, 0.6))


async def _owner(fleet: LocalFleet, client: Client, session: str) -> str:
    shard = shard_of("chain", session, fleet.plan.shards)
    for controld in await client.controlds():
        if shard in controld.shards:
            return controld.controld
    raise SystemExit(f"shard {shard} has no owner")


def _same_shard(fleet: LocalFleet, session: str) -> str:
    """Return the name of another session that lives in the shard of `session`."""
    shard = shard_of("chain", session, fleet.plan.shards)
    names = (f"{session}-{number}" for number in range(10_000))
    return next(name for name in names if shard_of("chain", name, fleet.plan.shards) == shard)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
