"""False alarms and detection times of a fixed deadline and of phi; what watching nodes costs."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from controld.core.fleet import Fleet
from controld.core.liveness import LivenessTimes, RackLiveness
from controld.core.liveness_io import (
    BeatReceived,
    LivenessTick,
    NodeRegisteredEvent,
    PublishDigest,
)
from controld.core.loss_gate import LossGate
from controld.core.mass_loss import MassLoss, MassLossLimits
from corefleet.codec import decode, encode
from corefleet.messages.records import DomainInfo, NodeRegistration, PoolSpec
from corefleet.messages.wire import Heartbeat, LoadVector, RackDigest, SlotUse
from tools.bench.beat_traces import INTERVAL_S, made, recorded, resampled
from tools.bench.detectors import MONTH_S, Beats, Floats, detection_s, false_alarms, fixed, phi
from tools.bench.machine import Measured, progress

_RACK = 40
_RACKS = 103
_CONTROLDS = 100
_CHUNK_BEATS = 1_000_000
_CRASHES = 20_000
_PHI_FLOORS_S = (0.0, 0.1)
"""No least deviation, and that of common implementations."""
_PHI_THRESHOLDS = (3.0, 8.0, 12.0)


def run(*, quick: bool, peer: str) -> Measured:
    """Measure on 0.3 node-months of each made trace (--quick: 0.1)."""
    if peer:
        raise SystemExit(f"liveness: peer {peer!r} is not known; there is none")
    measured = Measured({"beat_interval_s": INTERVAL_S})
    rng = np.random.default_rng(7)
    month = int(MONTH_S / INTERVAL_S)
    beats = month // 10 if quick else 3 * month // 10
    gaps = recorded(8.0 if quick else 20.0, programs=4, busy=2)
    progress(f"recorded {len(gaps)} gaps, the longest {gaps.max():.3f} s")
    measured.results["recorded"] = {
        "gaps": len(gaps),
        "gap_p50_ms": round(1000 * float(np.quantile(gaps, 0.5)), 1),
        "gap_p99_ms": round(1000 * float(np.quantile(gaps, 0.99)), 1),
        "gap_max_ms": round(1000 * float(gaps.max()), 1),
    }
    sources: dict[str, Callable[[int], Beats]] = {
        "busy_dc": lambda count: made("busy_dc", count, rng),
        "calm_dc": lambda count: made("calm_dc", count, rng),
        "recorded_resampled": lambda count: resampled(gaps, count, rng),
    }
    for name, source in sources.items():
        measured.results[name] = _detectors(source, beats, rng)
        progress(f"{name}: {measured.results[name]}")
    measured.results.update(_costs(2 if quick else 10))
    return measured


def _detectors(
    source: Callable[[int], Beats], beats: int, rng: np.random.Generator
) -> dict[str, object]:
    times = LivenessTimes()
    rules: dict[str, Callable[[Beats], Floats]] = {
        "deadline_suspect": lambda trace: fixed(trace, times.suspect_after_s),
        "deadline_verdict": lambda trace: fixed(trace, times.lost_after_s),
    }
    for threshold in _PHI_THRESHOLDS:
        for floor_s in _PHI_FLOORS_S:
            name = f"phi{threshold:.0f}_floor_{1000 * floor_s:.0f}ms"
            rules[name] = lambda trace, t=threshold, f=floor_s: phi(trace, t, f)  # type: ignore[misc]
    alarms = dict.fromkeys(rules, 0)
    found: dict[str, list[Floats]] = {name: [] for name in rules}
    months = 0.0
    probes = _Probes(rng, times.probe_timeout_s)
    left = beats
    while left > 0:
        trace = source(min(left, _CHUNK_BEATS))
        left -= _CHUNK_BEATS
        months += trace.months
        probes.see(trace)
        for name, rule in rules.items():
            allowed = rule(trace)
            silences = false_alarms(trace, allowed)
            alarms[name] += len(silences)
            if name == "deadline_verdict":
                probes.try_on(silences)
            found[name].append(detection_s(trace, allowed, rng, _CRASHES))
    results: dict[str, object] = {"node_months": round(months, 3)}
    for name in rules:
        late = np.concatenate(found[name])
        results[f"{name}_false_per_node_month"] = round(alarms[name] / months, 3)
        results[f"{name}_detect_p50_s"] = round(float(np.quantile(late, 0.5)), 3)
        results[f"{name}_detect_p99_s"] = round(float(np.quantile(late, 0.99)), 3)
    results["probe_fails_share"] = float(f"{probes.fails:.3g}")
    results["lost_false_per_node_month"] = float(f"{probes.expected / months:.3g}")
    return results


class _Probes:
    """How many false verdicts are left once both looks at the port must fail, too.

    A look fails as often as a beat of the same trace is late by more than its deadline; the
    two looks of one silence, and the silence, are taken as independent. A stalled host is
    not: there all three fail together, and every silence of that length is a loss.
    """

    def __init__(self, rng: np.random.Generator, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._late = 0
        self._beats = 0
        self.expected = 0.0

    @property
    def fails(self) -> float:
        return self._late / max(self._beats, 1)

    def see(self, trace: Beats) -> None:
        late = trace.gaps > INTERVAL_S + self._deadline_s
        self._late += int(late.sum())
        self._beats += len(late)

    def try_on(self, silences: Floats) -> None:
        self.expected += len(silences) * self.fails**2


def _costs(rounds: int) -> dict[str, object]:
    """CPU of one controld that watches a rack and hears the digests of all."""
    names = [f"n{number:02d}" for number in range(_RACK)]
    core = RackLiveness("r0", "c1", 1)
    domain = DomainInfo(domain=0, cpus="0-63", slots={"p": 64, "q": 16})
    registrations = [
        NodeRegistration(node=name, epoch=1, rack="r0", domains=(domain, domain)) for name in names
    ]
    fleet = Fleet()
    gate = LossGate(fleet, MassLoss(MassLossLimits()))
    fleet.set_pools({pool: PoolSpec(name=pool) for pool in ("p", "q")})
    for registration in registrations:
        core.handle(NodeRegisteredEvent(registration), 0.0, 0)
        gate.registered(registration, 0.0)
    beat_s = tick_s = digest_s = heard_s = 0.0
    beats = ticks = digests = 0
    now = 0.0
    for number in range(1, rounds * 100):
        payloads = [encode(_beat(name, number)) for name in names]
        now += INTERVAL_S
        began = time.process_time()
        for payload in payloads:
            core.handle(BeatReceived(decode(payload, Heartbeat)), now, 0)
        beat_s += time.process_time() - began
        beats += len(payloads)
        began = time.process_time()
        actions = core.handle(LivenessTick(), now, 0)
        tick_s += time.process_time() - began
        ticks += 1
        for action in actions:
            if isinstance(action, PublishDigest):
                began = time.process_time()
                sent = encode(action.digest)
                digest_s += time.process_time() - began
                began = time.process_time()
                gate.digest(decode(sent, RackDigest), now)
                heard_s += time.process_time() - began
                digests += 1
    beat_us, tick_us = 1e6 * beat_s / beats, 1e6 * tick_s / ticks
    digest_us, heard_us = 1e6 * digest_s / digests, 1e6 * heard_s / digests
    racks = _RACKS / _CONTROLDS
    per_s = racks * (_RACK / INTERVAL_S * beat_us + 20 * tick_us + 4 * digest_us)
    per_s += _RACKS * 4 * heard_us
    return {
        "beat_us": round(beat_us, 2),
        "tick_us": round(tick_us, 1),
        "digest_sent_us": round(digest_us, 1),
        "digest_heard_us": round(heard_us, 1),
        "digest_bytes": len(sent),
        "controld_cpu_percent": round(per_s / 1e4, 2),
    }


def _beat(node: str, number: int) -> Heartbeat:
    use = tuple(
        SlotUse(pool, domain, total, number % total)
        for domain in (0, 1)
        for pool, total in (("p", 64), ("q", 16))
    )
    load = LoadVector(cpu=0.3 + number % 7 / 100, memory=0.5, memory_bandwidth=0.2)
    return Heartbeat(
        node=node, rack="r0", epoch=1, number=number, sent_ms=number, load=load,
        running=number % 80, slots=use,
    )  # fmt: skip
