"""Cancel, deadline and dead letter: one compare-and-set, and the loser reports the winner."""

from __future__ import annotations

import pytest

from controld.core.shard_io import (
    Action,
    AnswerCancel,
    CancelRequested,
    CaughtUp,
    EndTask,
    ReadRecord,
    RecordRead,
    RecordRefused,
    RecordStored,
    SendAssignment,
    SendDrop,
    TaskEnded,
    WriteRecord,
    WriteUnavailable,
)
from corefleet.messages.records import ResultRecord
from corefleet.messages.wire import TaskFinished
from tests.unit.controld.core.driving import ShardDriver, of_kind, only, told


def cancel(shard: ShardDriver, task: str = "t1", call: int = 5) -> list[Action]:
    return shard.feed(CancelRequested(call, task, "user said so"))


def answer(actions: list[Action]) -> tuple[bool, bool, str]:
    found = only(actions, AnswerCancel)
    assert found.call == 5
    return found.answer.found, found.answer.cancelled, found.answer.state


def test_cancel_of_a_queued_task() -> None:
    shard = ShardDriver(nodes=0)
    shard.submit("a")
    shard.submit("a")
    end = only(cancel(shard), EndTask)
    assert (end.expected, end.record.state, end.record.create_seq) == (101, "cancelled", 101)
    assert end.result.failure is not None
    assert (end.result.failure.code, end.result.failure.message) == ("cancelled", "user said so")
    actions = shard.ended(end)
    assert answer(actions) == (True, True, "cancelled")
    assert isinstance(told(actions)[0], TaskFinished)
    assert of_kind(actions, SendDrop) == []
    assert shard.core.states() == {"t2": "queued"}


def test_cancel_of_a_running_task_drops_the_attempt_once_it_is_durable() -> None:
    shard = ShardDriver()
    record = shard.run()
    actions = cancel(shard)
    assert of_kind(actions, SendDrop) == []
    actions = shard.ended(only(actions, EndTask))
    drop = only(actions, SendDrop)
    assert (drop.node, drop.drop.task, drop.drop.attempt) == (record.node, "t1", 1)
    assert answer(actions) == (True, True, "cancelled")


@pytest.mark.parametrize("refused", [False, True])
def test_cancel_while_a_placing_write_is_under_way_waits_for_it(refused: bool) -> None:
    shard = ShardDriver()
    write = only(shard.submit(), WriteRecord)
    assert cancel(shard) == []
    if refused:
        shard.feed(RecordRefused("t1", 1))
        actions = shard.feed(RecordStored(write.record, shard.next()))
    else:
        actions = shard.written(write)
    assert of_kind(actions, SendAssignment) == []
    end = only(actions, EndTask)
    assert end.expected == shard.sequence
    assert answer(shard.ended(end)) == (True, True, "cancelled")


def test_cancel_while_a_placing_write_fails_ends_the_queued_task() -> None:
    shard = ShardDriver()
    write = only(shard.submit(), WriteRecord)
    cancel(shard)
    end = only(shard.feed(WriteUnavailable("t1", 1, "no leader")), EndTask)
    assert end.expected == write.expected
    assert answer(shard.ended(end)) == (True, True, "cancelled")


def test_cancel_of_an_unknown_task_is_not_found() -> None:
    assert answer(cancel(ShardDriver(), "t77")) == (False, False, "queued")


def test_cancel_of_an_ended_task_says_how_it_ended() -> None:
    shard = ShardDriver()
    shard.done(shard.run())
    assert answer(cancel(shard)) == (True, False, "done")


def test_cancel_before_the_mark_is_decided_after_it() -> None:
    shard = ShardDriver(live=False, nodes=0)
    shard.submit()
    assert cancel(shard) == []
    assert only(shard.feed(CaughtUp()), EndTask).record.task == "t1"


def test_two_cancels_are_both_answered_by_one_end() -> None:
    shard = ShardDriver(nodes=0)
    shard.submit()
    end = only(cancel(shard, call=5), EndTask)
    assert cancel(shard, call=6) == []
    assert [a.call for a in of_kind(shard.ended(end), AnswerCancel)] == [5, 6]


def test_rule_3_a_cancel_that_loses_to_the_nodes_finish_reports_the_winner() -> None:
    shard = ShardDriver()
    record = shard.run("a")
    shard.submit("a")
    end = only(cancel(shard), EndTask)
    won = ResultRecord(
        task="t1", pool="chat", session="a", request_id="r1", state="done", output="42"
    )
    actions = shard.feed(TaskEnded("t1", False, won))
    assert answer(actions) == (True, False, "done")
    assert shard.core.states()["t1"] == "ending", "the stream shows the end, and the head"
    actions = shard.done(record, head=False)
    assert only(actions, WriteRecord).record.task == "t2"
    assert told(actions) == []
    assert end.record.state == "cancelled"


def test_rule_3_the_stream_may_show_our_own_end_first() -> None:
    shard = ShardDriver()
    shard.run()
    end = only(cancel(shard), EndTask)
    actions = shard.feed(RecordStored(end.record, shard.next()))
    assert answer(actions) == (True, True, "cancelled")
    assert isinstance(told(actions)[0], TaskFinished)
    assert only(actions, SendDrop)
    assert shard.ended(end) == []


def test_an_end_that_cannot_be_written_is_repeated() -> None:
    shard = ShardDriver(nodes=0)
    shard.submit()
    end = only(cancel(shard), EndTask)
    assert shard.feed(WriteUnavailable("t1", 0, "no leader")) == []
    assert only(shard.wait(0.5), EndTask) == end


def test_an_end_that_another_owners_write_overtook_is_repeated_on_the_new_revision() -> None:
    shard = ShardDriver()
    record = shard.run()
    end = only(cancel(shard), EndTask)
    revision = shard.next()
    shard.feed(RecordStored(record, revision))
    again = only(shard.feed(TaskEnded("t1", False, None)), EndTask)
    assert (end.expected, again.expected) == (102, revision)


def test_an_end_whose_loss_nobody_explains_is_looked_up() -> None:
    shard = ShardDriver()
    record = shard.run()
    end = only(cancel(shard), EndTask)
    shard.feed(TaskEnded("t1", False, None))
    assert only(shard.wait(2.5), ReadRecord)
    assert only(shard.feed(RecordRead(record, end.expected)), EndTask) == end


def test_the_deadline_fails_a_queued_task() -> None:
    shard = ShardDriver(nodes=0)
    shard.submit(deadline_ms=shard.wall_ms + 1500)
    assert of_kind(shard.wait(1.0), EndTask) == []
    end = only(shard.wait(0.6), EndTask)
    assert end.result.failure is not None
    assert end.result.failure.code == "deadline"
    assert end.result.failure.message == "not done after 1.5 s; it was in the queue, attempt 0"


def test_the_deadline_fails_a_running_task_and_drops_it() -> None:
    shard = ShardDriver()
    shard.run(deadline_ms=shard.wall_ms + 1500)
    end = only(shard.wait(2.0), EndTask)
    assert end.record.state == "failed"
    assert only(shard.ended(end), SendDrop).drop.reason == "deadline"


def test_deadlines_that_passed_during_a_take_over_are_kept() -> None:
    shard = ShardDriver(nodes=0, live=False)
    shard.submit(deadline_ms=shard.wall_ms + 100)
    shard.now += 5
    shard.feed(CaughtUp())
    assert only(shard.wait(0.01), EndTask)


def test_a_cancel_of_a_task_whose_deadline_is_being_written_says_failed() -> None:
    shard = ShardDriver(nodes=0)
    shard.submit(deadline_ms=shard.wall_ms + 100)
    end = only(shard.wait(1.0), EndTask)
    assert cancel(shard) == []
    assert answer(shard.ended(end)) == (True, False, "failed")


def test_late_news_of_an_ended_task_does_not_bring_it_back() -> None:
    shard = ShardDriver()
    write = only(shard.submit(), WriteRecord)
    shard.written(write, follow=False)
    late = shard.sequence
    shard.ended(only(cancel(shard), EndTask))
    assert shard.feed(RecordStored(write.record, late)) == []
    assert shard.core.states() == {}
