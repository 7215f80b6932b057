"""Durable no-op tasks: how many a second, and how long a single one takes."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator
from typing import Any, cast

import psutil
import uvloop

from agentctl.local.fleet import LocalFleet
from corefleet.client import Client
from corefleet.rpc import tasks_pb2
from tools.bench.local_fleet import NOOP, running_fleet
from tools.bench.machine import Measured, percentile, progress
from tools.bench.profile import sample, top_lines

IN_FLIGHT = 512
SESSIONS = 1024
_PROFILED_S = 8
_PROFILE_LINES = 20


def run(*, quick: bool, peer: str, profile: bool = False) -> Measured:
    """Measure; `peer` may be `ray`, which runs between our own rounds.

    With `profile` one more round runs under py-spy, and says where the time goes.
    """
    if peer not in ("", "ray"):
        raise SystemExit(f"noop: peer {peer!r} is not known; expected ray")
    measured = uvloop.run(_run(quick, peer))
    if profile:
        uvloop.run(_profile())
    return measured


async def _run(quick: bool, peer: str) -> Measured:
    tasks, singles, rounds = (4000, 200, 2) if quick else (12000, 500, 3)
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for number in range(rounds):
        async with running_fleet((NOOP,)) as fleet, fleet.client() as client:
            await _throughput(client, 500, f"warm{number}")
            before, counted = _cpu_seconds(fleet), await _nats_counts(fleet)
            ours.append(
                await _throughput(client, tasks, f"r{number}")
                | _cpu_per_task(fleet, before, tasks)
                | _per_task(await _nats_counts(fleet), counted, tasks)
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


def _cpu_per_task(fleet: LocalFleet, before: dict[str, float], tasks: int) -> dict[str, float]:
    after = _cpu_seconds(fleet)
    spent = {kind: after[kind] - before.get(kind, 0.0) for kind in sorted(after)}
    spent["all"] = sum(spent.values())
    return {
        f"{kind}_cpu_us_per_task": round(seconds / tasks * 1e6, 1)
        for kind, seconds in spent.items()
    }


async def _nats_counts(fleet: LocalFleet) -> dict[str, int]:
    """Messages in and out of the NATS server so far, and those stored in all streams."""

    def ask(path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{fleet.nats_monitor}/{path}", timeout=5) as answer:
            return cast(dict[str, Any], json.load(answer))

    server = await asyncio.to_thread(ask, "varz")
    stored = await asyncio.to_thread(ask, "jsz?streams=true")
    streams = [each for account in stored["account_details"] for each in account["stream_detail"]]
    return {
        "nats_in": int(server["in_msgs"]),
        "nats_out": int(server["out_msgs"]),
        "writes": sum(int(stream["state"]["last_seq"]) for stream in streams),
    }


def _per_task(after: dict[str, int], before: dict[str, int], tasks: int) -> dict[str, float]:
    return {f"{key}_per_task": round((after[key] - before[key]) / tasks, 2) for key in after}


async def _profile() -> None:
    async with running_fleet((NOOP,)) as fleet, fleet.client() as client:
        await _throughput(client, 500, "warm")
        processes = {f"controld {name}": child.pid for name, child in fleet.controlds.items()}
        processes |= {f"agentd {name}": child.pid for name, child in fleet.nodes.items()}
        sampling = asyncio.create_task(sample(processes, _PROFILED_S))
        while not sampling.done():
            await _throughput(client, 1000, "profiled")
        for name, stacks in (await sampling).items():
            progress(f"{name}: {sum(stacks.values())} samples")
            for line in top_lines(stacks, _PROFILE_LINES):
                progress(f"  {line}")


def _median(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {
        key: percentile([each[key] for each in rounds if key in each], 0.5) for key in rounds[0]
    }
