"""Ray's no-op tasks: not durable, the nearest thing that people use."""

from __future__ import annotations

import time
from typing import Any

from tools.bench.machine import percentile


def _noop(value: bytes) -> bytes:
    return value


def measure(tasks: int, singles: int, in_flight: int) -> dict[str, float]:
    """Return tasks_per_s and latencies of Ray on this machine; blocks."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=40)
    try:
        noop: Any = ray.remote(num_cpus=1)(_noop)
        ray.get([noop.remote(b"x") for _ in range(200)])
        started = time.perf_counter()
        open_refs: list[object] = []
        sent = 0
        while sent < tasks or open_refs:
            while sent < tasks and len(open_refs) < in_flight:
                open_refs.append(noop.remote(b"x"))
                sent += 1
            ended, open_refs = ray.wait(open_refs, num_returns=min(64, len(open_refs)))
            ray.get(ended)
        throughput = tasks / (time.perf_counter() - started)
        times = []
        for _ in range(singles):
            began = time.perf_counter()
            ray.get(noop.remote(b"x"))
            times.append((time.perf_counter() - began) * 1000)
    finally:
        ray.shutdown()
    return {
        "tasks_per_s": round(throughput, 1),
        "latency_p50_ms": round(percentile(times, 0.5), 2),
        "latency_p99_ms": round(percentile(times, 0.99), 2),
    }
