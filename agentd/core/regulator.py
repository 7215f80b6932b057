"""How much the batch class of each memory domain may run. Pure: (report, now) -> actions.

Additive increase, multiplicative decrease with a dead band: above the high water the batch share
is cut in proportion to the overshoot, below the low water it is given back step by step, between
them nothing moves. docs/bandwidth.md says why each constant is what it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from agentd.bandwidth.report import DomainLoad, Report, Source
from agentd.core.regulation import (
    TRANSITIONS,
    Action,
    DomainState,
    LiftBatch,
    Mode,
    PressureElsewhere,
    RegulatorSettings,
    SensorDoubted,
    SetBatchShare,
)
from agentd.core.sensing import KINDS, MOST_STEAL, Judge, Kind, Sample, canary_level
from corefleet.errors import IllegalTransition

PINNED: dict[Kind, float] = {"utilisation": 0.95, "canary": 0.88, "pressure": 1.0}
"""From this level on demand may be above the peak, and a cut that helps need not show. For the
canary it is 2.1 times the idle latency: 0.86 to 0.97 of the peak on the measured curves."""
DEEPEST_CUT = 0.5
SHALLOWEST_CUT = 0.95
PINNED_CUT = 0.6
"""Factors of one cut: at most, at least, and at most while the level is pinned."""
STEP_GAIN = 0.7
"""Part of the way to the target that one step up may take."""
FUTILE_CUTS = 2
FUTILE_SHARE = 0.6
FUTILE_DROP = 0.03
FUTILE_WAITING = 0.75
"""After so many cuts to so much of the share the level must have fallen by FUTILE_DROP (the
canary's waiting time to FUTILE_WAITING of what it was), or the pressure is not batch's."""
WORSE = 0.05
"""Rise of the level that makes cutting worth another try."""
IDLE_BATCH = 0.01
"""Share of the peak below which batch uses nothing."""
LEAST_CHANGE = 0.01
"""Smaller changes are not worth a write to cpu.max."""
PRESSURE_DWELL_S = 10.0
"""The window of PSI's avg10."""
LONGEST_STEP_S = 5.0
"""One step up makes up for at most so long without a value."""


class Regulator:
    """The batch shares of all domains of a node."""

    def __init__(self, domains: Iterable[int], settings: RegulatorSettings | None = None) -> None:
        self._set = settings or RegulatorSettings()
        share = self._set.static_batch_share
        self.domains = {d: DomainState(d, share) for d in sorted(set(domains))}

    def start(self, now: float) -> list[Action]:
        """Set the static cap everywhere: whatever an agentd before this one left is unknown."""
        for state in self.domains.values():
            state.settled_at = state.stepped_at = state.blind_since = now
        return [action for state in self.domains.values() for action in self._say(state)]

    def report(
        self, report: Report, now: float, batch_in: Collection[int] | None = None
    ) -> list[Action]:
        """Take a report. `batch_in`: the domains where batch processes are; None: unknown."""
        loads = {load.domain: load for load in report.domains}
        actions: list[Action] = []
        for domain, state in self.domains.items():
            load = loads.get(domain) or DomainLoad(domain=domain)
            absent = batch_in is not None and domain not in batch_in
            actions += self._take(state, report, load, absent, now)
        return actions

    def tick(self, now: float) -> list[Action]:
        """Notice sensors that fell silent. Call it about every second."""
        actions: list[Action] = []
        for state in self.domains.values():
            for judge in state.judges.values():
                actions += self._doubt(state, judge, judge.weigh(None, now))
            actions += self._choose(state, now)
            actions += self._say(state)
        return actions

    def _take(
        self, state: DomainState, report: Report, load: DomainLoad, absent: bool, now: float
    ) -> list[Action]:
        if report.source != state.source:
            state.judges["utilisation"].retire()
            state.source = report.source
        values: dict[Kind, float | None] = {
            "utilisation": load.utilisation,
            "canary": load.latency_ratio if report.steal <= MOST_STEAL else None,
            "pressure": report.memory_pressure,
        }
        actions: list[Action] = []
        samples: dict[Kind, Sample] = {}
        for kind, judge in state.judges.items():
            wrong = judge.offer(values[kind], state.share, now)
            actions += self._doubt(state, judge, judge.weigh(wrong, now))
            value = values[kind]
            if wrong == "" and value is not None:
                samples[kind] = Sample(self._level(kind, value), judge.fresh_at == now)
        actions += self._cross_check(state, samples)
        actions += self._choose(state, now)
        if state.kind in samples:
            sample = samples[state.kind]
            state.level = sample.level
            batch = 0.0 if absent else _batch_use(load, sample.level)
            actions += self._act(state, sample, batch, _interval(report), now)
        return [*actions, *self._say(state)]

    def _level(self, kind: Kind, value: float) -> float:
        if kind == "canary":
            return canary_level(value, self._set.canary_at_high, self._set.high)
        if kind == "pressure":
            return min(1.0, value / self._set.pressure_at_high * self._set.high)
        return value

    def _cross_check(self, state: DomainState, samples: dict[Kind, Sample]) -> list[Action]:
        """Hold the counters against the canary, which feels what the victim feels."""
        judge = state.judges["utilisation"]
        if not state.judges["canary"].trusted:
            judge.opposed = 0
            return []
        if not {"utilisation", "canary"} <= samples.keys() or not samples["canary"].fresh:
            return []
        said, felt = samples["utilisation"].level, samples["canary"].level
        return self._doubt(
            state, judge, judge.contradict(said, felt, self._set.low, self._set.high)
        )

    def _doubt(self, state: DomainState, judge: Judge, reason: str) -> list[Action]:
        if not reason:
            return []
        source: Source = state.source
        if judge.kind != "utilisation":
            source = judge.kind
        return [SensorDoubted(state.domain, source, reason)]

    def _choose(self, state: DomainState, now: float) -> list[Action]:
        """Let the best believed sensor count; hold without one, and cap after a while."""
        kind = next((k for k in KINDS if state.judges[k].trusted), None)
        if kind is None:
            if state.mode not in ("doubting", "static"):
                self._move(state, "doubting")
                state.blind_since = now
            elif state.mode == "doubting" and now - state.blind_since >= self._set.hold_s:
                self._move(state, "static")
                state.share = self._set.static_batch_share
            state.kind = state.level = None
            return []
        if kind != state.kind:
            state.kind = kind
            state.levels.clear()
            state.cuts = 0
            state.settled_at = state.stepped_at = now
            if state.mode != "recovering":  # what was known of the domain was another sensor's word
                self._move(state, "recovering")
            state.share = min(state.share, self._ceiling(state))
        return []

    def _ceiling(self, state: DomainState) -> float:
        return self._set.static_batch_share if state.kind == "pressure" else 1.0

    def _act(
        self, state: DomainState, sample: Sample, batch: float | None, interval_s: float, now: float
    ) -> list[Action]:
        """Apply the law to one level. `batch`: its part of the level, None: not known."""
        if now < state.settled_at or (state.kind == "canary" and not sample.fresh):
            return []
        state.levels = [*state.levels[-1:], sample.level]
        # Two levels agree before anything moves, so that one outlier moves nothing. Not awaited:
        # within a squeeze, and from the canary, which is rare, when it is far above.
        far_above = state.kind == "canary" and sample.level > (1 + self._set.high) / 2
        surely = 1 if state.cuts or far_above else 2
        if len(state.levels) >= surely and min(state.levels[-surely:]) > self._set.high:
            idle = batch is not None and batch < IDLE_BATCH
            return [] if idle else self._cut(state, batch, interval_s, now)
        if sample.level <= self._set.high:
            state.cuts = 0
            if state.mode == "elsewhere":
                self._move(state, "recovering")
        if len(state.levels) == 2 and max(state.levels) < self._set.low:
            self._give(state, batch, now)
        else:
            state.stepped_at = now
        return []

    def _cut(
        self, state: DomainState, batch: float | None, interval_s: float, now: float
    ) -> list[Action]:
        level = sum(state.levels) / len(state.levels)
        if state.mode == "elsewhere" and level < state.cut_from[0] + WORSE:
            return []
        if state.mode != "squeezing":
            self._move(state, "squeezing")
            state.cuts = 0
        if state.cuts == 0:
            state.cut_from = (level, state.share)
        start_level, start_share = state.cut_from
        pinned = state.kind is not None and level >= PINNED[state.kind]
        futile = (
            state.cuts >= FUTILE_CUTS
            and state.share <= FUTILE_SHARE * start_share
            and not _relieved(state.kind, start_level, level)
            and not pinned
        )
        if futile or state.share <= self._set.floor:
            self._move(state, "elsewhere")
            state.cut_from = (level, state.share)
            return [PressureElsewhere(state.domain, level, state.share)]
        excess = level - self._set.target
        factor = 1.0 - excess / max(batch if batch is not None else level, excess)
        factor = min(SHALLOWEST_CUT, PINNED_CUT if pinned else 1.0, factor)
        state.share = max(self._set.floor, state.share * max(DEEPEST_CUT, factor))
        state.cuts += 1
        self._changed(state, interval_s, now)
        return []

    def _give(self, state: DomainState, batch: float | None, now: float) -> None:
        """Take one step up, never past the target if all of the level were batch's."""
        if state.share >= self._ceiling(state):
            state.share = self._ceiling(state)
            if state.mode != "free":
                if state.mode == "squeezing":
                    self._move(state, "recovering")
                self._move(state, "free")
            return
        if state.mode != "recovering":
            self._move(state, "recovering")
        level = max(state.levels)
        # Batch that pauses comes back: while it does nothing its share grows slowly.
        idle = batch is not None and batch < IDLE_BATCH
        fast = level < self._set.far_below and not idle
        rate = self._set.recover_fast_per_s if fast else self._set.recover_per_s
        step = rate * min(LONGEST_STEP_S, max(0.0, now - state.stepped_at))
        per_share = max(batch if batch is not None else level, IDLE_BATCH) / state.share
        step = min(step, STEP_GAIN * (self._set.target - level) / per_share)
        state.share = min(self._ceiling(state), state.share + step)
        state.stepped_at = now
        if state.share >= self._ceiling(state):
            self._move(state, "free")

    def _changed(self, state: DomainState, interval_s: float, now: float) -> None:
        """Wait until a report covers only what came after the cut."""
        state.levels.clear()
        dwell_s = max(self._set.dwell_s, 2.0 * interval_s)
        if state.kind == "canary":
            dwell_s = max(self._set.dwell_s, interval_s)
        if state.kind == "pressure":
            dwell_s = PRESSURE_DWELL_S
        # A report that comes a little early still counts.
        state.settled_at = now + dwell_s - interval_s / 4
        state.stepped_at = now

    def _say(self, state: DomainState) -> list[Action]:
        """Tell the shell of a share that differs enough from what it was told."""
        said = state.said
        ends = state.share in (1.0, self._set.floor) and said != state.share
        if said is not None and abs(state.share - said) < LEAST_CHANGE and not ends:
            return []
        state.said = state.share
        if state.share >= 1.0:
            return [LiftBatch(state.domain)]
        return [SetBatchShare(state.domain, state.share)]

    def _move(self, state: DomainState, mode: Mode) -> None:
        if (state.mode, mode) not in TRANSITIONS:
            story = f"share {state.share:.3f}, level {state.level}, sensor {state.kind}"
            raise IllegalTransition(f"domain {state.domain}", state.mode, mode, story)
        state.mode = mode


def _batch_use(load: DomainLoad, level: float) -> float | None:
    """Return batch's part of the peak, None where it is not known or makes no sense."""
    if not load.batch_bytes_per_s or not load.peak_bytes_per_s:
        known = load.batch_bytes_per_s == 0 and load.peak_bytes_per_s is not None
        return 0.0 if known else None
    use = load.batch_bytes_per_s / load.peak_bytes_per_s
    return use if 0.0 <= use <= level * 1.2 + 0.05 else None


def _relieved(kind: Kind | None, before: float, after: float) -> bool:
    """Whether the cuts between the two levels helped."""
    if kind == "canary":  # its level hardly moves near 1, the waiting time behind it does
        waited, waits = before / (1 - before), after / (1 - after)
        return waits <= FUTILE_WAITING * waited
    return before - after >= FUTILE_DROP


def _interval(report: Report) -> float:
    return report.interval_s if 0.05 <= report.interval_s <= 60.0 else 1.0
