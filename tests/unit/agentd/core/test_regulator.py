"""Batch is squeezed when a domain is loaded, given back when it is not, never on a lie."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentd.bandwidth.report import DomainLoad, Report, Source
from agentd.core.regulation import (
    TRANSITIONS,
    Action,
    DomainState,
    LiftBatch,
    PressureElsewhere,
    RegulatorSettings,
    SensorDoubted,
    SetBatchShare,
)
from agentd.core.regulator import Regulator
from agentd.core.sensing import canary_level
from corefleet.errors import IllegalTransition, InvalidInput
from tools.bench.demand_traces import TICK_S
from tools.bench.memory_system import CURVES, Demand, solve
from tools.bench.regulator import Sensor, regulate

INTERVAL_S = 0.5
SKYLAKE = CURVES["skylake-mlc"]
SETTINGS = RegulatorSettings()


@dataclass
class Bench:
    """One regulated domain; time goes on by an interval with each report."""

    regulator: Regulator = field(default_factory=lambda: Regulator([0]))
    now: float = 0.0
    number: int = 0
    said: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.said += self.regulator.start(self.now)

    @property
    def state(self) -> DomainState:
        return self.regulator.domains[0]

    def mode(self) -> str:
        return self.state.mode

    def kind(self) -> str | None:
        return self.state.kind

    def see(
        self,
        utilisation: float | None = None,
        *,
        times: int = 1,
        exact: bool = False,
        source: Source = "uncore",
        ratio: float | None = None,
        batch: float | None = None,
        pressure: float | None = None,
        steal: float = 0.0,
        batch_in: tuple[int, ...] | None = None,
    ) -> list[Action]:
        """Report about the same `times` times; return what was said."""
        before = len(self.said)
        for _ in range(times):
            self.now += INTERVAL_S
            self.number += 1
            seen = utilisation
            if seen is not None and not exact:
                seen += self.number * 1e-7  # a real counter never repeats itself to the last bit
            load = DomainLoad(
                domain=0, utilisation=seen, latency_ratio=ratio, peak_bytes_per_s=1e11,
                batch_bytes_per_s=None if batch is None else batch * 1e11,
            )  # fmt: skip
            report = Report(
                number=self.number, interval_s=INTERVAL_S, source=source, domains=(load,),
                memory_pressure=pressure, steal=steal,
            )  # fmt: skip
            self.said += self.regulator.report(report, self.now, batch_in)
            self.said += self.regulator.tick(self.now)
        return self.said[before:]

    def silence(self, seconds: float) -> list[Action]:
        before = len(self.said)
        for _ in range(round(seconds)):
            self.now += 1.0
            self.said += self.regulator.tick(self.now)
        return self.said[before:]

    def respond(self, other: float, batch: float, times: int) -> None:
        """Report a domain where batch uses `batch` times its share on top of `other`."""
        for _ in range(times):
            self.see(min(1.0, other + batch * self.state.share))


def free() -> Bench:
    """Return a domain whose batch is not limited."""
    bench = Bench()
    bench.see(0.2, times=60)
    assert bench.mode() == "free"
    return bench


def doubts(actions: list[Action]) -> list[SensorDoubted]:
    return [action for action in actions if isinstance(action, SensorDoubted)]


def test_a_new_regulator_caps_every_domain_and_lifts_the_cap_once_a_sensor_is_believed() -> None:
    regulator = Regulator([3, 1])
    cap = SETTINGS.static_batch_share
    assert regulator.start(0.0) == [SetBatchShare(1, cap), SetBatchShare(3, cap)]
    bench = free()
    assert bench.said[-1] == LiftBatch(0)
    shares = [action.share for action in bench.said if isinstance(action, SetBatchShare)]
    assert shares == sorted(shares)


def test_above_the_high_water_batch_is_cut_and_a_greater_overshoot_cuts_more() -> None:
    shares = []
    for level in (0.82, 0.88, 0.94):
        bench = free()
        (cut,) = bench.see(level, times=2)
        assert isinstance(cut, SetBatchShare)
        shares.append(cut.share)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] < 1.0


def test_one_outlier_moves_nothing() -> None:
    bench = free()
    assert bench.see(0.94) == []
    assert bench.see(0.5, times=4) == []


def test_between_the_waters_nothing_moves() -> None:
    bench = free()
    bench.see(0.9, times=2)
    share = bench.state.share
    for level in (0.73, 0.79, 0.75, 0.78) * 20:
        assert bench.see(level) == []
    assert bench.state.share == share


def test_batch_is_given_back_slowly_below_and_faster_far_below() -> None:
    gains = []
    for level in (0.68, 0.3):
        bench = free()
        bench.see(0.97, times=12)
        low = bench.state.share
        bench.see(level, times=8)
        gains.append(bench.state.share - low)
        bench.see(0.3, times=60)
        assert bench.mode() == "free"
        assert bench.said[-1] == LiftBatch(0)
    assert 0 < gains[0] < gains[1]


def test_batch_is_never_cut_below_the_floor_and_the_floor_ends_the_cutting() -> None:
    bench = free()
    said = bench.see(1.0, times=200)
    shares = [action.share for action in said if isinstance(action, SetBatchShare)]
    assert min(shares) == shares[-1] == SETTINGS.floor
    assert [type(action) for action in said].count(PressureElsewhere) == 1
    assert bench.mode() == "elsewhere"


def test_cuts_that_change_nothing_end_and_are_said_once() -> None:
    bench = free()
    said = bench.see(0.9, times=100)
    assert [type(action) for action in said].count(PressureElsewhere) == 1
    held = bench.state.share
    assert SETTINGS.floor < held < 0.7
    assert bench.see(0.9, times=50) == []
    bench.see(0.6, times=60)
    assert bench.state.share > held


def test_cutting_is_tried_again_when_the_pressure_elsewhere_grows() -> None:
    bench = free()
    bench.see(0.86, times=100)
    assert bench.mode() == "elsewhere"
    held = bench.state.share
    bench.see(0.93, times=2)
    assert bench.mode() == "squeezing"
    assert bench.state.share < held


def test_a_flooded_canary_is_cut_until_it_recovers_although_its_level_hardly_moves() -> None:
    """Its level is near 1 at 3.4 times the idle latency and at 2.3 times alike."""
    trace = [Demand(0.15, 0.3)] * 400 + [Demand(0.15, 2.0)] * 400
    done = regulate(SKYLAKE, trace, "canary")
    assert done.loads[410].latency > 3.0
    assert all(load.latency < SETTINGS.canary_at_high * 1.1 for load in done.loads[-300:])


def test_idle_batch_is_not_cut_for_what_others_do() -> None:
    bench = free()
    assert bench.see(0.95, times=20, batch=0.0, source="uncore") == []
    assert bench.see(0.95, times=20, batch_in=()) == []
    assert bench.state.share == 1.0
    assert bench.see(0.95, times=2, batch_in=(0,)) != []


def test_a_batch_class_that_pauses_is_given_back_slowly() -> None:
    gains = []
    for batch in (0.0, 0.2):
        bench = free()
        bench.see(0.97, times=12)
        low = bench.state.share
        bench.see(0.3, times=8, batch=batch)
        gains.append(bench.state.share - low)
    assert 0 < gains[0] < gains[1]


@pytest.mark.parametrize("lie", [math.nan, math.inf, -0.2, 7.0])
def test_impossible_values_are_never_acted_on_and_end_in_the_static_cap(lie: float) -> None:
    bench = free()
    assert bench.see(lie, times=2) == []
    (doubt,) = bench.see(lie)
    assert isinstance(doubt, SensorDoubted)
    assert doubt.source == "uncore"
    assert bench.mode() == "doubting"
    assert bench.state.share == 1.0
    assert bench.see(lie, times=40) == [SetBatchShare(0, SETTINGS.static_batch_share)]
    assert bench.mode() == "static"
    assert bench.see(0.2, times=5) == []
    bench.see(0.2, times=60)
    assert bench.mode() == "free"


def test_a_single_impossible_value_changes_nothing() -> None:
    bench = free()
    for _ in range(20):
        assert bench.see(math.nan) == []
        assert bench.see(0.3, times=3) == []
    assert bench.mode() == "free"


def test_a_counter_that_stands_still_while_the_share_moves_is_doubted() -> None:
    bench = free()
    said = bench.see(0.97, times=40, exact=True)
    (doubt,) = doubts(said)
    assert "frozen" in doubt.reason
    bench.see(0.97, times=40, exact=True)
    assert bench.mode() == "static"
    assert bench.state.share == SETTINGS.static_batch_share


def test_a_steady_value_without_a_moving_share_is_no_lie() -> None:
    bench = free()
    assert bench.see(0.4, times=500, exact=True) == []


def test_a_counter_that_the_canary_contradicts_is_left_for_the_canary() -> None:
    bench = free()
    said: list[Action] = []
    for turn in range(30):
        said += bench.see(0.3, ratio=2.6 + turn / 100)
    (doubt,) = doubts(said)
    assert doubt.source == "uncore"
    assert "canary" in doubt.reason
    assert bench.kind() == "canary"
    assert bench.state.share < 1.0
    for turn in range(30):
        bench.see(0.3, ratio=1.1 + turn / 1000)
    assert bench.kind() == "utilisation"


def test_a_canary_that_repeats_its_last_value_is_not_heard_again() -> None:
    bench = Bench()
    for turn in range(60):
        bench.see(ratio=1.05 + turn / 1000, source="canary")
    share = bench.state.share
    said = bench.see(ratio=2.5, source="canary", times=4)
    assert len(said) == 1
    cut = bench.state.share
    assert cut < share
    bench.see(ratio=2.4, source="canary")
    assert bench.state.share < cut


def test_what_the_canary_says_while_the_hypervisor_steals_is_not_memory() -> None:
    bench = Bench()
    for turn in range(60):
        bench.see(ratio=1.05 + turn / 1000, source="canary")
    assert bench.see(ratio=3.0, source="canary", steal=0.4) == []
    assert bench.see(ratio=3.2, source="canary", steal=0.4) == []
    assert bench.see(ratio=3.1, source="canary", steal=0.0) != []


def test_silence_is_doubted_held_and_then_capped() -> None:
    bench = free()
    assert bench.silence(2.0) == []
    (doubt,) = bench.silence(3.0)
    assert isinstance(doubt, SensorDoubted)
    assert "silent" in doubt.reason
    assert bench.state.share == 1.0
    assert bench.silence(15.0) == [SetBatchShare(0, SETTINGS.static_batch_share)]


def test_another_source_goes_on_from_the_share_of_the_one_before() -> None:
    bench = free()
    bench.respond(0.2, 1.5, 40)
    share = bench.state.share
    assert share < 0.6
    said = [a for _ in range(20) for a in bench.see(0.2 + 1.5 * share, source="resctrl")]
    assert doubts(said) == []
    assert bench.state.share == pytest.approx(share)
    waits = 1.0 + (SETTINGS.canary_at_high - 1.0) * 0.85
    for turn in range(40):
        bench.see(ratio=waits + turn / 1000, source="canary")
    assert bench.kind() == "canary"
    assert bench.state.share == pytest.approx(share)


def test_pressure_alone_never_gives_batch_more_than_the_static_cap() -> None:
    bench = free()
    bench.see(pressure=0.0, source="pressure", times=100)
    assert bench.state.share == SETTINGS.static_batch_share
    bench.see(pressure=0.3, source="pressure", times=3)
    squeezed = bench.state.share
    assert squeezed < SETTINGS.static_batch_share
    bench.see(pressure=0.3, source="pressure", times=15)
    assert bench.state.share == squeezed  # avg10 has not forgotten yet
    bench.see(pressure=0.0, source="pressure", times=200)
    assert bench.state.share == SETTINGS.static_batch_share


def test_without_any_sensor_the_static_cap_stays() -> None:
    bench = Bench()
    bench.see(source="pressure", times=100)
    assert bench.said == [SetBatchShare(0, SETTINGS.static_batch_share)]


def test_domains_do_not_disturb_each_other() -> None:
    regulator = Regulator([0, 1])
    regulator.start(0.0)
    for turn in range(1, 100):
        loads = tuple(
            DomainLoad(domain=domain, utilisation=level + turn * 1e-7)
            for domain, level in ((0, 0.3), (1, 0.98))
        )
        report = Report(number=turn, interval_s=INTERVAL_S, source="uncore", domains=loads)
        regulator.report(report, turn * INTERVAL_S)
    assert regulator.domains[0].share == 1.0
    assert regulator.domains[1].share < SETTINGS.static_batch_share


def test_a_move_that_the_table_lacks_raises_with_the_story() -> None:
    bench = free()
    bench.state.mode = "static"
    with pytest.raises(IllegalTransition, match="static -> squeezing"):
        bench.see(0.9, times=2)
    assert ("free", "static") not in TRANSITIONS


@pytest.mark.parametrize(
    ("name", "value"),
    [("high", 1.0), ("low", 0.9), ("floor", 0.0), ("static_batch_share", 0.01), ("hold_s", -1.0)],
)
def test_settings_that_make_no_sense_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidInput, match=name):
        RegulatorSettings(**{name: value})


def test_the_canary_at_its_threshold_counts_as_the_high_water() -> None:
    assert canary_level(SETTINGS.canary_at_high, SETTINGS.canary_at_high, 0.8) == pytest.approx(0.8)
    assert canary_level(0.9, 1.5, 0.8) == 0.0


# On the memory model.

SENSED: tuple[Sensor, ...] = ("resctrl", "uncore", "canary")


def constant(victim: float, batch: float, seconds: float) -> list[Demand]:
    return [Demand(victim, batch)] * round(seconds / TICK_S)


@settings(max_examples=25)
@given(
    sensor=st.sampled_from(SENSED),
    curve=st.sampled_from(sorted(CURVES)),
    victim=st.floats(0.0, 0.6),
    batch=st.floats(0.0, 3.0),
)
def test_in_steady_demand_the_share_settles(
    sensor: Sensor, curve: str, victim: float, batch: float
) -> None:
    shares = regulate(CURVES[curve], constant(victim, batch, 120.0), sensor).shares
    late = shares[-400:]
    # The canary's noise of 5 % can leave the band now and then; 0.1 is one shallow cut.
    assert max(late) - min(late) <= (0.1 if sensor == "canary" else 0.05)


@settings(max_examples=20)
@given(
    sensor=st.sampled_from(SENSED),
    steps=st.lists(st.tuples(st.floats(0.0, 0.8), st.floats(0.0, 3.0)), min_size=1, max_size=6),
)
def test_any_demand_keeps_the_share_in_its_bounds_and_quiet_gives_it_back(
    sensor: Sensor, steps: list[tuple[float, float]]
) -> None:
    trace = [d for victim, batch in steps for d in constant(victim, batch, 8.0)]
    shares = regulate(SKYLAKE, trace + constant(0.1, 0.2, 90.0), sensor).shares
    assert all(SETTINGS.floor <= share <= 1.0 for share in shares)
    assert shares[-1] == 1.0


@settings(max_examples=20)
@given(sensor=st.sampled_from(SENSED), victim=st.floats(0.0, 0.4), batch=st.floats(1.2, 3.0))
def test_a_flood_is_brought_below_the_high_water(
    sensor: Sensor, victim: float, batch: float
) -> None:
    loads = regulate(SKYLAKE, constant(victim, batch, 60.0), sensor, noise=0.5).loads[-100:]
    late = sum(load.utilisation for load in loads) / len(loads)
    assert late <= SETTINGS.high + 0.03


@settings(max_examples=60)
@given(
    values=st.lists(
        st.one_of(
            st.none(),
            st.floats(0.0, 1.4),
            st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 1e30]),
        ),
        max_size=80,
    ),
    others=st.lists(
        st.tuples(
            st.sampled_from(["resctrl", "uncore", "canary", "pressure"]),
            st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)),
            st.one_of(st.none(), st.floats(allow_nan=True)),
        ),
        min_size=1,
        max_size=20,
    ),
)
def test_no_report_whatever_it_says_breaks_the_regulator(
    values: list[float | None], others: list[tuple[Source, float | None, float | None]]
) -> None:
    bench = Bench()
    for at, value in enumerate(values):
        source, ratio, odd = others[at % len(others)]
        for said in bench.see(
            value, source=source, ratio=ratio, batch=odd, pressure=odd, steal=odd or 0.0
        ):
            if isinstance(said, SetBatchShare):
                assert SETTINGS.floor <= said.share < 1.0
        assert SETTINGS.floor <= bench.state.share <= 1.0


LIES: dict[str, Callable[[float, DomainLoad], DomainLoad]] = {
    "not a number": lambda _, load: msgspec.structs.replace(load, utilisation=math.nan),
    "negative": lambda _, load: msgspec.structs.replace(load, utilisation=-0.5),
    "ten times too much": lambda _, load: msgspec.structs.replace(
        load, utilisation=10 * (load.utilisation or 0.2)
    ),
    "nothing": lambda _, load: DomainLoad(domain=load.domain),
}


@pytest.mark.parametrize("lie", LIES)
def test_on_the_model_a_lying_counter_costs_no_more_than_the_static_cap(lie: str) -> None:
    def spoil(now: float, load: DomainLoad) -> DomainLoad:
        return LIES[lie](now, load) if now > 30.0 else load

    done = regulate(SKYLAKE, constant(0.15, 1.5, 90.0), "uncore", spoil=spoil)
    assert done.shares[-1] == SETTINGS.static_batch_share


def test_the_model_gives_the_measured_latencies_back() -> None:
    for curve in CURVES.values():
        for bandwidth, latency_ns in curve.points:
            ratio = curve.ratio(bandwidth / curve.peak_gb_per_s)
            assert ratio * curve.idle_ns == pytest.approx(latency_ns)
        idle = solve(curve, Demand(0.0, 0.0), 1.0)
        assert idle.latency == pytest.approx(1.0, abs=1e-3)
        flood = solve(curve, Demand(0.2, 3.0), 1.0)
        assert flood.utilisation == pytest.approx(1.0, abs=1e-3)
        assert flood.slowdown > solve(curve, Demand(0.2, 3.0), 0.2).slowdown
