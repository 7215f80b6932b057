"""Time of a full discovery and of a refresh, on machines of 512 and of 128 CPUs."""

from __future__ import annotations

import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from agentd.core.topology import Overrides
from agentd.hostfs import HostFs
from agentd.probes import discover, refresh
from tools.bench.machine import Measured, percentile, progress
from tools.bench.machine_tree import Shape, write_machine

SHAPES = {
    "made_512cpu_128n": Shape(cpus=512, nodes=128, threads=1, nodes_per_package=2),
    "made_128cpu_4n": Shape(cpus=128, nodes=4, threads=2, nodes_per_package=2),
}
RECORDED = ("ia64-altix-512cpu-128n", "arm64-kunpeng920-2p-4n", "x86-clx-snc2-pmem-isolcpus")
GOAL_FULL_MS = 150
GOAL_REFRESH_MS = 20


def run(*, quick: bool, peer: str, machines: str = "") -> Measured:
    """Measure; `machines` names a folder of recorded ones to measure, too.

    The files lie on a disk cache, not in sysfs: opening costs about the same, but the
    kernel's own work of filling an attribute is missing.
    """
    if peer:
        raise SystemExit(f"discover: peer {peer!r} is not known; there is none")
    runs = 20 if quick else 100
    measured = Measured({"goal_full_ms": GOAL_FULL_MS, "goal_refresh_ms": GOAL_REFRESH_MS})
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in SHAPES.items():
            root = Path(folder, name)
            files = write_machine(root, shape)
            found = discover(HostFs(root), Overrides())
            if len(found.online) != shape.cpus or len(found.domains) != shape.nodes:
                raise SystemExit(f"{name}: found {len(found.domains)} of {shape.nodes} domains")
            measured.results[name] = {"files": files, **_times(root, runs)}
            progress(f"{name}: {measured.results[name]}")
        for name in RECORDED if machines else ():
            with tarfile.open(Path(machines, f"{name}.tar.gz")) as archive:
                archive.extractall(folder, filter="tar")
            measured.results[name] = _times(Path(folder, name), runs)
            progress(f"{name}: {measured.results[name]}")
    measured.results["this_machine"] = _times(Path("/"), runs)
    return measured


def _times(root: Path, runs: int) -> dict[str, object]:
    host, overrides = HostFs(root), Overrides()
    before = discover(host, overrides)
    if refresh(host, before, overrides).online != before.online:
        raise SystemExit(f"{root}: a refresh found other CPUs")
    full = _measure(lambda: discover(host, overrides), runs)
    short = _measure(lambda: refresh(host, before, overrides), runs)
    return {"runs": runs, **_named("full", full), **_named("refresh", short)}


def _named(what: str, times: list[tuple[float, float]]) -> dict[str, object]:
    wall, cpu = [one for one, _ in times], [other for _, other in times]
    return {
        f"{what}_ms_p50": round(statistics.median(wall), 2),
        f"{what}_ms_p95": round(percentile(wall, 0.95), 2),
        f"{what}_cpu_ms_p50": round(statistics.median(cpu), 2),
    }


def _measure(call: Callable[[], object], runs: int) -> list[tuple[float, float]]:
    """Wall and CPU time of each run, in ms: they part company when others use the machine."""
    times = []
    for _ in range(runs):
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        times.append(((time.perf_counter() - wall) * 1000, (time.process_time() - cpu) * 1000))
    return times
