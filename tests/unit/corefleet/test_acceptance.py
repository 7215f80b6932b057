"""Acceptance of a task: rule 4 of docs/architecture.md, idempotency that outlives the record."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corefleet.adapters.memory_log import Fault
from corefleet.codec import decode
from corefleet.errors import Conflict, Fenced, StoreFull, Unavailable
from corefleet.journal import submit
from corefleet.messages.records import TaskRecord
from tests.unit.corefleet.task_world import (
    LAYOUT,
    LOST,
    TASK,
    Run,
    World,
    head_of,
    request_record,
    result_of,
    task_record,
)

OTHER = "2-01j5x0c9k2m4n6p8q0r2s4t6v9"
REQUEST = LAYOUT.request(2, "r1")


@pytest.fixture
def world() -> World:
    return World()


def submission(world: World, task: str = TASK, digest: bytes = b"same") -> Run[tuple[str, bool]]:
    record = task_record(0, task=task)
    request = request_record(task, digest)
    return Run(submit(world.log, LAYOUT, request, record, world.patience))


def created(world: World) -> list[TaskRecord]:
    """All records of either task that are stored."""
    return [
        decode(stored.payload, TaskRecord)
        for task in (TASK, OTHER)
        for stored in world.stream.of(LAYOUT.task(2, task))
    ]


def test_rule_4_a_submission_makes_one_record(world: World) -> None:
    assert submission(world).finish() == (TASK, False)
    assert created(world) == [task_record(0)]
    assert [entry.subject for entry in world.faults.appends] == [REQUEST, LAYOUT.task(2, TASK)]


def test_rule_4_the_second_submission_finds_the_first_ones_task(world: World) -> None:
    submission(world).finish()
    assert submission(world, OTHER).finish() == (TASK, True)
    assert created(world) == [task_record(0)]


def test_rule_4_the_same_request_id_for_something_else_is_a_conflict(world: World) -> None:
    submission(world).finish()
    with pytest.raises(Conflict, match=f"r1: used for another submission .task {TASK}"):
        submission(world, OTHER, b"another").finish()


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("fault", LOST)
def test_rule_4_an_unclear_answer_is_found_out(world: World, fault: Fault, which: int) -> None:
    world.faults.next = [*([None] * which), fault]
    assert submission(world).finish() == (TASK, False)
    world.log.release_late()
    assert created(world) == [task_record(0)]


def test_rule_4_whoever_repeats_a_dead_submission_completes_it() -> None:
    """Wherever it was killed."""
    tasks = set()
    for turns in range(100):
        world = World()
        first = submission(world)
        for _ in range(turns):
            first.step()
        if first.done:
            break
        first.kill()
        task, duplicate = submission(world, OTHER).finish()
        [record] = created(world)
        assert record.task == task
        assert duplicate == (task == TASK)
        tasks.add(task)
    assert tasks == {TASK, OTHER}


def frozen_before_the_record(world: World) -> Run[tuple[str, bool]]:
    first = submission(world)
    while world.stream.last(REQUEST) is None:
        first.step()
    return first


def test_rule_4_a_frozen_submission_that_wakes_up_later_changes_nothing(world: World) -> None:
    """Not even when the task was completed by another one, ran, ended and expired."""
    frozen = frozen_before_the_record(world)
    assert submission(world, OTHER).finish() == (TASK, True)
    found = world.record()
    assert found is not None
    record = task_record(1)
    journal = world.journal(record, world.placed(record))
    Run(journal.finish(result_of(record), head_of(record))).finish()
    world.clock.advance(60)
    assert created(world) == []
    assert frozen.finish() == (TASK, False)
    assert created(world) == []


def test_rule_4_a_late_record_is_refused_once_somebody_took_the_submission_over(
    world: World,
) -> None:
    world.faults.next = [None, "late"]
    first = submission(world)
    while len(world.faults.appends) < 2:
        first.step()
    first.kill()
    submission(world, OTHER).finish()
    placed = world.placed(task_record(1))
    world.log.release_late()
    assert world.record() == (task_record(1), placed)


def test_rule_4_a_request_id_never_outlives_the_result(world: World) -> None:
    """Else one that is there without record and result could mean a task that ended."""
    submission(world).finish()
    record = task_record(1)
    journal = world.journal(record, world.placed(record))
    Run(journal.finish(result_of(record), head_of(record))).finish()
    for _ in range(record.result_ttl_s + 10):
        world.clock.advance(1)
        if world.stream.last(REQUEST) is not None:
            assert world.results() != []
            assert submission(world, OTHER).finish() == (TASK, True)


@pytest.mark.parametrize("which", [0, 1])
def test_full_stream_refuses_at_once(world: World, which: int) -> None:
    world.faults.next = [*([None] * which), "full"]
    with pytest.raises(StoreFull):
        submission(world).finish()
    assert created(world) == []
    # Repeated when there is room it is accepted.
    assert submission(world).finish() == (TASK, False)


def test_patience_ends_when_nothing_answers(world: World) -> None:
    world.server.reachable(False)
    with pytest.raises(Unavailable):
        submission(world).finish()


@given(
    faults=st.lists(st.one_of(st.none(), st.none(), st.sampled_from(LOST)), max_size=12),
    turns=st.lists(st.integers(0, 3), max_size=120),
)
def test_submissions_at_once_make_one_task(faults: list[Fault | None], turns: list[int]) -> None:
    """Two clients' tries, one of which may be frozen while the task runs and ends."""
    world = World()
    world.faults.next = faults
    runs = [submission(world, TASK), submission(world, OTHER)]
    ended: list[str] = []
    for turn in turns:
        if turn == 3:
            world.clock.advance(6)
            end_what_lives(world, ended)
        elif turn == 2:
            world.log.release_late()
        else:
            runs[turn].step()
    answers = {run.finish()[0] for run in runs}
    world.log.release_late()
    end_what_lives(world, ended)
    assert len(answers) == 1
    assert ended == list(answers)


def end_what_lives(world: World, ended: list[str]) -> None:
    """Place and end every queued task, as if its attempt took no time."""
    for record in created(world):
        if record.state != "queued":
            continue
        subject = LAYOUT.task(2, record.task)
        stored = world.stream.last(subject)
        assert stored is not None
        ended.append(record.task)
        placed = task_record(1, task=record.task)
        journal = world.journal(placed, world.put(subject, placed))
        faults, world.faults.next = world.faults.next, []
        Run(journal.finish(result_of(placed))).finish()
        world.faults.next = faults


def test_fenced_is_not_what_a_submitter_sees(world: World) -> None:
    """Losing a race to another try of the same submission is an answer, not an error."""
    runs = [submission(world), submission(world, OTHER)]
    for _ in range(200):
        for run in runs:
            run.step()
    assert all(not isinstance(run.error, Fenced) for run in runs)
    assert {run.finish()[0] for run in runs} == {created(world)[0].task}
