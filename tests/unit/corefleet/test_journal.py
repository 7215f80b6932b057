"""The journal of a task: each test holds the rule of docs/architecture.md that it names.

Processes are stepped by hand over a log in memory, so that a kill or a race can fall
between any two of their actions.
"""

from __future__ import annotations

import pytest

from corefleet.adapters.memory_log import Fault
from corefleet.errors import AttemptDropped, CorruptRecord, Fenced, StoreFull, Unavailable
from corefleet.journal import Journal, Patience, place
from corefleet.messages.records import JournalEntry
from tests.unit.corefleet.task_world import (
    LAYOUT,
    LOST,
    TASK,
    Run,
    World,
    begin,
    head_of,
    requeue,
    result_of,
    step,
    task_record,
    task_subject,
)


@pytest.fixture
def world() -> World:
    return World()


# Rule 1


def test_rule_1_requeue_fences_the_old_attempt(world: World) -> None:
    record, old = begin(world)
    Run(old.append((step(0),))).finish()
    newer, revision = requeue(world, 2)
    with pytest.raises(AttemptDropped, match=r"attempt 1: .*attempt 2 on n2"):
        Run(old.append((step(1),))).finish()
    with pytest.raises(AttemptDropped):
        Run(old.finish(result_of(record), head_of(record))).finish()
    new = world.journal(newer, revision)
    assert Run(new.open("n2")).finish() == (step(0),)
    Run(new.append((step(1, 2),))).finish()
    assert world.steps() == (step(0), step(1, 2))


def test_rule_1_a_late_old_attempt_cannot_even_open(world: World) -> None:
    begin(world)
    second, revision = requeue(world, 2)
    requeue(world, 3)
    with pytest.raises(AttemptDropped):
        Run(world.journal(second, revision).open("n2")).finish()


def test_rule_1_a_missing_record_fences_everyone(world: World) -> None:
    journal = world.journal(task_record(), 7)
    with pytest.raises(AttemptDropped, match="ended and its record is gone"):
        Run(journal.append((step(0),))).finish()


def test_rule_12_a_first_attempt_opens_without_any_call(world: World) -> None:
    record = task_record()
    world.server.reachable(False)
    assert Run(world.journal(record, 1).open("n1")).finish() == ()


def test_open_returns_committed_steps_in_order_with_intents(world: World) -> None:
    _, first = begin(world)
    intent = step(1, kind="intent")
    Run(first.append((step(0), intent))).finish()
    Run(first.append((step(2), step(1)))).finish()
    second, revision = requeue(world, 2)
    assert Run(world.journal(second, revision).open("n2")).finish() == (
        *(step(0), intent, step(2), step(1)),
    )
    third, revision = requeue(world, 3)
    assert len(Run(world.journal(third, revision).open("n3")).finish()) == 4


# Rule 2


@pytest.mark.parametrize("fault", LOST)
def test_rule_2_an_append_with_an_unclear_answer_is_there_once(world: World, fault: Fault) -> None:
    _, journal = begin(world)
    world.faults.next = [fault, fault]
    Run(journal.append((step(0),))).finish()
    world.log.release_late()
    Run(journal.append((step(1),))).finish()
    assert world.steps() == (step(0), step(1))


def test_rule_2_our_own_append_counts_although_the_record_moved_on(world: World) -> None:
    _, journal = begin(world)
    world.faults.next = ["lose_ack"]
    appending = Run(journal.append((step(0),)))
    while not world.steps():
        appending.step()
    requeue(world, 2)
    appending.finish()
    with pytest.raises(AttemptDropped):
        Run(journal.append((step(1),))).finish()
    assert world.steps() == (step(0),)


def test_rule_2_a_late_copy_of_a_fenced_attempt_is_refused(world: World) -> None:
    _, journal = begin(world)
    world.faults.next = ["late"]
    appending = Run(journal.append((step(0),)))
    while not world.faults.appends:
        appending.step()
    requeue(world, 2)
    world.log.release_late()
    with pytest.raises(AttemptDropped):
        appending.finish()
    assert world.steps() == ()


def test_rule_2_the_same_number_with_other_content_is_corrupt(world: World) -> None:
    for number in (0, 1):
        entry = JournalEntry(task=TASK, attempt=1, number=0, steps=(step(number),))
        world.put(LAYOUT.journal(2, TASK), entry, rollup=False)
    with pytest.raises(CorruptRecord, match="two appends 0"):
        world.steps()


def test_a_step_that_is_there_twice_is_corrupt(world: World) -> None:
    for number in (0, 1):
        entry = JournalEntry(task=TASK, attempt=1, number=number, steps=(step(5),))
        world.put(LAYOUT.journal(2, TASK), entry, rollup=False)
    with pytest.raises(CorruptRecord, match="step 5 by attempt 1 and again"):
        world.steps()


def test_patience_ends_when_nothing_answers(world: World) -> None:
    record, _ = begin(world)
    patience = Patience(give_up_s=5.0, now=world.clock.monotonic, sleep=world.patience.sleep)
    journal = Journal(world.log, LAYOUT, record, 1, patience)
    before = world.clock.monotonic()
    world.server.reachable(False)
    with pytest.raises(Unavailable):
        Run(journal.append((step(0),))).finish()
    assert 5.0 <= world.clock.monotonic() - before < 7.0


# Placing


@pytest.mark.parametrize("fault", LOST)
def test_place_with_an_unclear_answer_is_found_out(world: World, fault: Fault) -> None:
    record = task_record(0)
    revision = world.placed(record)
    world.faults.next = [fault]
    placed = task_record(1)
    sequence = Run(place(world.log, LAYOUT, placed, revision, world.patience)).finish()
    assert world.record() == (placed, sequence)
    world.log.release_late()
    assert len(world.stream.of(task_subject())) == 1


def test_place_after_somebody_else_is_fenced(world: World) -> None:
    revision = world.placed(task_record(0))
    world.placed(task_record(1))
    with pytest.raises(Fenced, match=rf"not at {revision} but {revision + 1}"):
        Run(place(world.log, LAYOUT, task_record(2), revision, world.patience)).finish()


def test_place_in_a_full_stream_says_so_at_once(world: World) -> None:
    revision = world.placed(task_record(0))
    world.faults.next = ["full"]
    with pytest.raises(StoreFull):
        Run(place(world.log, LAYOUT, task_record(1), revision, world.patience)).finish()
