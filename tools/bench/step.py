"""CPU of one journaled agent step outside model and tool."""

from __future__ import annotations

import asyncio
import time

import psutil
import uvloop

from agentctl.local.fleet import LocalFleet
from corefleet.client import Client
from corefleet.rpc import tasks_pb2
from tools.bench.agents import expected_chain
from tools.bench.local_fleet import CHAIN, running_fleet
from tools.bench.machine import Measured, progress

SESSIONS = 32


def run(*, quick: bool, peer: str) -> Measured:
    """Measure; `peer` may be `langgraph`."""
    if peer not in ("", "langgraph"):
        raise SystemExit(f"step: peer {peer!r} is not known; expected langgraph")
    measured = uvloop.run(_run(6400 if quick else 19200))
    if peer:
        from tools.bench.peer_langgraph import measure

        measured.peer = measure(300 if quick else 1000)
        progress(f"langgraph: {measured.peer}")
    return measured


async def _run(steps: int) -> Measured:
    """Run chains of tool calls on one node; its node's CPU is the steps' CPU.

    Many sessions at a time, as a node runs them, and then one alone.
    """
    results: dict[str, object] = {"steps": steps, "sessions": SESSIONS}
    async with running_fleet((CHAIN,), nodes=1, controlds=1) as fleet, fleet.client() as client:
        await _chains(client, 4, 50, "warm")
        idle = await _idle_cpu_per_s(fleet)
        for suffix, sessions in (("", SESSIONS), ("_alone", 1)):
            count = steps // (SESSIONS if sessions > 1 else 4)
            before = _node_cpu(fleet)
            started = time.perf_counter()
            await _chains(client, sessions, count, f"measured{suffix}")
            wall = time.perf_counter() - started
            after = _node_cpu(fleet)
            done = sessions * count
            spent = {
                role: (after[role] - before[role] - idle[role] * wall) / done * 1e6
                for role in after
            }
            progress(f"{done} steps of {sessions} sessions in {wall:.2f} s")
            results |= {
                f"cpu_us_per_step{suffix}": round(spent["worker"] + spent["agentd"], 1),
                f"worker_cpu_us_per_step{suffix}": round(spent["worker"], 1),
                f"agentd_cpu_us_per_step{suffix}": round(spent["agentd"], 1),
                f"wall_us_per_step{suffix}": round(wall / count * 1e6, 1),
            }
    return Measured(results)


async def _chains(client: Client, sessions: int, steps: int, seed: str) -> None:
    await asyncio.gather(*(_chain(client, steps, f"{seed}-{n}") for n in range(sessions)))


async def _chain(client: Client, steps: int, seed: str) -> None:
    finished: tasks_pb2.Task | None = None
    async for event in client.run("chain", f"{steps} 0 {seed}".encode(), session=f"s-{seed}"):
        if event.HasField("finished"):
            finished = event.finished
    if finished is None or finished.output != expected_chain(steps, seed):
        raise SystemExit(f"the chain of {steps} steps ended wrong: {finished}")


async def _idle_cpu_per_s(fleet: LocalFleet) -> dict[str, float]:
    """CPU a second of the node while nothing runs: heartbeats and timers are no step's cost."""
    before = _node_cpu(fleet)
    await asyncio.sleep(2.0)
    after = _node_cpu(fleet)
    return {role: (after[role] - before[role]) / 2.0 for role in after}


def _node_cpu(fleet: LocalFleet) -> dict[str, float]:
    spent = {"agentd": 0.0, "worker": 0.0}
    for child in fleet.nodes.values():
        top = psutil.Process(child.pid)
        for process in (top, *top.children(recursive=True)):
            command = " ".join(process.cmdline())
            if "agentd.heartbeat" not in command:
                role = "worker" if "agentd.worker" in command else "agentd"
                spent[role] += sum(process.cpu_times()[:2])
    return spent
