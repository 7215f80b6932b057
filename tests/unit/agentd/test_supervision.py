"""Which processes run: as many as wanted, replaced when dead, slower when they keep dying."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd.core.supervision import (
    BACKOFF_LIMIT_S,
    CRASH_LOOP,
    START_TIMEOUT_S,
    Action,
    CrashLoop,
    KillInstance,
    Start,
    StopInstance,
    Supervision,
    UnitKey,
)
from corefleet.errors import IllegalTransition

WORKER = UnitKey("worker", "pool", 0)
ENGINE = UnitKey("engine", "model", 0)


class Middle:
    """The same number always."""

    def random(self) -> float:
        return 0.5


def started(actions: list[Action]) -> list[str]:
    return [action.instance for action in actions if isinstance(action, Start)]


def test_as_many_run_as_are_wanted() -> None:
    core = Supervision(Middle())
    names = started(core.want({WORKER: (3, "v1")}, 0.0))
    assert len(names) == len(set(names)) == 3
    assert core.want({WORKER: (3, "v1")}, 0.0) == []
    assert not core.settled()
    for name in names:
        core.ready(name, 0.1)
    assert core.settled()


def test_fewer_wanted_stops_the_youngest_and_none_stops_all() -> None:
    core = Supervision(Middle())
    first, second = started(core.want({WORKER: (2, "v1")}, 0.0))
    (stop,) = core.want({WORKER: (1, "v1")}, 0.0)
    assert isinstance(stop, StopInstance)
    assert stop.instance == second
    (stop,) = core.want({}, 0.0)
    assert isinstance(stop, StopInstance)
    assert stop.instance == first
    assert core.ended(first, "exit code 0", 1.0) == []
    assert core.ended(second, "exit code 0", 1.0) == []
    assert core.running() == ()


def test_another_version_replaces_workers_side_by_side() -> None:
    core = Supervision(Middle())
    (old,) = started(core.want({WORKER: (1, "v1")}, 0.0))
    actions = core.want({WORKER: (1, "v2")}, 0.0)
    assert [type(action) for action in actions] == [StopInstance, Start]
    assert core.ended(old, "exit code 0", 1.0) == []
    assert len(core.running()) == 1


def test_another_version_of_an_engine_waits_for_the_old_ones_end() -> None:
    core = Supervision(Middle())
    (old,) = started(core.want({ENGINE: (1, "v1")}, 0.0))
    assert started(core.want({ENGINE: (1, "v2")}, 0.0)) == []
    assert len(started(core.ended(old, "exit code 0", 1.0))) == 1


def test_a_dead_one_is_replaced_at_once() -> None:
    core = Supervision(Middle())
    (name,) = started(core.want({WORKER: (1, "v1")}, 0.0))
    core.ready(name, 0.5)
    (again,) = started(core.ended(name, "killed by SIGKILL", 5.0))
    assert again != name
    assert core.ended(name, "killed by SIGKILL", 5.0) == []


def test_who_keeps_dying_waits_longer_each_time_and_is_reported_once() -> None:
    core = Supervision(Middle())
    names = started(core.want({WORKER: (1, "v1")}, 0.0))
    now = 0.0
    pauses = []
    reports: list[CrashLoop] = []
    for _ in range(14):
        actions = core.ended(names[0], "exit code 1", now)
        reports += [action for action in actions if isinstance(action, CrashLoop)]
        due = core.next_start()
        pauses.append(round(max(0.0, (due or now) - now), 6))
        now = max(now, due or now)
        names = started(actions) or started(core.tick(now))
        assert len(names) == 1
    assert pauses[0] == 0.0
    assert all(later >= earlier for earlier, later in pairwise(pauses))
    assert pauses[-1] == pytest.approx(BACKOFF_LIMIT_S * 0.75)
    (report,) = reports
    assert (report.unit, report.failures, report.reason) == (WORKER, CRASH_LOOP, "exit code 1")
    assert core.settled()
    assert core.troubled(WORKER)
    assert "exit code 1" in core.troubles()[0]


def test_kills_now_and_then_cost_no_pause() -> None:
    core = Supervision(Middle())
    names = started(core.want({WORKER: (2, "v1")}, 0.0))
    now = 0.0
    for _ in range(20):
        for name in names:
            core.ready(name, now)
        now += 1.5
        names = [*names[1:], *started(core.ended(names[0], "killed by SIGKILL", now))]
        assert len(names) == 2


def test_a_model_that_cannot_be_used_is_reported_at_once_and_tried_rarely() -> None:
    core = Supervision(Middle())
    (name,) = started(core.want({ENGINE: (1, "v1")}, 0.0))
    (report,) = core.ended(name, "exit code 3", 0.0, hopeless=True)
    assert isinstance(report, CrashLoop)
    assert report.again_in_s == pytest.approx(BACKOFF_LIMIT_S * 0.75)
    assert core.troubled(ENGINE)


def test_what_does_not_become_ready_is_killed() -> None:
    core = Supervision(Middle())
    (name,) = started(core.want({WORKER: (1, "v1")}, 0.0))
    assert core.tick(START_TIMEOUT_S["worker"] - 1) == []
    (kill,) = core.tick(START_TIMEOUT_S["worker"] + 1)
    assert isinstance(kill, KillInstance)
    assert kill.instance == name


def test_a_stuck_one_is_killed_and_an_unknown_one_is_no_matter() -> None:
    core = Supervision(Middle())
    (name,) = started(core.want({WORKER: (1, "v1")}, 0.0))
    (kill,) = core.stuck(name, "silent")
    assert isinstance(kill, KillInstance)
    assert core.stuck("nobody", "silent") == []
    core.ready("nobody", 0.0)


def test_an_illegal_move_raises_with_its_story() -> None:
    core = Supervision(Middle())
    (name,) = started(core.want({WORKER: (1, "v1")}, 0.0))
    core.want({}, 0.0)
    core.ready(name, 0.0)
    assert core.phase_of(name) == "stopping"
    with pytest.raises(IllegalTransition, match="started at"):
        core._move(core._leaving[name], "ready")


wants = st.dictionaries(
    st.sampled_from([WORKER, ENGINE, UnitKey("worker", "other", 1)]),
    st.tuples(st.integers(1, 4), st.sampled_from(["v1", "v2"])),
)


@given(st.lists(st.one_of(wants, st.integers(0, 9), st.floats(0.0, 40.0)), max_size=40))
def test_never_more_and_in_the_end_as_many_as_wanted(
    moves: list[dict[UnitKey, tuple[int, str]] | int | float],
) -> None:
    core = Supervision(random.Random(0))
    now = 0.0
    wanted: dict[UnitKey, tuple[int, str]] = {}
    for move in moves:
        if isinstance(move, dict):
            wanted = move
            core.want(wanted, now)
        elif isinstance(move, int) and core.running():
            names = core.running()
            core.ended(names[move % len(names)], "killed", now)
        elif isinstance(move, float):
            now += move
            core.tick(now)
    for name in core.running():
        if core.phase_of(name) == "stopping":
            core.ended(name, "exit code 0", now)
    core.tick(now + BACKOFF_LIMIT_S)
    running = [core.unit_of(name) for name in core.running()]
    assert {key: running.count(key) for key in wanted} == {k: n for k, (n, _) in wanted.items()}
    assert len(running) == sum(n for n, _ in wanted.values())


def test_adopted_processes_count_as_running() -> None:
    core = Supervision(Middle())
    core.adopt("old-1", WORKER, "v1", 0.0)
    core.adopt("old-2", WORKER, "v1", 0.0)
    assert started(core.want({WORKER: (3, "v1")}, 0.0)) == ["pool-d0-1-800000"]
    core.ready("old-1", 0.1)
    core.ready("old-2", 0.1)
    assert not core.settled()
    core.ready("pool-d0-1-800000", 0.1)
    assert core.settled()
    assert core.unit_of("old-1") == WORKER


def test_adopted_processes_that_nobody_wants_are_stopped() -> None:
    core = Supervision(Middle())
    core.adopt("old-1", WORKER, "v1", 0.0)
    core.adopt("old-2", WORKER, "v0", 0.0)
    core.adopt("engine-1", ENGINE, "v1", 0.0)
    actions = core.want({WORKER: (1, "v1")}, 0.0)
    stopped = {action.instance for action in actions if isinstance(action, StopInstance)}
    assert stopped == {"old-2", "engine-1"}
    assert started(actions) == []
    assert core.want({WORKER: (1, "v1")}, 0.0) == []
    assert core.ended("old-2", "exit code 0", 0.2) == []


def test_an_adopted_process_that_never_answers_is_killed_and_replaced() -> None:
    core = Supervision(Middle())
    core.adopt("old-1", WORKER, "v1", 0.0)
    core.want({WORKER: (1, "v1")}, 0.0)
    (kill,) = core.tick(START_TIMEOUT_S["worker"] + 1.0)
    assert isinstance(kill, KillInstance)
    assert started(core.ended("old-1", "ended unseen", 61.5)) == ["pool-d0-1-800000"]


def test_a_drained_worker_is_stopped_and_another_started_beside_it() -> None:
    core = Supervision(Middle())
    (name,) = started(core.want({WORKER: (1, "v1")}, 0.0))
    core.ready(name, 0.1)
    stop, start = core.drain(name, "not bound", 1.0)
    assert stop == StopInstance(name, WORKER, "not bound")
    assert isinstance(start, Start)
    assert core.drain(name, "not bound", 1.1) == []
    assert core.ended(name, "exit code 0", 2.0) == []
    assert core.running() == (start.instance,)


def test_a_drained_engine_is_replaced_once_it_has_gone() -> None:
    core = Supervision(Middle())
    (name,) = started(core.want({ENGINE: (1, "v1")}, 0.0))
    assert len(core.drain(name, "not bound", 1.0)) == 1
    assert len(started(core.ended(name, "exit code 0", 2.0))) == 1
