"""The canary: a chase that chases, a baseline that forgets slowly, turns within a budget."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd.bandwidth.canary import (
    ArrayWalk,
    Baseline,
    CanarySensor,
    buffer_bytes,
    burst_bytes_per_s,
    on_cpus,
    why_no_walk,
)
from agentd.bandwidth.pipe import CanarySetup, DomainSetup

OURS = tuple(sorted(os.sched_getaffinity(0)))
NOT_THERE = (1 << 14,)
MIB = 1 << 20


def domains(*cpus: tuple[int, ...]) -> tuple[DomainSetup, ...]:
    return tuple(DomainSetup(domain=n, cpus=each) for n, each in enumerate(cpus))


@dataclass
class FakeWalk:
    """Takes the times that a test says; each walk costs `cost_s` of CPU."""

    times: list[float]
    cost_s: float
    spent_s: float = 0.0
    closed: bool = False

    def step_ns(self, steps: int) -> float:
        self.spent_s += self.cost_s
        return self.times.pop(0)

    def close(self) -> None:
        self.closed = True


@dataclass
class World:
    """Domains with fake walks, driven over time."""

    times: Sequence[Sequence[float]]
    cost_s: float = 0.001
    setup: CanarySetup = field(default_factory=CanarySetup)

    def __post_init__(self) -> None:
        self.walks: dict[int, FakeWalk] = {}
        self.sensor = CanarySensor(
            self.setup, domains(*(OURS for _ in self.times)), self._make, self._cpu_s
        )

    def _make(self, domain: DomainSetup, size: int) -> FakeWalk:
        walk = FakeWalk(list(self.times[domain.domain]), self.cost_s)
        return self.walks.setdefault(domain.domain, walk)

    def _cpu_s(self) -> float:
        return sum(walk.spent_s for walk in self.walks.values())

    def ratios(self, now: float) -> dict[int, float | None]:
        return {key: load.latency_ratio for key, load in self.sensor.sample(now).items()}


def test_the_chase_of_this_numpy_follows_the_words() -> None:
    walk = ArrayWalk(domains(OURS)[0], MIB)
    try:
        assert walk.chases()
        assert 0.5 < walk.step_ns(1000) < 100_000
    finally:
        walk.close()


def test_the_chase_visits_every_line_before_it_meets_one_again() -> None:
    size = 256 * 64
    walk = ArrayWalk(domains(OURS)[0], size)
    seen = []
    try:
        for _ in range(256 // 8):
            walk.step_ns(8)
            seen.append(walk._at)
        # Eight chunks of one step each: every eighth place of a cycle of 256 lines.
        assert len(set(seen)) == 32
        assert seen[-1] == 0
    finally:
        walk.close()


def test_a_ratio_is_against_the_best_of_the_window_and_not_the_first() -> None:
    world = World([[300.0, 150.0, 300.0, 150.0]])
    assert world.ratios(0.0) == {}
    assert world.ratios(0.5) == {0: 1.0}
    assert world.ratios(2.5) == {0: 1.0}
    assert world.ratios(4.5) == {0: 2.0}
    assert world.ratios(6.5) == {0: 1.0}


def test_between_its_turns_a_domain_keeps_its_ratio() -> None:
    world = World([[100.0, 200.0]])
    world.ratios(0.0)
    world.ratios(0.5)
    assert world.ratios(1.0) == {0: 1.0}
    assert world.ratios(2.5) == {0: 2.0}


def test_domains_take_turns() -> None:
    world = World([[100.0] * 2, [100.0, 300.0]])
    assert world.ratios(0.0) == {}
    assert world.ratios(0.1) == {}
    assert world.ratios(0.2) == {0: 1.0}
    assert world.ratios(1.3) == {0: 1.0, 1: 1.0}
    assert world.ratios(2.4) == {0: 1.0, 1: 1.0}
    assert world.ratios(3.5) == {0: 1.0, 1: 3.0}


@given(st.integers(1, 8), st.floats(0.0001, 0.1), st.floats(0.1, 5.0))
def test_all_walks_together_keep_to_their_share_of_a_core(
    many: int, cost_s: float, every_s: float
) -> None:
    setup = CanarySetup(every_s=every_s)
    world = World([[100.0] * 400] * many, cost_s, setup)
    lasting = 300
    for tick in range(lasting):
        world.sensor.sample(tick * 0.5)
    spent = world._cpu_s()
    assert spent <= setup.most_core_share * lasting * 0.5 + 2 * cost_s
    assert spent > 0


def test_a_domain_whose_cpus_are_gone_says_nothing_and_others_go_on() -> None:
    made: list[int] = []

    def make(domain: DomainSetup, size: int) -> FakeWalk:
        made.append(domain.domain)
        return FakeWalk([100.0] * 9, 0.0)

    sensor = CanarySensor(CanarySetup(), domains(NOT_THERE, OURS), make, lambda: 0.0)
    before = os.sched_getaffinity(0)
    seen: set[int] = set()
    for second in range(10):
        seen |= set(sensor.sample(second * 3.0))
    assert seen == {1}
    assert made == [1]
    assert os.sched_getaffinity(0) == before
    sensor.close()


@given(st.lists(st.floats(1.0, 1000.0), min_size=1, max_size=80), st.floats(0.1, 20.0))
def test_a_ratio_is_never_below_one_and_never_above_the_worst(
    values: list[float], step_s: float
) -> None:
    baseline = Baseline(window_s=60.0)
    for index, value in enumerate(values):
        ratio = baseline.ratio(index * step_s, value)
        recent = [v for k, v in enumerate(values[: index + 1]) if (index - k) * step_s < 54.0]
        assert 1.0 <= ratio <= value / min(values)
        assert ratio >= value / min(recent) * (1 - 1e-12)


def test_a_baseline_forgets_what_is_older_than_its_window() -> None:
    baseline = Baseline(window_s=120.0)
    assert baseline.ratio(0.0, 100.0) == 1.0
    assert baseline.ratio(60.0, 200.0) == 2.0
    assert baseline.ratio(200.0, 200.0) == 1.0


def test_the_buffer_is_four_caches_within_its_limit() -> None:
    def of(l3: int) -> int:
        return buffer_bytes(DomainSetup(domain=0, cpus=(0,), l3_bytes=l3), 64 * MIB)

    assert of(8 * MIB) == 32 * MIB
    assert of(256 * MIB) == 64 * MIB
    assert of(0) == 64 * MIB
    assert of(1) == 8 * MIB


def test_the_thread_runs_on_the_cpus_and_comes_back() -> None:
    before = os.sched_getaffinity(0)
    with on_cpus(OURS[:1]) as there:
        assert there
        assert os.sched_getaffinity(0) == {OURS[0]}
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("cpus", [(), NOT_THERE, (-1,)])
def test_cpus_that_are_not_ours_leave_the_thread_where_it_is(cpus: tuple[int, ...]) -> None:
    before = os.sched_getaffinity(0)
    with on_cpus(cpus) as there:
        assert not there
        assert os.sched_getaffinity(0) == before


def test_the_canary_says_why_it_cannot_walk() -> None:
    assert why_no_walk(domains(OURS)) is None
    assert why_no_walk(domains(OURS, NOT_THERE)) == "domain 1: none of the CPUs 16384 is ours"
    assert CanarySensor(CanarySetup(), ()).available() == "there is no domain"


def test_a_burst_reads_at_some_speed() -> None:
    burst = burst_bytes_per_s(domains(OURS)[0], 8 * MIB)
    assert burst is not None
    assert 1e7 < burst < 1e12
    assert burst_bytes_per_s(domains(NOT_THERE)[0], 8 * MIB) is None
