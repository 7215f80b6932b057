"""Acceptance of a task: rule 4 of docs/architecture.md, idempotency that outlives the record."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corefleet.adapters.memory_log import Fault
from corefleet.codec import decode
from corefleet.errors import AttemptDropped, Conflict, StoreFull, Unavailable
from corefleet.journal import submit
from corefleet.messages.records import JournalEntry, TaskRecord
from tests.unit.corefleet.task_world import (
    LAYOUT,
    LOST,
    TASK,
    Run,
    World,
    cancel,
    head_of,
    result_of,
    step,
    task_record,
)

RECORD = LAYOUT.task(2, TASK)
MINE = 1
OTHERS = 2
"""Times at which the record was made: they tell whose submission it was."""


@pytest.fixture
def world() -> World:
    return World()


def submission(
    world: World, at_ms: int = MINE, digest: bytes = b"same", **changes: Any
) -> Run[tuple[str, bool]]:
    record = task_record(0, created_ms=at_ms, digest=digest, **changes)
    return Run(submit(world.log, LAYOUT, record, world.patience))


def created(world: World) -> list[TaskRecord]:
    """All records that are stored."""
    return [decode(stored.payload, TaskRecord) for stored in world.stream.of(RECORD)]


def run_and_end(world: World) -> None:
    """Place the task and end it, as if its attempt took no time and nothing went wrong."""
    found = created(world)[0]
    placed = task_record(1, created_ms=found.created_ms, digest=found.digest)
    journal = world.journal(placed, world.put(RECORD, placed))
    faults, world.faults.next = world.faults.next, []
    result = result_of(placed, created_ms=placed.created_ms, digest=placed.digest)
    Run(journal.finish(result)).finish()
    world.faults.next = faults


def test_rule_4_a_submission_is_one_write(world: World) -> None:
    assert submission(world).finish() == (TASK, False)
    assert [record.created_ms for record in created(world)] == [MINE]
    assert [entry.subject for entry in world.faults.appends] == [RECORD]


def test_rule_4_the_second_submission_finds_the_first_ones_task(world: World) -> None:
    submission(world).finish()
    assert submission(world, OTHERS).finish() == (TASK, True)
    assert [record.created_ms for record in created(world)] == [MINE]


@pytest.mark.parametrize("ended", [False, True])
def test_rule_4_the_same_request_id_for_something_else_is_a_conflict(
    world: World, ended: bool
) -> None:
    submission(world).finish()
    if ended:
        run_and_end(world)
        world.clock.advance(60)
        assert created(world) == []
    with pytest.raises(Conflict, match=f"r1: used for another submission .task {TASK}"):
        submission(world, OTHERS, b"another").finish()


@pytest.mark.parametrize("fault", LOST)
def test_rule_4_an_unclear_answer_is_found_out(world: World, fault: Fault) -> None:
    world.faults.next = [fault]
    assert submission(world).finish() == (TASK, False)
    world.log.release_late()
    assert [record.created_ms for record in created(world)] == [MINE]


def test_rule_4_whoever_repeats_a_dead_submission_completes_it() -> None:
    """Wherever it was killed."""
    makers = set()
    for turns in range(100):
        world = World()
        first = submission(world)
        for _ in range(turns):
            first.step()
        if first.done:
            break
        first.kill()
        _, duplicate = submission(world, OTHERS).finish()
        [record] = created(world)
        assert duplicate == (record.created_ms == MINE)
        makers.add(record.created_ms)
    assert makers == {MINE, OTHERS}


def test_rule_4_a_frozen_submission_that_wakes_up_later_changes_nothing(world: World) -> None:
    """Not even when the task was accepted by another one, ran, ended and its record expired."""
    frozen = submission(world)
    submission(world, OTHERS).finish()
    run_and_end(world)
    world.clock.advance(60)
    assert created(world) == []
    assert frozen.finish() == (TASK, True)
    assert created(world) == []


def test_rule_4_a_record_that_comes_late_is_refused(world: World) -> None:
    world.faults.next = ["late"]
    first = submission(world)
    while not world.faults.appends:
        first.step()
    first.kill()
    submission(world, OTHERS).finish()
    placed = world.placed(task_record(1))
    world.log.release_late()
    assert world.record() == (task_record(1), placed)


@pytest.mark.parametrize("hand", ["attempt with a head", "attempt without one", "owner"])
def test_rule_4_a_request_id_is_known_while_its_task_lives_and_its_result_is_kept(
    world: World, hand: str
) -> None:
    submission(world).finish()
    world.clock.advance(100 * task_record().result_ttl_s)
    assert submission(world, OTHERS).finish() == (TASK, True)
    record = task_record(1, created_ms=MINE, digest=b"same")
    revision = world.placed(record)
    if hand == "owner":
        cancel(world, record, revision).finish()
    else:
        head = head_of(record) if hand == "attempt with a head" else None
        Run(world.journal(record, revision).finish(result_of(record), head)).finish()
    for _ in range(record.result_ttl_s):
        world.clock.advance(1)
        assert submission(world, OTHERS).finish() == (TASK, True)
    world.clock.advance(60)
    assert submission(world, OTHERS).finish() == (TASK, False)


def test_rule_4_a_later_life_of_a_request_id_meets_nothing_of_the_earlier_one(
    world: World,
) -> None:
    """Neither its steps nor the result that a process writes which was frozen for so long."""
    submission(world).finish()
    record = task_record(1, created_ms=MINE)
    frozen = Run(
        world.journal(record, world.placed(record)).finish(result_of(record), head_of(record))
    )
    while (found := world.record()) is not None and found[0].ending is None:
        frozen.step()
    assert found is not None
    assert cancel(world, *found).finish() == result_of(record)
    world.clock.advance(2 * record.result_ttl_s)
    old = JournalEntry(task=TASK, attempt=1, number=0, steps=(step(0),))
    world.put(LAYOUT.journal(2, TASK), old)

    assert submission(world, OTHERS).finish() == (TASK, False)
    found = world.record()
    assert found is not None
    again = task_record(2, created_ms=OTHERS, create_seq=found[1])
    journal = world.journal(again, world.placed(again))
    with pytest.raises(AttemptDropped):
        frozen.finish()
    assert world.results() == []
    assert Run(journal.open("n2")).finish() == ()
    head = world.head()
    assert head is not None
    result = result_of(again, output="of the later life")
    assert Run(journal.finish(result, head_of(again, 2), head[1])).finish() == result
    assert world.results() == [result]
    assert world.check_ended() == result


def test_full_stream_refuses_at_once(world: World) -> None:
    world.faults.next = ["full"]
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
    runs = [submission(world, MINE), submission(world, OTHERS)]
    ended = 0
    for turn in turns:
        if turn == 3:
            world.clock.advance(6)
            if created(world) and created(world)[0].state == "queued":
                run_and_end(world)
                ended += 1
        elif turn == 2:
            world.log.release_late()
        else:
            runs[turn].step()
    for run in runs:
        run.finish()
    world.log.release_late()
    left = created(world)
    assert ended + sum(record.state == "queued" for record in left) == 1
    assert len(left) <= 1


def test_losing_a_race_to_another_try_is_an_answer_and_no_error(world: World) -> None:
    runs = [submission(world, MINE), submission(world, OTHERS)]
    for _ in range(200):
        for run in runs:
            run.step()
    assert sorted(run.finish() for run in runs) == [(TASK, False), (TASK, True)]
