"""Runs seeds: `python -m tests.sim --seed 7`, `--seeds 0-199 --jobs 2`, `--seed 7 --shrink`.

A seed that fails is printed with its trace. The same seed gives the same run, to the byte,
under the hash seed that this program sets for itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tests.sim.plan import Plan, draw_plan
from tests.sim.shrink import shrink
from tests.sim.simulate import Outcome, simulate

HASH_SEED = "0"
TAIL_LINES = 60
SEEDS_A_PROCESS = 25


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when all seeds hold."""
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        environment = {**os.environ, "PYTHONHASHSEED": HASH_SEED}
        command = [sys.executable, "-m", "tests.sim", *(arguments or sys.argv[1:])]
        return subprocess.run(command, env=environment, check=False).returncode
    options = _options(arguments)
    if options.plan:
        return _one(msgspec.json.decode(Path(options.plan).read_bytes(), type=Plan), options)
    if options.seed is not None:
        return _one(draw_plan(options.seed), options)
    first, _, last = options.seeds.partition("-")
    return _many(range(int(first), int(last or first) + 1), options)


def run_seeds(seeds: range, jobs: int) -> Iterator[dict[str, object]]:
    """Run seeds in `jobs` processes; yield what each line says, in no certain order."""
    size = max(1, min(SEEDS_A_PROCESS, -(-len(seeds) // jobs)))
    parts = [seeds[at : at + size] for at in range(0, len(seeds), size)]
    with ThreadPoolExecutor(jobs) as threads:
        for lines in threads.map(_in_process, parts):
            yield from lines


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="run one seed and print what came of it")
    parser.add_argument("--seeds", default="0-199", help="run all from A to B")
    parser.add_argument("--jobs", type=int, default=2, help="processes for --seeds")
    parser.add_argument("--shrink", action="store_true", help="make the failing plan smaller")
    parser.add_argument("--plan", help="run a plan from this file instead of a seed")
    parser.add_argument("--save", help="write the plan to this file, once it is shrunk")
    parser.add_argument("--trace", help="write the whole trace to this file")
    parser.add_argument("--lines", action="store_true", help="print one JSON object a seed")
    return parser.parse_args(arguments)


def _one(plan: Plan, options: argparse.Namespace) -> int:
    outcome = _timed(plan)
    if outcome.violation and options.shrink:
        name = outcome.violation.partition(":")[0]

        def fails(smaller: Plan) -> bool:
            return simulate(smaller).violation.partition(":")[0] == name

        plan = shrink(plan, fails, lambda line: print(f"shrinking: {line}", flush=True))  # noqa: T201
        outcome = simulate(plan)
    if options.save:
        Path(options.save).write_bytes(msgspec.json.format(msgspec.json.encode(plan)))
    if options.trace:
        Path(options.trace).write_text("\n".join(outcome.trace) + "\n")
    print("\n".join(told(outcome)))  # noqa: T201
    return 1 if outcome.violation else 0


def told(outcome: Outcome) -> list[str]:
    """Return what somebody needs to know of a run; of one that failed, all."""
    lines = [
        f"seed {outcome.plan.seed}: {outcome.violation or 'holds'}",
        f"  trace {outcome.digest}, {outcome.simulated_s:.1f} simulated s, {outcome.counts}",
    ]
    if outcome.violation:
        lines += [f"  {fault}" for fault in outcome.plan.faults]
        if len(outcome.plan.work) < TAIL_LINES:
            lines += [f"  {work}" for work in outcome.plan.work]
        lines += ["  the last of the trace:", *outcome.trace[-TAIL_LINES:]]
        lines.append(f"  replay: python -m tests.sim --seed {outcome.plan.seed}")
    return lines


def _timed(plan: Plan) -> Outcome:
    began = time.process_time()
    outcome = simulate(plan)
    print(f"{time.process_time() - began:.2f} s of CPU")  # noqa: T201
    return outcome


def _many(seeds: range, options: argparse.Namespace) -> int:
    if options.lines:
        for seed in seeds:
            began = time.process_time()
            outcome = simulate(draw_plan(seed))
            said = {
                "seed": seed,
                "violation": outcome.violation,
                "digest": outcome.digest,
                "cpu_s": round(time.process_time() - began, 3),
                "simulated_s": round(outcome.simulated_s, 1),
                "counts": outcome.counts,
            }
            print(json.dumps(said), flush=True)  # noqa: T201
        return 0
    failed, cpu_s, count = 0, 0.0, 0
    for said in run_seeds(seeds, options.jobs):
        count += 1
        cpu_s += float(str(said["cpu_s"]))
        if said["violation"]:
            failed += 1
            print(f"seed {said['seed']}: {said['violation']}", flush=True)  # noqa: T201
    print(f"{count} seeds, {failed} failed, {cpu_s / max(1, count):.2f} s of CPU each")  # noqa: T201
    return 1 if failed or count != len(seeds) else 0


def _in_process(seeds: range) -> list[dict[str, object]]:
    command = [sys.executable, "-m", "tests.sim", "--lines", "--seeds", f"{seeds[0]}-{seeds[-1]}"]
    environment = {**os.environ, "PYTHONHASHSEED": HASH_SEED}
    done = subprocess.run(command, env=environment, check=False, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]
