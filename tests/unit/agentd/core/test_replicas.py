"""Which models lie in a domain's memory: budget, use, back-off, and that everybody is answered."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd.core.replicas import (
    BACKOFF_FIRST_S,
    FAILURES_LIMIT,
    HOLD_S,
    MIB,
    RETRY_AFTER_S,
    ROOM_PATIENCE_S,
    Replicas,
)
from agentd.core.replicas_io import (
    Action,
    Direct,
    DomainLost,
    EngineEnded,
    EngineStarted,
    Event,
    Evicted,
    Fill,
    Filled,
    FillFailed,
    Found,
    Mount,
    Mounted,
    MountFailed,
    Ready,
    Refused,
    Remove,
    Unwanted,
    Wanted,
)
from corefleet.errors import IllegalTransition

BUDGET = 100 * MIB


def with_mount(**options: object) -> Replicas:
    core = Replicas({0: BUDGET}, must=bool(options.get("must")))
    assert core.handle(Wanted(0, "first", MIB), 0.0) == [Mount(0, BUDGET)]
    assert core.handle(Mounted(0, BUDGET), 0.0) == [Fill(0, "first")]
    assert core.handle(Filled(0, "first"), 0.0) == [Ready(0, "first")]
    core.handle(Unwanted(0, "first"), 0.0)
    return core


def fill(core: Replicas, model: str, size: int, now: float) -> None:
    assert Fill(0, model) in core.handle(Wanted(0, model, size), now)
    assert core.handle(Filled(0, model), now) == [Ready(0, model)]
    core.handle(Unwanted(0, model), now)


def state(core: Replicas, model: str) -> str:
    return next(one.state for one in core.states() if one.model == model)


def test_the_first_model_of_a_domain_is_mounted_filled_and_answered() -> None:
    core = with_mount()
    assert core.handle(Wanted(0, "first", MIB), 5.0) == [Ready(0, "first")]


def test_two_who_want_the_same_share_one_fill() -> None:
    core = with_mount()
    assert core.handle(Wanted(0, "a", MIB), 1.0) == [Fill(0, "a")]
    assert core.handle(Wanted(0, "a", MIB), 1.0) == []
    assert core.handle(Filled(0, "a"), 2.0) == [Ready(0, "a")]


def test_the_least_recently_used_model_gives_way() -> None:
    core = with_mount()
    fill(core, "old", 40 * MIB, 1.0)
    fill(core, "new", 40 * MIB, 2.0)
    core.handle(EngineStarted(0, "old"), 3.0)
    core.handle(EngineEnded(0, "old"), 4.0)
    core.handle(EngineStarted(0, "first"), 4.0)
    assert core.handle(Wanted(0, "next", 50 * MIB), 10.0) == [Remove(0, "new")]
    assert core.handle(Evicted(0, "new"), 10.0) == [Fill(0, "next")]


def test_a_model_with_an_engine_stays_and_who_has_no_room_maps_the_source() -> None:
    core = with_mount()
    fill(core, "busy", 90 * MIB, 1.0)
    core.handle(EngineStarted(0, "busy"), 1.0)
    assert core.handle(Wanted(0, "next", 50 * MIB), 10.0) == []
    assert core.tick(10.0 + ROOM_PATIENCE_S - 1) == []
    (answer,) = core.tick(10.0 + ROOM_PATIENCE_S)
    assert isinstance(answer, Direct)
    assert "no room" in answer.why
    assert state(core, "busy") == "ready"


def test_nothing_is_removed_where_that_would_not_make_enough_room() -> None:
    core = with_mount()
    fill(core, "busy", 80 * MIB, 1.0)
    core.handle(EngineStarted(0, "busy"), 1.0)
    assert core.handle(Wanted(0, "next", 50 * MIB), 100.0) == []
    assert state(core, "first") == "ready"


def test_a_model_that_is_wanted_again_while_it_goes_is_filled_anew() -> None:
    core = with_mount()
    fill(core, "old", 60 * MIB, 1.0)
    assert core.handle(Wanted(0, "next", 30 * MIB), 100.0) == [Fill(0, "next")]
    assert core.handle(Wanted(0, "more", 30 * MIB), 100.0) == [Remove(0, "first"), Remove(0, "old")]
    assert core.handle(Wanted(0, "first", MIB), 100.0) == []
    assert core.handle(Evicted(0, "first"), 100.0) == []
    assert core.handle(Evicted(0, "old"), 100.0) == [Fill(0, "more"), Fill(0, "first")]


def test_room_that_an_engine_leaves_is_taken_at_once() -> None:
    core = with_mount()
    fill(core, "busy", 80 * MIB, 1.0)
    core.handle(EngineStarted(0, "busy"), 1.0)
    core.handle(Wanted(0, "next", 50 * MIB), 10.0)
    assert core.handle(EngineEnded(0, "busy"), 12.0) == [Remove(0, "first"), Remove(0, "busy")]


def test_an_answered_model_stays_while_its_engine_is_being_started() -> None:
    core = with_mount()
    core.handle(Wanted(0, "a", 80 * MIB), 1.0)
    core.handle(Filled(0, "a"), 1.0)
    assert core.handle(Wanted(0, "next", 50 * MIB), 1.0 + HOLD_S - 1) == []
    assert core.next_due(1.0 + HOLD_S - 1) == 1.0 + HOLD_S
    assert Remove(0, "a") in core.tick(1.0 + HOLD_S)


def test_a_model_larger_than_the_budget_is_never_mounted_for() -> None:
    core = Replicas({0: BUDGET})
    (answer,) = core.handle(Wanted(0, "huge", BUDGET + 1), 0.0)
    assert isinstance(answer, Direct)
    assert "100 MiB" in answer.why


def test_a_failed_fill_is_tried_again_later_each_time_and_then_the_source_is_mapped() -> None:
    core = with_mount()
    now, pause = 1.0, BACKOFF_FIRST_S
    assert core.handle(Wanted(0, "a", MIB), now) == [Fill(0, "a")]
    for _ in range(FAILURES_LIMIT - 1):
        assert core.handle(FillFailed(0, "a", "misplaced"), now) == []
        assert core.tick(now + pause - 0.01) == []
        now += pause
        pause *= 2
        assert core.tick(now) == [Fill(0, "a")]
    assert core.handle(FillFailed(0, "a", "misplaced"), now) == [Direct(0, "a", "misplaced")]
    assert core.handle(Wanted(0, "a", MIB), now + 1) == [Direct(0, "a", "misplaced")]
    assert core.handle(Wanted(0, "a", MIB), now + RETRY_AFTER_S) == [Fill(0, "a")]


def test_where_replicas_are_required_an_engine_without_one_is_refused() -> None:
    core = with_mount(must=True)
    core.handle(Wanted(0, "a", MIB), 1.0)
    for _ in range(FAILURES_LIMIT - 1):
        core.handle(FillFailed(0, "a", "misplaced"), 1.0)
        core.tick(100.0)
    assert core.handle(FillFailed(0, "a", "bad"), 100.0) == [Refused(0, "a", "bad")]


def test_a_source_that_is_not_the_model_is_never_mapped() -> None:
    core = with_mount()
    core.handle(Wanted(0, "a", MIB), 1.0)
    failed = FillFailed(0, "a", "another sha256", "corrupt")
    assert core.handle(failed, 1.0) == [Refused(0, "a", "another sha256")]


def test_where_nothing_can_be_mounted_the_source_is_mapped_for_this_reason() -> None:
    core = Replicas({0: BUDGET}, why_not="no root")
    assert core.handle(Wanted(0, "a", MIB), 0.0) == [Direct(0, "a", "no root")]
    assert core.handle(Wanted(1, "a", MIB), 1e9) == [Direct(1, "a", "no root")]


def test_a_mount_that_fails_answers_all_who_wait_for_it() -> None:
    core = Replicas({0: BUDGET})
    core.handle(Wanted(0, "a", MIB), 0.0)
    assert core.handle(Wanted(0, "b", MIB), 0.0) == []
    assert core.handle(MountFailed(0, "refused"), 0.0) == [
        Direct(0, "a", "refused"),
        Direct(0, "b", "refused"),
    ]
    assert core.handle(Wanted(0, "c", MIB), 1.0) == [Direct(0, "c", "refused")]


def test_a_mount_that_went_away_is_made_again_before_the_next_fill() -> None:
    core = with_mount()
    assert core.handle(DomainLost(0), 1.0) == []
    assert core.handle(Wanted(0, "first", MIB), 1.0) == [Mount(0, BUDGET)]
    core.handle(Mounted(0, BUDGET), 1.0)
    assert core.handle(FillFailed(0, "first", "gone", "unmounted"), 1.0) == []
    assert core.tick(2.0) == [Mount(0, BUDGET)]


def test_a_replica_of_an_earlier_agentd_is_used_without_a_fill() -> None:
    core = Replicas({0: BUDGET})
    core.handle(Mounted(0, BUDGET), 0.0)
    core.handle(Found(0, "a", MIB), 0.0)
    assert core.handle(Wanted(0, "a", MIB), 1.0) == [Ready(0, "a")]


def test_what_nobody_waits_for_any_more_is_not_begun() -> None:
    core = Replicas({0: BUDGET})
    core.handle(Wanted(0, "a", MIB), 0.0)
    core.handle(Unwanted(0, "a"), 0.0)
    assert core.handle(Mounted(0, BUDGET), 0.0) == []
    assert state(core, "a") == "absent"


def test_a_move_that_makes_no_sense_is_an_error() -> None:
    with pytest.raises(IllegalTransition, match="replica of a in domain 0: no transition absent"):
        Replicas({0: BUDGET}).handle(Evicted(0, "a"), 0.0)


@dataclass
class World:
    """A shell that finishes what it began in any order, and checks what must always hold."""

    core: Replicas
    budget: int
    now: float = 0.0
    open: list[Action] = field(default_factory=list)
    asked: set[tuple[int, str]] = field(default_factory=set)
    engines: dict[tuple[int, str], int] = field(default_factory=dict)
    files: dict[tuple[int, str], int] = field(default_factory=dict)

    def feed(self, event: Event) -> None:
        self.do(self.core.handle(event, self.now))

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            place = (action.domain, getattr(action, "model", ""))
            match action:
                case Mount() | Fill() | Remove():
                    self.open.append(action)
                case Ready() | Direct() | Refused():
                    assert place in self.asked, "an answer that nobody waits for"
                    self.asked.discard(place)
            if isinstance(action, Remove):
                assert not self.engines.get(place), "a model in use is removed"
            if isinstance(action, Ready):
                assert place in self.files, "ready, but there is no file"
            if isinstance(action, Fill):
                self.files[place] = SIZES[action.model]
            held = sum(size for (domain, _), size in self.files.items() if domain == action.domain)
            assert held <= self.budget, "more than the budget"

    def finish(self, number: int, outcome: str) -> None:
        action = self.open.pop(number % len(self.open))
        match action:
            case Mount(domain=domain, size=size):
                lost = outcome == "fail"
                self.feed(MountFailed(domain, "no") if lost else Mounted(domain, size))
            case Fill(domain=domain, model=model):
                if outcome == "ok":
                    self.feed(Filled(domain, model))
                else:
                    del self.files[domain, model]
                    corrupt = outcome == "corrupt"
                    self.feed(FillFailed(domain, model, "", "corrupt" if corrupt else "passing"))
            case Remove(domain=domain, model=model):
                del self.files[domain, model]
                self.feed(Evicted(domain, model))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.core.tick(self.now))


SIZES = {"a": 10 * MIB, "b": 30 * MIB, "c": 50 * MIB, "d": 70 * MIB, "e": 120 * MIB}
MODELS = st.sampled_from(sorted(SIZES))
DOMAINS = st.sampled_from([0, 0, 0, 1])
OUTCOMES = st.sampled_from(["ok", "ok", "ok", "fail", "corrupt"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("serve"), DOMAINS, MODELS),
        st.tuples(st.just("serve"), DOMAINS, MODELS),
        st.tuples(st.just("want"), DOMAINS, MODELS),
        st.tuples(st.just("unwant"), DOMAINS, MODELS),
        st.tuples(st.just("end"), DOMAINS, MODELS),
        st.tuples(st.just("finish"), st.integers(0, 20), OUTCOMES),
        st.tuples(st.just("tick"), st.sampled_from([0, 1, 7, 40, 400]), st.just("")),
    ),
    max_size=60,
)


@given(STEPS, st.booleans())
def test_whatever_happens_the_budget_holds_and_everybody_is_answered(
    steps: list[tuple[str, int, str]], must: bool
) -> None:
    world = World(Replicas({0: BUDGET, 1: BUDGET}, must=must), BUDGET)
    for what, number, name in steps:
        place = (number, name)
        match what:
            case "want":
                world.asked.add(place)
                world.feed(Wanted(number, name, SIZES[name]))
            case "serve":
                # An engine is started and runs, as far as there is room for its model now.
                world.asked.add(place)
                world.feed(Wanted(number, name, SIZES[name]))
                while world.open:
                    world.finish(0, "ok")
                if place in world.files:
                    world.engines[place] = world.engines.get(place, 0) + 1
                    world.feed(EngineStarted(number, name))
            case "unwant":
                world.asked.discard(place)
                world.feed(Unwanted(number, name))
            case "end" if world.engines.get(place):
                world.engines[place] -= 1
                world.feed(EngineEnded(number, name))
            case "finish" if world.open:
                world.finish(number, name)
            case "tick":
                world.tick(number)
        assert world.core.used(0) <= BUDGET
        assert world.core.used(1) <= BUDGET
    for _ in range(100):
        if world.open:
            world.finish(0, "ok")
        elif (due := world.core.next_due(world.now)) is not None:
            world.tick(max(0.0, due - world.now))
    assert not world.asked
    assert not world.open
    settled = {"absent", "ready", "direct", "refused"}
    assert {one.state for one in world.core.states()} <= settled
    for place, count in world.engines.items():
        assert not count or place in world.files
