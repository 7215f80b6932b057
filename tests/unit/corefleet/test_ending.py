"""How a task ends: rule 3 of docs/architecture.md, wherever somebody dies in between.

Processes are stepped by hand over a log in memory.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corefleet.adapters.memory_log import Fault
from corefleet.codec import decode, encode
from corefleet.ending import TERMINAL_TTL_S
from corefleet.errors import AttemptDropped, Fenced, NotFound
from corefleet.messages.records import JournalEntry, ResultRecord, Step, TaskRecord
from tests.unit.corefleet.task_world import (
    LAYOUT,
    LOST,
    TASK,
    Run,
    World,
    begin,
    cancel,
    head_of,
    requeue,
    result_of,
    step,
    task_record,
)


@pytest.fixture
def world() -> World:
    return World()


def test_rule_3_finish_ends_everything(world: World) -> None:
    record, journal = begin(world)
    Run(journal.append((step(0),))).finish()
    result = Run(journal.finish(result_of(record, (step(0),)), head_of(record))).finish()
    assert world.check_ended() == result
    assert result.steps == (step(0, result=b""),)
    [finish] = world.stream.of(LAYOUT.journal(2, TASK))
    entry = decode(finish.payload, JournalEntry)
    assert entry.finish
    assert entry.steps == result.steps
    found = world.record()
    assert found is not None
    assert (found[0].state, found[0].input) == ("done", "")


def test_rule_3_followers_see_the_head_before_the_end(world: World) -> None:
    record, journal = begin(world)
    Run(journal.finish(result_of(record), head_of(record))).finish()
    head, found = world.head(), world.record()
    assert head is not None
    assert found is not None
    assert head[1] < found[1]


def test_rule_3_what_ends_expires(world: World) -> None:
    record, journal = begin(world)
    Run(journal.append((step(0),))).finish()
    Run(journal.finish(result_of(record), head_of(record))).finish()
    world.clock.advance(TERMINAL_TTL_S + 1)
    assert world.record() is None
    assert world.results() != []
    world.clock.advance(record.result_ttl_s)
    assert world.results() == []
    assert world.stream.of(LAYOUT.journal(2, TASK)) == []
    assert world.head() is not None


def test_rule_3_a_task_that_journaled_nothing_leaves_no_journal(world: World) -> None:
    record, journal = begin(world)
    Run(journal.finish(result_of(record), head_of(record))).finish()
    assert world.stream.of(LAYOUT.journal(2, TASK)) == []


@pytest.mark.parametrize("fault", LOST)
@pytest.mark.parametrize("which", range(5))
def test_rule_3_an_unclear_answer_anywhere_in_the_end_is_found_out(
    world: World, fault: Fault, which: int
) -> None:
    record, journal = begin(world)
    Run(journal.append((step(0),))).finish()
    world.faults.next = [*([None] * which), fault]
    result = Run(journal.finish(result_of(record), head_of(record))).finish()
    assert world.faults.next == []
    world.log.release_late()
    assert world.check_ended() == result


def killed_after(world: World, turns: int) -> bool:
    """Let attempt 1 finish and kill it after so many turns; return whether it was early."""
    record, journal = begin(world)
    Run(journal.append((step(0),))).finish()
    finishing = Run(journal.finish(result_of(record), head_of(record)))
    for _ in range(turns):
        finishing.step()
    early = not finishing.done
    finishing.kill()
    return early


def test_rule_3_the_next_attempt_carries_out_what_was_decided() -> None:
    """Wherever in its end the attempt was killed."""
    outcomes = set()
    for turns in range(1000):
        world = World()
        if not killed_after(world, turns):
            break
        found = world.record()
        assert found is not None
        if found[0].state == "done":
            world.check_ended()
            continue
        record, revision = requeue(world, 2)
        journal = world.journal(record, revision)
        try:
            assert Run(journal.open("n2")).finish() == (step(0),)
        except AttemptDropped:
            assert journal.outcome == world.check_ended()
            assert journal.outcome.attempt == 1
            outcomes.add("carried out")
        else:
            result = result_of(record)
            Run(journal.finish(result, head_of(record))).finish()
            assert world.check_ended() == result
            outcomes.add("done again")
    assert outcomes == {"carried out", "done again"}


def killed_after_the_result(world: World) -> TaskRecord:
    """An attempt that keeps the session's head dies between its result and the record's end."""
    record, journal = begin(world)
    run = Run(journal.finish(result_of(record)))
    while not world.results():
        run.step()
    run.kill()
    assert world.record() is not None
    return record


def test_rule_3_the_next_attempt_meets_the_result_that_was_settled_on() -> None:
    world = World()
    record = killed_after_the_result(world)
    newer, revision = requeue(world, 2)
    journal = world.journal(newer, revision)
    with pytest.raises(AttemptDropped):
        Run(journal.open("n2")).finish()
    assert journal.outcome == world.check_ended(keeps_head=True) == result_of(record)


def test_rule_3_cancel_meets_the_result_that_was_settled_on() -> None:
    world = World()
    record = killed_after_the_result(world)
    found = world.record()
    assert found is not None
    assert cancel(world, *found).finish() == result_of(record)
    assert world.check_ended(keeps_head=True).state == "done"


def test_rule_3_a_fenced_attempt_cannot_settle() -> None:
    world = World()
    record, journal = begin(world)
    requeue(world, 2)
    with pytest.raises(AttemptDropped):
        Run(journal.finish(result_of(record))).finish()
    assert world.results() == []


def test_rule_3_cancel_meets_what_was_decided() -> None:
    """Wherever in its end the attempt was killed, and the owner knows the record or not."""
    states: set[str] = set()
    for turns in range(1000):
        for fresh in (False, True):
            world = World()
            if not killed_after(world, turns):
                assert states == {"done", "cancelled"}
                return
            found = world.record()
            assert found is not None
            if found[0].state == "done":
                continue
            known = found if fresh else (task_record(), 1)
            stands = cancel(world, *known).finish()
            assert world.check_ended() == stands
            states.add(stands.state)


def test_rule_3_a_decision_survives_the_death_of_all_who_carry_it_out() -> None:
    """Each of three attempts is killed in its end; the fourth meets the first one's."""
    for turns in range(3, 9):
        world = World()
        assert killed_after(world, turns)
        for attempt in (2, 3):
            found = world.record()
            assert found is not None
            assert found[0].ending is not None
            record, revision = requeue(world, attempt)
            opening = Run(world.journal(record, revision).open(f"n{attempt}"))
            for _ in range(turns // 2):
                opening.step()
            opening.kill()
        record, revision = requeue(world, 4)
        journal = world.journal(record, revision)
        with pytest.raises(AttemptDropped):
            Run(journal.open("n4")).finish()
        assert journal.outcome == world.check_ended()
        assert journal.outcome.attempt == 1


def test_rule_3_an_ending_on_another_head_is_void(world: World) -> None:
    record, journal = begin(world)
    other = msgspec.structs.replace(head_of(record, 3), last_task="2-0000000000000000000000000z")
    world.put(LAYOUT.head(2, "pool", "session"), other)
    with pytest.raises(AttemptDropped, match="session's head"):
        Run(journal.finish(result_of(record), head_of(record), 0)).finish()
    assert world.results() == []
    found = world.record()
    assert found is not None
    assert found[0].ending is None
    again, revision = requeue(world, 2)
    head = world.head()
    assert head is not None
    second = world.journal(again, revision)
    Run(second.open("n2")).finish()
    Run(second.finish(result_of(again), head_of(again, 4), head[1])).finish()
    assert world.check_ended().attempt == 2


def test_rule_3_a_void_ending_stops_neither_cancel_nor_the_next_attempt() -> None:
    for heir in ("cancel", "attempt"):
        world = World()
        record, journal = begin(world)
        other = msgspec.structs.replace(head_of(record, 3), last_task="2-00000000000000000000000z")
        world.put(LAYOUT.head(2, "pool", "session"), other)
        finishing = Run(journal.finish(result_of(record), head_of(record), 0))
        while (found := world.record()) is not None and found[0].ending is None:
            finishing.step()
        finishing.kill()
        if heir == "cancel":
            assert found is not None
            assert cancel(world, *found).finish().state == "cancelled"
        else:
            again, revision = requeue(world, 2)
            head = world.head()
            assert head is not None
            second = world.journal(again, revision)
            Run(second.open("n2")).finish()
            Run(second.finish(result_of(again), head_of(again, 4), head[1])).finish()
        world.check_ended()


def test_rule_3_a_late_terminal_record_does_not_come_back(world: World) -> None:
    record, journal = begin(world)
    world.faults.next = [None, None, None, "late"]
    finishing = Run(journal.finish(result_of(record), head_of(record)))
    while len(world.faults.appends) < 4:
        finishing.step()
    finishing.kill()
    found = world.record()
    assert found is not None
    cancel(world, *found).finish()
    world.clock.advance(60)
    world.log.release_late()
    assert world.record() is None


def test_rule_3_a_queued_task_is_cancelled(world: World) -> None:
    record = task_record(0)
    stands = cancel(world, record, world.placed(record)).finish()
    assert (world.check_ended(), stands.state) == (stands, "cancelled")


def test_rule_3_cancel_of_a_record_that_moved_on_is_fenced(world: World) -> None:
    record, _ = begin(world)
    requeue(world, 2)
    with pytest.raises(Fenced):
        cancel(world, record, 1).finish()
    assert world.results() == []


def test_rule_3_cancel_long_after_the_end_finds_the_result_or_nothing(world: World) -> None:
    record, journal = begin(world)
    result = Run(journal.finish(result_of(record), head_of(record))).finish()
    world.clock.advance(60)
    assert cancel(world, record, 1).finish() == result
    world.clock.advance(1000)
    with pytest.raises(NotFound):
        cancel(world, record, 1).finish()


def test_rule_3_finish_repeated_after_the_record_expired_is_our_own(world: World) -> None:
    record, journal = begin(world)
    result = Run(journal.finish(result_of(record), head_of(record))).finish()
    world.clock.advance(60)
    assert Run(journal.finish(result_of(record), head_of(record))).finish() == result


# Everything at once

faults = st.lists(st.one_of(st.none(), st.none(), st.sampled_from(LOST)), max_size=25)
turns = st.lists(st.integers(0, 3), max_size=250)


async def attempt_of(
    world: World, record: TaskRecord, revision: int, acknowledged: list[Step], keeps_head: bool
) -> ResultRecord:
    """Replay, append what is missing up to three steps, finish."""
    journal = world.journal(record, revision)
    try:
        done = await journal.open(record.node)
    except AttemptDropped:
        if journal.outcome is None:
            raise
        return journal.outcome
    for number in range(len(done), 3):
        await journal.append((step(number, record.attempt),))
        acknowledged.append(step(number, record.attempt))
    return await journal.finish(result_of(record), None if keeps_head else head_of(record))


@given(faults=faults, turns=turns, keeps_head=st.booleans())
def test_old_and_new_attempt_and_cancel_interleaved(
    faults: list[Fault | None], turns: list[int], keeps_head: bool
) -> None:
    """No step twice or lost, none of a fenced attempt, one end that all agree on."""
    world = World()
    record = task_record(1)
    revision = world.placed(record)
    world.faults.next = faults
    acknowledged: list[Step] = []
    runs: list[Run[ResultRecord]] = [
        Run(attempt_of(world, record, revision, acknowledged, keeps_head))
    ]
    fenced_at = 0
    for turn in turns:
        found = world.record()
        live = found is not None and found[0].state == "placed"
        if turn == 2 and len(runs) == 1 and found is not None and live:
            newer = msgspec.structs.replace(found[0], attempt=2, node="n2")
            fenced_at = world.placed(newer)
            runs.append(Run(attempt_of(world, newer, fenced_at, acknowledged, keeps_head)))
        elif turn == 3 and len(runs) == 2 and found is not None and live:
            runs.append(cancel(world, *found))
        else:
            runs[turn % len(runs)].step()
        now = world.record()
        running = now is not None and now[0].state == "placed" and now[0].ending is None
        if running and not world.results():
            steps = world.steps()
            assert [each.step for each in steps] == list(range(len(steps)))
            assert set(acknowledged) <= set(steps)
    world.log.release_late()
    for stored in world.stream.of(LAYOUT.journal(2, TASK)):
        entry = decode(stored.payload, JournalEntry)
        assert entry.finish or not (entry.attempt == 1 and 0 < fenced_at < stored.sequence)
    outcomes = []
    for run in reversed(runs):
        try:
            outcomes.append(run.finish())
        except (AttemptDropped, Fenced):
            continue
    world.log.release_late()
    result = world.check_ended(keeps_head)
    assert outcomes
    assert set(map(encode, outcomes)) == {encode(result)}
    assert len({each.step for each in acknowledged}) == len(acknowledged)
