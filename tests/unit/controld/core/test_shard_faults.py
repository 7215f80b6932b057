"""The shard's core under random faults, against a simulated stream and nodes."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from controld.core.shard_state import ShardState
from corefleet.messages.wire import Assignment
from tests.unit.controld.core import rebuilding
from tests.unit.controld.core.stream_sim import Sim

PICK = st.integers(0, 30)
FAULTS = ("", "", "", "", "lost", "unavailable", "refuse")


class ShardUnderFaults(RuleBasedStateMachine):
    """No task is lost, one attempt lives, sessions keep order, everything ends.

    And at every step the live core is the one that its records would make: queue, states,
    order within sessions and counts in flight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sim = Sim()

    @rule(pool=st.sampled_from(["chat", "crunch"]), session=st.sampled_from("ab"))
    def submit(self, pool: str, session: str) -> None:
        self.sim.submit(pool, session)

    @rule(count=st.integers(1, 6))
    def follow(self, count: int) -> None:
        self.sim.follow(count)

    @rule(index=PICK, fault=st.sampled_from(FAULTS))
    def carry_out(self, index: int, fault: str) -> None:
        self.sim.carry_out(index, fault)

    @rule(index=PICK, well=st.booleans())
    def finish(self, index: int, well: bool) -> None:
        self.sim.finish(index, well)

    @rule(index=PICK, heard=st.booleans(), reason=st.sampled_from(["boom", "node draining"]))
    def give_back(self, index: int, heard: bool, reason: str) -> None:
        self.sim.give_back(index, reason, heard)

    @rule(index=PICK)
    def lose(self, index: int) -> None:
        self.sim.lose(index)

    @rule(index=PICK)
    def restart(self, index: int) -> None:
        self.sim.restart(index)

    @rule(index=PICK)
    def cancel(self, index: int) -> None:
        self.sim.cancel(index)

    @rule(seconds=st.sampled_from([0.05, 0.3, 2.5, 11.0]))
    def tick(self, seconds: float) -> None:
        self.sim.tick(seconds)

    @rule()
    def take_over(self) -> None:
        self.sim.take_over()

    @invariant()
    def holds(self) -> None:
        assert self.sim.found_problems() == []
        assert rebuilding.over_limits(self.sim) == []

    @rule(index=PICK, deadline_s=st.sampled_from([0.0, 3.0]))
    def drain(self, index: int, deadline_s: float) -> None:
        self.sim.drain(index, deadline_s)

    @invariant()
    def the_live_core_is_the_one_rebuilt_from_its_records(self) -> None:
        assert rebuilding.from_what_is_known(self.sim) == []
        if self.sim.quiet:
            assert rebuilding.from_the_stream(self.sim) == []

    def teardown(self) -> None:
        self.sim.settle()
        assert self.sim.judge() == []


ShardUnderFaults.TestCase.settings = settings(
    max_examples=50,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow],
)
TestTheLiveCoreIsTheOneRebuiltFromItsRecordsAtEveryStep = ShardUnderFaults.TestCase


def random_step(sim: Sim, rng: Random) -> None:
    """Let one thing happen, mostly something ordinary."""
    kind = rng.random()
    pick = rng.randrange(1000)
    if kind < 0.14:
        deadline = rng.choice([0.0, 0.0, 0.0, 3.0])
        sim.submit(rng.choice(["chat", "crunch"]), rng.choice("abcd"), deadline)
    elif kind < 0.36:
        sim.follow(rng.randrange(1, 6))
    elif kind < 0.66:
        sim.carry_out(pick, rng.choice(FAULTS))
    elif kind < 0.80:
        sim.finish(pick, rng.random() < 0.8)
    elif kind < 0.84:
        sim.give_back(pick, rng.choice(["boom", "node stopping"]), rng.random() < 0.7)
    elif kind < 0.86:
        sim.lose(pick)
    elif kind < 0.88:
        sim.restart(pick)
    elif kind < 0.90:
        sim.cancel(pick)
    elif kind < 0.91:
        sim.take_over()
    elif kind < 0.92:
        sim.drain(pick, rng.choice([0.0, 3.0]))
    else:
        sim.tick(rng.choice([0.05, 0.05, 0.3, 2.5]))


@pytest.mark.parametrize("first_seed", range(0, 100, 20))
def test_twenty_seeds_of_faults_lose_nothing_and_keep_order(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 20):
        rng = Random(seed)
        sim = Sim(nodes=rng.choice([2, 3, 5]), seed=seed)
        for step in range(250):
            random_step(sim, rng)
            assert sim.found_problems() == [], f"seed {seed}, step {step}"
            assert rebuilding.over_limits(sim) == [], f"seed {seed}, step {step}"
            if sim.quiet:
                assert rebuilding.from_the_stream(sim) == [], f"seed {seed}, step {step}"
        sim.settle()
        assert sim.judge() == [], f"seed {seed}"


def test_the_comparison_with_a_rebuilt_core_sees_a_count_and_an_order_that_are_wrong() -> None:
    sim = Sim()
    for _ in range(2):
        sim.submit("chat", "a")
    sim.follow(3)
    assert rebuilding.from_what_is_known(sim) == []
    sim.limits.took(0, "chat", "")
    assert rebuilding.from_what_is_known(sim)[0].startswith("in flight: live")
    sim.core._state.queue.sessions["chat", "a"].order.reverse()
    assert rebuilding.from_what_is_known(sim)[0].startswith("session order: live")


def crowded_step(sim: Sim, rng: Random) -> None:
    """Two sessions with all that happens, owners that come and go the most."""
    kind = rng.random()
    pick = rng.randrange(1000)
    if kind < 0.15:
        sim.submit("chat", rng.choice("ab"), rng.choice([0.0, 0.0, 0.0, 3.0]))
    elif kind < 0.45:
        sim.follow(rng.randrange(1, 4))
    elif kind < 0.65:
        sim.carry_out(pick, rng.choice((*FAULTS, "copied")))
    elif kind < 0.75:
        sim.finish(pick, rng.random() < 0.8)
    elif kind < 0.80:
        sim.give_back(pick, rng.choice(["boom", "node stopping"]), rng.random() < 0.7)
    elif kind < 0.85:
        sim.lose(pick) if rng.random() < 0.4 else sim.restart(pick)
    elif kind < 0.87:
        sim.cancel(pick)
    elif kind < 0.90:
        sim.take_over()
    else:
        sim.tick(rng.choice([0.05, 0.05, 0.3, 2.5]))


@pytest.mark.parametrize("first_seed", [100, 0])
def test_rule_7_late_writes_of_older_owners_never_let_two_tasks_of_a_session_overlap(
    first_seed: int,
) -> None:
    """Nothing but the record's revision fences an owner that does not know of its end.

    What such a write replaced before we were shown it precedes our own first write, so
    the stream shows it before that one, and before that one nothing is offered.
    """
    for seed in range(first_seed, first_seed + 100):
        rng = Random(seed)
        sim = Sim(nodes=3, seed=seed, mark_fences=False)
        for step in range(200):
            crowded_step(sim, rng)
            assert sim.found_problems() == [], f"seed {seed}, step {step}"
        sim.settle()
        assert sim.judge() == [], f"seed {seed}"


def test_rule_7_without_the_wait_for_the_first_write_the_judge_sees_sessions_overlap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def trusting(self: ShardState, *arguments: Any) -> None:
        begin(self, *arguments)
        self.doubt = None

    begin = ShardState.__init__
    monkeypatch.setattr(ShardState, "__init__", trusting)
    found: list[str] = []
    for seed in range(60):
        rng = Random(seed)
        sim = Sim(nodes=3, seed=seed, mark_fences=False)
        for _ in range(200):
            crowded_step(sim, rng)
        found += sim.problems
    assert any("started before" in problem for problem in found)


def test_the_judge_sees_a_task_that_passes_its_session_by() -> None:
    sim = Sim()
    sim.submit("chat", "a")
    sim.submit("chat", "a")
    sim.follow(3)
    later, revision = sim.records["t001"]
    sim.check_start(Assignment(record=later, revision=revision, create_seq=revision))
    assert sim.found_problems() == ["t001 started before t000 ended"]


def test_the_judge_sees_a_task_that_never_ends() -> None:
    sim = Sim()
    sim.submit("chat", "a")
    sim.settle(rounds=0)
    assert sim.judge()[0].startswith("not ended: ['t000']")
