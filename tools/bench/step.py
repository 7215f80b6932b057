"""CPU of one journaled agent step outside model and tool."""

from __future__ import annotations

import time

import psutil
import uvloop

from agentctl.local.fleet import LocalFleet
from corefleet.client import Client
from corefleet.rpc import tasks_pb2
from tools.bench.agents import expected_chain
from tools.bench.fleet import CHAIN, running_fleet
from tools.bench.machine import Measured, progress


def run(*, quick: bool, peer: str) -> Measured:
    """Measure; `peer` may be `langgraph`."""
    if peer not in ("", "langgraph"):
        raise SystemExit(f"step: peer {peer!r} is not known; expected langgraph")
    measured = uvloop.run(_run(2000 if quick else 6000))
    if peer:
        from tools.bench.peer_langgraph import measure

        measured.peer = measure(300 if quick else 1000)
        progress(f"langgraph: {measured.peer}")
    return measured


async def _run(steps: int) -> Measured:
    """Run one task of `steps` tool calls on one node; its node's CPU is the steps' CPU."""
    async with running_fleet((CHAIN,), nodes=1, controlds=1) as fleet, fleet.client() as client:
        await _chain(client, 200, "warm")
        idle = await _idle_cpu_per_s(fleet)
        before = _node_cpu(fleet)
        started = time.perf_counter()
        await _chain(client, steps, "measured")
        wall = time.perf_counter() - started
        after = _node_cpu(fleet)
    spent = {role: (after[role] - before[role] - idle[role] * wall) / steps * 1e6 for role in after}
    progress(f"{steps} steps in {wall:.2f} s")
    return Measured(
        {
            "cpu_us_per_step": round(spent["worker"] + spent["agentd"], 1),
            "worker_cpu_us_per_step": round(spent["worker"], 1),
            "agentd_cpu_us_per_step": round(spent["agentd"], 1),
            "wall_us_per_step": round(wall / steps * 1e6, 1),
            "steps": steps,
        }
    )


async def _chain(client: Client, steps: int, seed: str) -> None:
    finished: tasks_pb2.Task | None = None
    async for event in client.run("chain", f"{steps} 0 {seed}".encode(), session=f"s-{seed}"):
        if event.HasField("finished"):
            finished = event.finished
    if finished is None or finished.output != expected_chain(steps, seed):
        raise SystemExit(f"the chain of {steps} steps ended wrong: {finished}")


async def _idle_cpu_per_s(fleet: LocalFleet) -> dict[str, float]:
    """CPU a second of the node while nothing runs: heartbeats and timers are no step's cost."""
    import asyncio

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
