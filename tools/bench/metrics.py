"""What scrapes of a controld cost: one of a hundred, with 4096 nodes, scraped each second.

The plant is that of the first part of the bench `fleet`. Windows with scrapes and without
take turns. The controld says itself how late its timers are (20 a second), and how long its
rendering thread kept the interpreter's lock at a stretch, in CPU time: so long a scrape can
hold its event loop up. That thread alone renders; the loop does nothing for a scrape.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import urllib.request
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from agentctl.local.fleet import FleetPlan, LocalFleet
from agentctl.local.processes import free_port
from corefleet import logs
from corefleet.config import LogConfig
from tools.bench.fleet import POOL, REFERENCE_CONTROLDS, SHARDS, STREAMS
from tools.bench.machine import Measured, percentile, progress
from tools.bench.sim_fleet import SimFleetProcess
from tools.fleet.ghosts import Ghosts

SCRAPE_EVERY_S = 1.0
LATE_S = 0.005
SETTLE_S = 3.0

Samples = dict[str, float]
"""Values by name and, of histograms, upper bound: `name{le}`; other labels are summed up."""


@dataclass(slots=True, frozen=True)
class Size:
    nodes: int
    window_s: float
    rounds: int


FULL = Size(4096, 10.0, 2)
QUICK = Size(400, 4.0, 2)


@dataclass(slots=True)
class Scrapes:
    """What was seen of all scrapes."""

    sizes: list[int] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    slice_s: list[float] = field(default_factory=list)
    late: dict[bool, Samples] = field(default_factory=lambda: {True: {}, False: {}})
    """Timers by upper bound of their lateness: in windows with scrapes, and without."""


def run(*, quick: bool, peer: str) -> Measured:
    """Measure; `quick` has 400 nodes."""
    if peer:
        raise SystemExit("metrics has no peer")
    logs.configure(LogConfig(level="warning"), "bench")
    return Measured(uvloop.run(_measure(QUICK if quick else FULL)))


async def _measure(size: Size) -> dict[str, object]:
    address = f"127.0.0.1:{free_port()}"
    seen = Scrapes()
    async with AsyncExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="corefleet-bench-"))
        plan = FleetPlan(
            data=Path(scratch), nodes=0, controlds=1, port=0, pools=(POOL,), shards=SHARDS,
            streams=STREAMS, log_level="warning", controld=f'metrics = "{address}"\n',
        )  # fmt: skip
        fleet = await stack.enter_async_context(LocalFleet(plan))
        simulated = SimFleetProcess(
            "--nats", fleet.nats_url, "--nodes", str(size.nodes), "--pool", f"{POOL.name}=64"
        )
        await stack.enter_async_context(simulated)
        ghosts = Ghosts(fleet.nats_url, fleet.etcd_endpoint, REFERENCE_CONTROLDS - 1)
        stack.push_async_callback(ghosts.close)
        await ghosts.start()
        progress(f"{size.nodes} nodes up in {simulated.ready['took_s']} s")
        await asyncio.sleep(SETTLE_S)
        first = await _scrape(address, None)
        for number in range(size.rounds):
            for scraped in (False, True):
                await _window(address, size.window_s, scraped, seen)
            progress(f"round {number + 1} of {size.rounds}")
        last = await _scrape(address, None)
        rss = psutil.Process(fleet.controlds["c1"].pid).memory_info().rss
    return _results(size, seen, first, last) | {"controld_rss_mb": round(rss / 2**20)}


async def _window(address: str, seconds: float, scraped: bool, seen: Scrapes) -> None:
    before = await _scrape(address, None)
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        if scraped:
            found = await _scrape(address, seen)
            seen.slice_s.append(found["corefleet_scrape_slice_seconds"])
        await asyncio.sleep(min(SCRAPE_EVERY_S, left_s))
    after = await _scrape(address, None)
    totals = seen.late[scraped]
    for name, value in after.items():
        if name.startswith("corefleet_timer_lateness_seconds"):
            totals[name] = totals.get(name, 0.0) + value - before.get(name, 0.0)


async def _scrape(address: str, seen: Scrapes | None) -> Samples:
    began = time.monotonic()
    text = await asyncio.to_thread(_get, address)
    if seen is not None:
        seen.took_s.append(time.monotonic() - began)
        seen.sizes.append(len(text))
    samples: Samples = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            bound = sample.labels.get("le")
            name = f"{sample.name}{{{bound}}}" if bound else sample.name
            samples[name] = samples.get(name, 0.0) + sample.value
    return samples


def _get(address: str) -> bytes:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        return bytes(answer.read())


def _results(size: Size, seen: Scrapes, first: Samples, last: Samples) -> dict[str, object]:
    scrapes = last["corefleet_scrapes_total"] - first["corefleet_scrapes_total"]
    cpu = "corefleet_scrape_cpu_seconds_total"
    results: dict[str, object] = {
        "nodes": size.nodes,
        "scrapes": len(seen.sizes),
        "scrape_bytes": max(seen.sizes),
        "scrape_p50_ms": round(1e3 * percentile(seen.took_s, 0.5), 2),
        "scrape_max_ms": round(1e3 * max(seen.took_s), 2),
        "scrape_cpu_ms": round(1e3 * (last[cpu] - first[cpu]) / scrapes, 2),
        "loop_blocked_p50_ms": round(1e3 * percentile(seen.slice_s, 0.5), 3),
        "loop_blocked_ms": round(1e3 * max(seen.slice_s), 3),
    }
    for scraped, name in ((False, "without"), (True, "with")):
        late = seen.late[scraped]
        timers = late["corefleet_timer_lateness_seconds_count"]
        in_time = late[f"corefleet_timer_lateness_seconds_bucket{{{LATE_S}}}"]
        results[f"timers_{name}_scrapes"] = round(timers)
        results[f"late_share_{name}_scrapes"] = round(1 - in_time / timers, 4)
        mean_s = late["corefleet_timer_lateness_seconds_sum"] / timers
        results[f"late_mean_ms_{name}_scrapes"] = round(1e3 * mean_s, 3)
    return results
