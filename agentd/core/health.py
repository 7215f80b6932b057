"""Whether a node should give its work away before it fails. Pure: (samples, now) -> verdict.

Each signal (a memory controller, a package, a file system, the beats, the clock) has a state
of its own: `ok` -> `watching` when it is bad, -> `draining` when it stays bad, and back to `ok`
when it was good for a while. Two limits apart and two hold times keep it from flapping.
docs/node-operations.md says where the limits come from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agentd.core.health_samples import (
    BeatsSent,
    ClockState,
    DiskState,
    HealthSettings,
    HealthVerdict,
    MemoryErrors,
    Phase,
    Sample,
    Throttled,
)
from corefleet.errors import IllegalTransition

TRANSITIONS: frozenset[tuple[Phase, Phase]] = frozenset(
    {
        ("ok", "watching"),
        ("watching", "ok"),
        ("watching", "draining"),
        ("draining", "ok"),
    }
)
_RANK: Mapping[Phase, int] = {"ok": 0, "watching": 1, "draining": 2}


@dataclass(slots=True, frozen=True)
class _Level:
    """A signal's value now. `line` says what it means when it is bad."""

    key: str
    value: float
    bad: float
    good: float
    line: str
    drains: bool = True
    at_once: bool = False


@dataclass(slots=True)
class _Window:
    """What counters rose by within the last `span_s`. A counter that falls begins anew."""

    span_s: float
    before: dict[str, int] = field(default_factory=dict)
    rises: deque[tuple[float, int]] = field(default_factory=deque)
    total: int = 0

    def count(self, counts: Mapping[str, int], now: float) -> int:
        """Take new counts: the largest rise of any counter; return the sum of the window."""
        known = [(key, value) for key, value in counts.items() if key in self.before]
        rise = max((max(0, value - self.before[key]) for key, value in known), default=0)
        self.before = dict(counts)
        if rise:
            self.rises.append((now, rise))
            self.total += rise
        while self.rises and self.rises[0][0] <= now - self.span_s:
            self.total -= self.rises.popleft()[1]
        return self.total


@dataclass(slots=True)
class _Beats:
    """(time, beats due, beats sent) of each interval that counts."""

    last: tuple[float, int] | None = None
    flowing: bool = False
    spans: deque[tuple[float, float, int]] = field(default_factory=deque)

    def late(self, sample: BeatsSent, now: float, window_s: float) -> float:
        """Return the share of due beats that did not go out within `window_s`.

        While none at all goes out the node cannot be heard: liveness judges that, not health.
        The interval in which they begin does not count either.
        """
        if self.last is not None and now > self.last[0]:
            sent = sample.sent - self.last[1]
            if sent > 0 and self.flowing:
                self.spans.append((now, (now - self.last[0]) / sample.interval_s, sent))
            self.flowing = sent > 0
        self.last = (now, sample.sent)
        while self.spans and self.spans[0][0] <= now - window_s:
            self.spans.popleft()
        due = sum(span[1] for span in self.spans)
        return max(0.0, 1 - sum(span[2] for span in self.spans) / due) if due else 0.0


@dataclass(slots=True)
class _Signal:
    phase: Phase = "ok"
    since: float = 0.0
    good_since: float | None = None
    line: str = ""


class Health:
    """The signals of one node; nothing is forgotten but by time."""

    def __init__(self, settings: HealthSettings | None = None) -> None:
        self._set = settings or HealthSettings()
        self._signals: dict[str, _Signal] = {}
        self._windows: dict[str, _Window] = {}
        self._beats = _Beats()

    def take(
        self, samples: Iterable[Sample], now: float, not_judged: tuple[str, ...] = ()
    ) -> HealthVerdict:
        """Take one round of samples and return what follows.

        A signal that no sample tells of any more counts as good. `now`: seconds of a clock
        that never steps.
        """
        levels = {level.key: level for sample in samples for level in self._levels(sample, now)}
        for key, level in levels.items():
            self._step(key, self._signals.setdefault(key, _Signal()), level, now)
        for key in self._signals.keys() - levels.keys():
            self._step(key, self._signals[key], None, now)
        self._signals = {k: s for k, s in self._signals.items() if k in levels or s.phase != "ok"}
        unwell = tuple(s.line for _, s in sorted(self._signals.items()) if s.phase != "ok")
        phases: list[Phase] = ["ok", *(signal.phase for signal in self._signals.values())]
        phase = max(phases, key=_RANK.__getitem__)
        return HealthVerdict(phase, unwell, not_judged)

    def _levels(self, sample: Sample, now: float) -> list[_Level]:
        match sample:
            case MemoryErrors():
                return self._memory(sample, now)
            case Throttled():
                return [self._throttled(sample, now)]
            case BeatsSent():
                return [self._late(sample, now)]
            case DiskState():
                return self._disk(sample)
            case ClockState():
                return self._clock(sample)

    def _memory(self, sample: MemoryErrors, now: float) -> list[_Level]:
        levels = []
        name = sample.controller
        if sample.uncorrected is not None:
            line = f"memory controller {name}: {sample.uncorrected} uncorrected errors"
            levels.append(_certain(f"uncorrected {name}", sample.uncorrected > 0, line))
        if sample.corrected is not None:
            key = f"corrected {name}"
            errors = self._window(key, self._set.corrected_window_s).count(
                {name: sample.corrected}, now
            )
            line = (
                f"memory controller {name}: {errors} corrected errors within "
                f"{self._set.corrected_window_s / 3600:g} h"
            )
            levels.append(
                _Level(key, errors, self._set.corrected_bad, self._set.corrected_good, line)
            )
        return levels

    def _throttled(self, sample: Throttled, now: float) -> _Level:
        key = f"throttle {sample.package}"
        span_s = self._set.throttle_window_s
        rate = self._window(key, span_s).count(sample.counts, now) / (span_s / 60)
        return _Level(
            key,
            rate,
            self._set.throttle_bad_per_minute,
            self._set.throttle_good_per_minute,
            f"package {sample.package}: throttled by heat {rate:.1f} times a minute",
        )

    def _late(self, sample: BeatsSent, now: float) -> _Level:
        share = self._beats.late(sample, now, self._set.beats_window_s)
        return _Level(
            "beats",
            share,
            self._set.beats_bad_share,
            self._set.beats_good_share,
            f"heartbeats: {share:.0%} of those due within {self._set.beats_window_s:g} s "
            "did not go out",
        )

    def _disk(self, sample: DiskState) -> list[_Level]:
        where = f"{sample.name} {sample.path}"
        broken = bool(sample.error) or sample.read_only
        reason = f"cannot be asked: {sample.error}" if sample.error else "is read-only"
        full = _Level(
            f"disk {sample.path}",
            sample.used,
            self._set.disk_bad_share,
            self._set.disk_good_share,
            f"{where}: {sample.used:.0%} of its space or inodes is used",
        )
        state = _certain(f"file system {sample.path}", broken, f"{where}: {reason}")
        return [state] if sample.error else [state, full]

    def _clock(self, sample: ClockState) -> list[_Level]:
        line = f"clock: off by {sample.error_s:.3g} s, as the kernel's discipline estimates"
        lone = _Level(
            "clock discipline",
            float(not sample.synchronised),
            1.0,
            0.5,
            "clock: nothing disciplines it (STA_UNSYNC)",
            drains=self._set.drain_unsynchronised,
        )
        if not sample.synchronised:
            # The kernel's estimates mean nothing then.
            return [lone]
        return [
            lone,
            _Level("clock", sample.error_s, self._set.clock_bad_s, self._set.clock_good_s, line),
        ]

    def _window(self, key: str, span_s: float) -> _Window:
        return self._windows.setdefault(key, _Window(span_s))

    def _step(self, key: str, signal: _Signal, level: _Level | None, now: float) -> None:
        bad = level is not None and level.value >= level.bad
        good = level is None or level.value < level.good
        before, line = signal.phase, level.line if level is not None else ""
        if signal.phase == "ok" and bad:
            self._move(key, signal, "watching", now)
        if signal.phase == "watching":
            if good:
                self._move(key, signal, "ok", now)
            elif bad and level is not None and level.drains:
                hold_s = 0.0 if level.at_once else self._set.drain_after_s
                if now - signal.since >= hold_s:
                    self._move(key, signal, "draining", now)
        # Said anew only when something changes: numbers that move are no news.
        signal.line = line if signal.phase != before else signal.line
        if signal.phase == "draining":
            if not good:
                signal.good_since = None
                return
            if signal.good_since is None:
                signal.good_since = now
            if now - signal.good_since >= self._set.well_after_s:
                self._move(key, signal, "ok", now)

    def _move(self, key: str, signal: _Signal, to: Phase, now: float) -> None:
        if (signal.phase, to) not in TRANSITIONS:
            raise IllegalTransition(f"health of {key}", signal.phase, to, signal.line)
        signal.phase, signal.since, signal.good_since = to, now, None


def _certain(key: str, bad: bool, line: str) -> _Level:
    """Return a signal that is worth a drain as soon as it is there."""
    return _Level(key, float(bad), 1.0, 0.5, line, at_once=True)
