"""What is shed for want of CPU, and when it comes back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controld.core.overload import (
    BAND,
    FLOOR_PER_S,
    PATIENCE,
    SAMPLE_S,
    Overload,
    OverloadLimits,
    Shed,
)

LIMIT = OverloadLimits().cpu


class Machine:
    """A controld whose CPU use is what it lets in times the cost of each, and a base."""

    def __init__(self, cost: float, base: float = 0.1) -> None:
        self.core = Overload()
        self.cost = cost
        self.base = base
        self.now = 0.0
        self.cpu = 0.0

    def run(self, seconds: float, online_per_s: float, batch_per_s: float = 0.0) -> float:
        """Offer so much; return the online submissions a second that were let in."""
        let_in = 0
        steps = round(seconds / SAMPLE_S)
        for _ in range(steps):
            online = self._offer(False, online_per_s)
            batch = self._offer(True, batch_per_s)
            self.now += SAMPLE_S
            self.cpu = min(1.0, self.base + self.cost * (online + batch) / SAMPLE_S)
            self.core.sample(self.cpu, 0.0, self.now)
            let_in += online
        return let_in / (steps * SAMPLE_S)

    def _offer(self, batch: bool, rate: float) -> int:
        n = round(rate * SAMPLE_S)
        at = [self.now + SAMPLE_S * number / max(1, n) for number in range(n)]
        return sum(self.core.admit(batch, when) is None for when in at)


def hot(core: Overload, samples: int, start: int = 0, cpu: float = 0.93) -> None:
    for at in range(start, start + samples):
        core.sample(cpu, 0.0, at * SAMPLE_S)


def test_one_spike_sheds_nothing() -> None:
    core = Overload()
    for at in range(40):
        core.sample(1.0 if at % PATIENCE else 0.5, 0.0, at * SAMPLE_S)
    assert core.state() == "free"


def test_batch_is_shed_wholly_before_online_is_lowered() -> None:
    core = Overload()
    hot(core, PATIENCE)
    assert core.state() == "batch shed"
    assert core.admit(True, 10.0) == Shed("controld is at 93% CPU: batch is shed", 2.0)
    assert core.admit(False, 10.0) is None
    hot(core, 1, PATIENCE)
    assert core.state() == "online lowered"


def test_a_late_event_loop_counts_like_a_busy_cpu() -> None:
    core = Overload()
    for at in range(PATIENCE):
        core.sample(0.5, 0.8, at * SAMPLE_S)
    shed = core.admit(True, 2.0)
    assert shed is not None
    assert shed.reason == "controld is at 0.8 s of delay: batch is shed"


def test_a_refusal_of_online_says_the_limit_and_when_to_come_again() -> None:
    core = Overload()
    hot(core, PATIENCE + 1)
    found = [core.admit(False, 2.0) for _ in range(20)]
    assert found[0] is None
    last = found[-1]
    assert last is not None
    assert last.reason == f"controld is at 93% CPU: it takes {FLOOR_PER_S:.0f} submissions a second"
    assert 0.0 < last.retry_after_s <= 1 / FLOOR_PER_S


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 3.0)), max_size=80))
def test_whatever_is_measured_online_is_never_held_below_the_floor(
    samples: list[tuple[float, float]],
) -> None:
    core = Overload()
    for at, (cpu, lag_s) in enumerate(samples):
        core.sample(cpu, lag_s, at * SAMPLE_S)
        assert core.online_per_s is None or core.online_per_s >= FLOOR_PER_S
        assert core.online_per_s is None or core.batch_share == 0.0
        assert 0.0 <= core.batch_share <= 1.0
    for at in range(len(samples), len(samples) + 60):
        core.sample(0.2, 0.0, at * SAMPLE_S)
    assert core.state() == "free"


@settings(max_examples=15, deadline=None)
@given(st.integers(200, 600), st.floats(1.1, 3.0))
def test_at_any_overload_online_settles_below_the_limit_and_near_it(
    capacity: int, over: float
) -> None:
    machine = Machine(cost=(LIMIT - 0.1) / capacity)
    machine.run(30.0, capacity * over)
    uses = []
    for _ in range(40):
        machine.run(SAMPLE_S, capacity * over)
        uses.append(machine.cpu)
    assert max(uses) <= LIMIT + 0.06
    assert min(uses) >= LIMIT - BAND - 0.1
    assert max(uses) - min(uses) <= 0.15


@settings(max_examples=10, deadline=None)
@given(st.integers(200, 600))
def test_batch_gives_way_and_online_keeps_all(capacity: int) -> None:
    machine = Machine(cost=(LIMIT - 0.1) / capacity)
    machine.run(5.0, 0.6 * capacity, capacity)
    assert machine.run(20.0, 0.6 * capacity, capacity) >= 0.99 * 0.6 * capacity


def test_all_is_as_before_when_the_load_has_gone() -> None:
    machine = Machine(cost=0.75 / 1000)
    machine.run(20.0, 3000)
    assert machine.core.state() == "online lowered"
    machine.run(20.0, 100, 10)
    assert machine.core.state() == "free"
    assert machine.core.batch_share == pytest.approx(1.0)
