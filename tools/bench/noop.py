"""Durable no-op tasks: how many a second, and how long a single one takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import psutil
import uvloop

from agentctl.local.fleet import LocalFleet
from corefleet.client import Client
from corefleet.rpc import tasks_pb2
from tools.bench.local_fleet import NOOP, running_fleet
from tools.bench.machine import Measured, percentile, progress

IN_FLIGHT = 512
SESSIONS = 1024


def run(*, quick: bool, peer: str) -> Measured:
    """Measure; `peer` may be `ray`, which runs between our own rounds."""
    if peer not in ("", "ray"):
        raise SystemExit(f"noop: peer {peer!r} is not known; expected ray")
    return uvloop.run(_run(quick, peer))


async def _run(quick: bool, peer: str) -> Measured:
    tasks, singles, rounds = (4000, 200, 2) if quick else (12000, 500, 3)
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for number in range(rounds):
        async with running_fleet((NOOP,)) as fleet, fleet.client() as client:
            await _throughput(client, 500, f"warm{number}")
            before = _cpu_seconds(fleet)
            ours.append(
                await _throughput(client, tasks, f"r{number}")
                | await _cpu_per_task(fleet, before, tasks)
                | await _latency(client, singles)
            )
            progress(f"round {number + 1}: {ours[-1]}")
        if peer:
            from tools.bench.peer_ray import measure

            theirs.append(await asyncio.to_thread(measure, tasks, singles, IN_FLIGHT))
            progress(f"ray, round {number + 1}: {theirs[-1]}")
    results: dict[str, object] = dict(_median(ours))
    results["in_flight"] = IN_FLIGHT
    if not theirs:
        return Measured(results)
    peers: dict[str, object] = dict(_median(theirs))
    results["ratio"] = round(float(str(results["tasks_per_s"])) / _median(theirs)["tasks_per_s"], 3)
    return Measured(results, peers)


async def _throughput(client: Client, count: int, prefix: str) -> dict[str, float]:
    async def requests() -> AsyncIterator[tasks_pb2.SubmitRequest]:
        for number in range(count):
            yield client.request("noop", b"x", session=f"{prefix}-{number % SESSIONS}", follow=True)

    done = 0
    started = time.perf_counter()
    async for made in client.submit_many(requests(), in_flight=IN_FLIGHT):
        if made.HasField("refused"):
            raise SystemExit(f"a task was refused: {made.refused.message}")
        if made.HasField("event") and made.event.HasField("finished"):
            if made.event.finished.state != tasks_pb2.TASK_STATE_DONE:
                raise SystemExit(f"a task failed: {made.event.finished}")
            done += 1
    took = time.perf_counter() - started
    if done != count:
        raise SystemExit(f"{done} of {count} tasks ended")
    return {"tasks_per_s": round(count / took, 1)}


async def _latency(client: Client, count: int) -> dict[str, float]:
    times = []
    for number in range(count):
        started = time.perf_counter()
        async for _ in client.run("noop", b"x", session=f"single-{number % 16}"):
            pass
        times.append((time.perf_counter() - started) * 1000)
    return {
        "latency_p50_ms": round(percentile(times, 0.5), 2),
        "latency_p99_ms": round(percentile(times, 0.99), 2),
    }


def _cpu_seconds(fleet: LocalFleet) -> dict[str, float]:
    """CPU so far by kind of process: client, controld, agentd, worker, nats, etcd."""
    spent = {"client": sum(psutil.Process().cpu_times()[:2])}
    for kind, children in (
        ("controld", fleet.controlds), ("agentd", fleet.nodes), ("server", fleet.servers),
    ):  # fmt: skip
        for name, child in children.items():
            top = psutil.Process(child.pid)
            label = name if kind == "server" else kind
            spent[label] = spent.get(label, 0.0) + sum(top.cpu_times()[:2])
            for below in top.children(recursive=True):
                role = (
                    "worker" if "agentd.worker" in " ".join(below.cmdline()) else f"{label}_other"
                )
                spent[role] = spent.get(role, 0.0) + sum(below.cpu_times()[:2])
    return spent


async def _cpu_per_task(
    fleet: LocalFleet, before: dict[str, float], tasks: int
) -> dict[str, float]:
    after = _cpu_seconds(fleet)
    return {
        f"{kind}_cpu_us_per_task": round((after[kind] - before.get(kind, 0.0)) / tasks * 1e6, 1)
        for kind in sorted(after)
    }


def _median(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {
        key: percentile([each[key] for each in rounds if key in each], 0.5) for key in rounds[0]
    }
