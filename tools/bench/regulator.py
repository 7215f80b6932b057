"""The regulator's law on a model of a memory system, over demand traces. A model, no machine.

Only the canary's cost is measured for real.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentd.bandwidth.report import DomainLoad, Report
from agentd.core.regulation import LiftBatch, RegulatorSettings, SetBatchShare
from agentd.core.regulator import Regulator
from tools.bench.canary_cost import canary_cost
from tools.bench.demand_traces import SEED, TICK_S, traces
from tools.bench.machine import Measured, progress
from tools.bench.memory_system import CURVES, Curve, Demand, Load, solve

Sensor = Literal["resctrl", "uncore", "canary", "none"]
SENSORS: tuple[Sensor, ...] = ("resctrl", "uncore", "canary", "none")
INTERVAL_S = 0.5
NOISE = 0.02
"""Standard deviation of a counter's reading, as a share of the peak."""
CANARY_NOISE = 0.05
"""Of the canary's ratio, relative: a few ms of pointer chasing."""
CANARY_EVERY_S = 2.0
DELAY_REPORTS = 1
"""A report is acted upon one interval after it was measured."""
WARM_S = 10.0
"""Not counted: the regulator starts with the static cap."""
STALLS = (0.4, 0.5)
"""Share of its time that the victim waits for memory when that is idle."""
HEADLINE = f"skylake-mlc stall {STALLS[0]}"
GOAL_WITH = 1.2
GOAL_WITHOUT = 1.8
GOAL_SHARE = 0.7


@dataclass(slots=True)
class Run:
    loads: list[Load] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)


def run(*, quick: bool, peer: str) -> Measured:
    """Simulate all traces; `peer` may be `static`, a fixed cap without any sensor."""
    if peer not in ("", "static"):
        raise SystemExit(f"regulator: peer {peer!r} is not known; expected static")
    demands = traces(60.0 if quick else 120.0)
    measured = Measured({"model_only": True, "interval_s": INTERVAL_S})
    if peer:
        measured.peer = {}
    for curve in list(CURVES.values())[: 1 if quick else None]:
        for stall in STALLS:
            asked = {n: [d._replace(stall=stall) for d in t] for n, t in demands.items()}
            without = {name: simulate(trace, curve, 1.0) for name, trace in asked.items()}
            key = f"{curve.name} stall {stall}"
            for sensor in SENSORS:
                got = _measure(curve, asked, without, sensor)
                measured.results[f"{key} {sensor}"] = got
                progress(f"{key} {sensor}: {got['summary']}")
            if measured.peer is not None:
                cap = RegulatorSettings().static_batch_share
                capped = {name: simulate(trace, curve, cap) for name, trace in asked.items()}
                rows = {n: _row(curve, t, without[n], capped[n]) for n, t in asked.items()}
                measured.peer[key] = {"summary": _summary(rows), **rows}
                progress(f"{key} static: {_summary(rows)}")
    progress("the canary's cost on this machine")
    cost = canary_cost(10.0 if quick else 30.0)
    measured.results = _headline(measured.results) | cost | measured.results
    return measured


def _headline(results: dict[str, object]) -> dict[str, object]:
    """Return the figures of the counters' case under short keys."""
    measured = results[f"{HEADLINE} uncore"]
    assert isinstance(measured, dict)
    summary = measured["summary"]
    return {
        "signal": "uncore",
        "model_slowdown_without": summary["victim_slowdown_without"],
        "model_slowdown_with": summary["victim_slowdown_with"],
        "model_slowdown_with_max": summary["victim_slowdown_with_max"],
        "batch_share": summary["batch_share_of_leftover"],
        "settle_s": summary["settling_s"],
    }


def simulate(trace: Sequence[Demand], curve: Curve, cap: float) -> Run:
    """Run without a regulator, batch capped at `cap`."""
    return Run([solve(curve, demand, cap) for demand in trace], [cap] * len(trace))


def regulate(
    curve: Curve,
    trace: Iterable[Demand],
    sensor: Sensor,
    settings: RegulatorSettings | None = None,
    spoil: Callable[[float, DomainLoad], DomainLoad] | None = None,
    noise: float = 1.0,
    regulator: Regulator | None = None,
) -> Run:
    """Run with the regulator. `spoil` may make the sensor lie; `noise` scales its noise."""
    rng = random.Random(SEED)
    regulator = regulator or Regulator((0,), settings)
    done, share, now, number = Run(), 1.0, 0.0, 0
    pending: list[Report] = []
    window: list[Load] = []
    chase = 1.0
    actions = list(regulator.start(now))
    per_report, per_chase = round(INTERVAL_S / TICK_S), round(CANARY_EVERY_S / TICK_S)
    for tick, demand in enumerate(trace):
        for action in actions:
            if isinstance(action, SetBatchShare):
                share = action.share
            elif isinstance(action, LiftBatch):
                share = 1.0
        load = solve(curve, demand, share)
        done.loads.append(load)
        done.shares.append(share)
        window.append(load)
        now = (tick + 1) * TICK_S
        actions = []
        if tick % per_chase == per_chase // 2:
            chase = max(1.0, load.latency * rng.gauss(1.0, CANARY_NOISE * noise))
        if (tick + 1) % per_report == 0:
            number += 1
            seen = _sense(curve, sensor, window, chase, rng, noise)
            seen = spoil(now, seen) if spoil is not None else seen
            source = "pressure" if sensor == "none" else sensor
            pending.append(
                Report(
                    number=number, interval_s=INTERVAL_S, source=source, domains=(seen,),
                    memory_pressure=0.0 if sensor == "none" else None,
                )
            )  # fmt: skip
            window = []
            if len(pending) > DELAY_REPORTS:
                actions = list(regulator.report(pending.pop(0), now))
            actions += regulator.tick(now)
    return done


def _sense(
    curve: Curve, sensor: Sensor, window: list[Load], chase: float, rng: random.Random, noise: float
) -> DomainLoad:
    used = sum(load.utilisation for load in window) / len(window)
    batch = sum(load.batch for load in window) / len(window)
    peak = curve.peak_gb_per_s * 1e9
    if sensor in ("resctrl", "uncore"):
        seen = max(0.0, used + rng.gauss(0.0, NOISE * noise))
        split = batch * peak if sensor == "resctrl" else None
        return DomainLoad(
            domain=0, utilisation=seen, peak_bytes_per_s=peak, batch_bytes_per_s=split
        )
    return DomainLoad(domain=0, latency_ratio=chase if sensor == "canary" else None)


def _measure(
    curve: Curve, demands: dict[str, list[Demand]], without: dict[str, Run], sensor: Sensor
) -> dict[str, object]:
    rows = {
        name: _row(curve, trace, without[name], regulate(curve, trace, sensor))
        for name, trace in demands.items()
    }
    constant = [Demand(0.15, 1.5)] * round(120 / TICK_S)
    steady = regulate(curve, constant, sensor)
    return {
        "summary": _summary(rows)
        | {
            "settling_s": _settling(curve, sensor),
            "oscillation": _amplitude(steady),
        },
        **rows,
    }


def _row(curve: Curve, trace: Sequence[Demand], without: Run, done: Run) -> dict[str, float]:
    """Slow-downs against the victim alone; batch's part of what the victim left."""
    first = round(WARM_S / TICK_S)
    alone = [solve(curve, demand, 0.0) for demand in trace]
    weights = [demand.victim for demand in trace][first:]
    own = _work(weights, alone[first:])
    got = under_high = left = 0.0
    high = RegulatorSettings().high
    for demand, load, free in zip(trace[first:], done.loads[first:], alone[first:], strict=True):
        got += load.batch
        left += min(demand.batch, 1.0 - free.victim)
        under_high += min(demand.batch, max(0.0, high - free.victim))
    return {
        "victim_slowdown_without": round(own / _work(weights, without.loads[first:]), 3),
        "victim_slowdown_with": round(own / _work(weights, done.loads[first:]), 3),
        "batch_share_of_leftover": round(got / left, 3),
        "batch_share_under_high_water": round(got / under_high, 3),
    }


def _work(weights: Sequence[float], loads: Sequence[Load]) -> float:
    return sum(weight / load.slowdown for weight, load in zip(weights, loads, strict=True))


def _summary(rows: dict[str, dict[str, float]]) -> dict[str, object]:
    """Means and extremes over the traces where the victim suffers, and the goals missed."""
    hurt = {n: r for n, r in rows.items() if r["victim_slowdown_without"] >= GOAL_WITHOUT}
    over = {n: r["victim_slowdown_with"] for n, r in hurt.items()}
    kept = {n: r["batch_share_of_leftover"] for n, r in hurt.items()}
    summary: dict[str, object] = {"traces": len(rows), "traces_hurt": len(hurt)}
    if hurt:
        summary |= {
            "victim_slowdown_without": _mean(r["victim_slowdown_without"] for r in hurt.values()),
            "victim_slowdown_with": _mean(over.values()),
            "victim_slowdown_with_max": max(over.values()),
            "batch_share_of_leftover": _mean(kept.values()),
            "batch_share_of_leftover_min": min(kept.values()),
        }
    return summary | {
        "slowdown_goal_missed": [n for n, slowdown in over.items() if slowdown > GOAL_WITH],
        "batch_share_goal_missed": [n for n, share in kept.items() if share < GOAL_SHARE],
    }


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return round(sum(listed) / len(listed), 3)


def _settling(curve: Curve, sensor: Sensor) -> float | None:
    """Seconds from a flood of batch until the load stays below the high water (the canary:
    the latency that stands for it), reading noise allowed; None: never."""
    quiet, flood = round(40 / TICK_S), round(60 / TICK_S)
    trace = [Demand(0.15, 0.3)] * quiet + [Demand(0.15, 2.0)] * flood
    loads = regulate(curve, trace, sensor).loads[quiet:]
    limits = RegulatorSettings()
    if sensor == "canary":
        over = [i for i, load in enumerate(loads) if load.latency > limits.canary_at_high * 1.05]
    else:
        over = [i for i, load in enumerate(loads) if load.utilisation > limits.high + NOISE]
    if over and over[-1] >= len(loads) - 1:
        return None
    return round((over[-1] + 1) * TICK_S, 1) if over else 0.0


def _amplitude(done: Run) -> float:
    """Greatest minus least batch share over the last half of a constant demand."""
    shares = done.shares[len(done.shares) // 2 :]
    return round(max(shares) - min(shares), 3)
