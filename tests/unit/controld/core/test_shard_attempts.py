"""Attempts that are refused, unanswered, returned, stuck, absent, or lost with their node."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from controld.core.attempt_policy import EXTRA_ATTEMPTS
from controld.core.shard_io import (
    Action,
    AssignAnswered,
    AssignUnanswered,
    AttemptReturned,
    AttemptStuck,
    CaughtUp,
    EndTask,
    InventoryAnswered,
    NodeGone,
    NodeResumed,
    QueryInventory,
    ReadRecord,
    RecordMissing,
    RecordRead,
    RecordRefused,
    RecordStored,
    SendAssignment,
    SendDrop,
    WriteRecord,
    WriteUnavailable,
)
from corefleet.errors import IllegalTransition
from corefleet.messages.records import LostNode, PoolSpec, TaskRecord
from corefleet.messages.wire import AssignAnswer, HeldAttempt, TaskRequeued
from tests.unit.controld.core.driving import ShardDriver, of_kind, only, told


def lose(shard: ShardDriver, node: str, epoch: int = 1, reason: str = "silent") -> list[Action]:
    """The fleet learns the verdict first, then the shard, as the runner does it."""
    shard.fleet.lost(LostNode(node=node, epoch=epoch, reason=reason), shard.now)
    return shard.feed(NodeGone(node, epoch, reason))


def other(node: str) -> str:
    return {"n0": "n1", "n1": "n0"}[node]


def refuse(shard: ShardDriver, offer: SendAssignment, reason: str = "full") -> list[Action]:
    record = offer.assignment.record
    return shard.feed(
        AssignAnswered(offer.node, AssignAnswer(record.task, record.attempt, False, reason))
    )


def test_a_refusal_cools_the_node_down_and_places_elsewhere_with_a_new_attempt() -> None:
    shard = ShardDriver()
    offer = only(shard.written(only(shard.submit(), WriteRecord)), SendAssignment)
    write = only(refuse(shard, offer), WriteRecord)
    assert write.record.node == other(offer.node)
    assert (write.record.attempt, write.expected) == (2, offer.assignment.revision)
    assert write.record.past[0].reason == "refused: full"
    nodes = {line.node: line.line for line in shard.core.explain("t1").candidates}
    assert nodes[offer.node] == "cooling down after a refusal"
    requeued = told(shard.written(write))[0]
    assert isinstance(requeued, TaskRequeued)
    assert (requeued.attempt, requeued.node, requeued.reason) == (1, offer.node, "full")


def test_a_refusal_with_no_other_node_goes_back_to_the_queue() -> None:
    shard = ShardDriver(nodes=1)
    offer = only(shard.written(only(shard.submit(), WriteRecord)), SendAssignment)
    write = only(refuse(shard, offer), WriteRecord)
    assert (write.record.state, write.record.attempt, write.record.node) == ("queued", 1, "")
    shard.written(write)
    assert shard.core.states() == {"t1": "queued"}
    again = only(shard.wait(0.2), WriteRecord)
    assert (again.record.attempt, again.record.node) == (2, "n0")


def test_rule_9_no_answer_means_the_same_attempt_to_the_same_node_again() -> None:
    shard = ShardDriver()
    offer = only(shard.written(only(shard.submit(), WriteRecord)), SendAssignment)
    assert shard.feed(AssignUnanswered(offer.node, "t1", 1)) == []
    again = only(shard.wait(0.2), SendAssignment)
    assert (again.node, again.assignment) == (offer.node, offer.assignment)


def test_rule_9_another_node_gets_it_only_with_a_new_attempt() -> None:
    shard = ShardDriver()
    offer = only(shard.written(only(shard.submit(), WriteRecord)), SendAssignment)
    for _ in range(2):
        shard.feed(AssignUnanswered(offer.node, "t1", 1))
        only(shard.wait(0.5), SendAssignment)
    write = only(shard.feed(AssignUnanswered(offer.node, "t1", 1)), WriteRecord)
    assert (write.record.attempt, write.record.node) == (2, other(offer.node))
    actions = shard.written(write)
    drop = only(actions, SendDrop)
    assert (drop.node, drop.drop.attempt) == (offer.node, 1)
    assert only(actions, SendAssignment).node == other(offer.node)


def test_rule_9_a_late_acceptance_of_an_older_attempt_is_told_to_drop() -> None:
    shard = ShardDriver()
    record = shard.run()
    shard.written(only(lose(shard, record.node), WriteRecord))
    late = shard.feed(AssignAnswered(record.node, AssignAnswer("t1", 1, True)))
    assert only(late, SendDrop).drop.attempt == 1
    unknown = shard.feed(AssignAnswered("n0", AssignAnswer("t99", 1, True)))
    assert only(unknown, SendDrop).drop.task == "t99"


def test_an_acceptance_after_the_task_ended_is_no_reason_to_drop() -> None:
    shard = ShardDriver()
    write = only(shard.submit(), WriteRecord)
    shard.written(write)
    shard.done(write.record)
    assert shard.feed(AssignAnswered("n0", AssignAnswer("t1", 1, True))) == []


def test_rule_11_all_requeues_of_a_lost_node_leave_in_one_step() -> None:
    shard = ShardDriver(nodes=2, slots=8)
    records = [shard.run() for _ in range(8)]
    node = records[0].node
    here = [record.task for record in records if record.node == node]
    writes = of_kind(lose(shard, node), WriteRecord)
    assert sorted(write.record.task for write in writes) == sorted(here)
    assert {write.record.node for write in writes} == {other(node)}
    assert {write.record.attempt for write in writes} == {2}
    assert writes[0].record.past[0].reason == "lost: silent"


def test_what_finds_no_place_on_node_loss_is_requeued_by_a_write_which_fences() -> None:
    shard = ShardDriver(nodes=2, slots=1)
    first, second = shard.run(), shard.run()
    write = only(lose(shard, first.node), WriteRecord)
    assert (write.record.state, write.record.past[0].node) == ("queued", first.node)
    event = told(shard.written(write))[0]
    assert isinstance(event, TaskRequeued)
    assert only(shard.done(second), WriteRecord).record.task == first.task


def test_online_attempts_are_moved_before_batch() -> None:
    shard = ShardDriver(nodes=1)
    shard.run(pool="crunch", pool_class="batch")
    shard.run()
    classes = [w.record.pool_class for w in of_kind(lose(shard, "n0"), WriteRecord)]
    assert classes == ["online", "batch"]


def test_a_node_lost_while_its_placing_write_is_under_way_is_never_offered_the_task() -> None:
    shard = ShardDriver()
    write = only(shard.submit(), WriteRecord)
    assert lose(shard, write.record.node) == []
    actions = shard.written(write)
    assert of_kind(actions, SendAssignment) == []
    assert only(actions, WriteRecord).record.node == other(write.record.node)


def test_rule_8_verdicts_name_an_epoch_and_leave_newer_attempts_alone() -> None:
    shard = ShardDriver(nodes=0)
    shard.fleets.join("n0", epoch=4)
    shard.run()
    assert shard.feed(NodeGone("n0", 3, "started anew")) == []
    assert only(shard.feed(NodeGone("n0", 4, "silent")), WriteRecord)


def test_rule_8_attempts_absent_at_their_node_are_requeued() -> None:
    shard = ShardDriver()
    record = shard.run()
    shard.run()
    queries = of_kind(shard.wait(13.0), QueryInventory)
    held = [item for query in queries for item in query.query.held]
    assert HeldAttempt("t1", 1) in held
    assert shard.feed(InventoryAnswered(record.node, 0, (HeldAttempt("t1", 1),))) == []
    assert shard.feed(InventoryAnswered(record.node, 1, (HeldAttempt("t1", 9),))) == []
    write = only(
        shard.feed(InventoryAnswered(record.node, 1, (HeldAttempt("t1", 1),))), WriteRecord
    )
    assert write.record.past[0].reason == "absent: its node does not have it"


def test_rule_8_inventories_are_compared_every_ten_seconds_or_so() -> None:
    shard = ShardDriver(nodes=1)
    shard.run()
    asked = 0
    for _ in range(120):
        for query in of_kind(shard.wait(1.0), QueryInventory):
            asked += 1
            shard.feed(InventoryAnswered(query.node, 1, ()))
    assert 9 <= asked <= 14


def test_an_unregistered_node_that_answers_no_inventory_is_given_up() -> None:
    shard = ShardDriver(nodes=1, live=False)
    record = shard.record(state="placed", attempt=1, node="n7", node_epoch=2, create_seq=5)
    shard.feed(RecordStored(record, shard.next()))
    shard.feed(CaughtUp())
    writes: list[WriteRecord] = []
    for _ in range(20):
        writes += of_kind(shard.wait(1.0), WriteRecord)
    assert writes[0].record.past[0].reason == "lost: its node is not registered"


def test_a_returned_attempt_counts_and_the_last_one_is_a_dead_letter_that_says_why() -> None:
    shard = ShardDriver(nodes=1)
    shard.run(max_attempts=2)
    write = only(shard.feed(AttemptReturned("t1", 1, "n0", "worker crashed")), WriteRecord)
    assert write.record.node == "n0", "the node's next worker may do it"
    shard.accepted(only(shard.written(write), SendAssignment))
    end = only(shard.feed(AttemptReturned("t1", 2, "n0", "worker crashed")), EndTask)
    assert end.result.failure is not None
    assert end.result.failure.code == "attempts_exhausted"
    assert end.result.failure.message == (
        "2 of 2 attempts failed; the last: returned: worker crashed"
    )
    assert [past.attempt for past in end.result.past] == [1, 2]
    assert shard.ended(end)
    assert shard.core.states() == {}


def test_repeated_returns_back_off() -> None:
    shard = ShardDriver(nodes=1)
    shard.run()
    write = only(shard.feed(AttemptReturned("t1", 1, "n0", "boom")), WriteRecord)
    shard.accepted(only(shard.written(write), SendAssignment))
    write = only(shard.feed(AttemptReturned("t1", 2, "n0", "boom")), WriteRecord)
    assert write.record.state == "queued"
    shard.written(write)
    assert shard.core.reason("t1") == "backs off after attempt 2: returned: boom"
    assert of_kind(shard.wait(0.1), WriteRecord) == []
    assert only(shard.wait(0.2), WriteRecord).record.attempt == 3


def test_what_the_node_gives_back_for_its_own_reasons_does_not_count() -> None:
    shard = ShardDriver(nodes=2)
    record = shard.run(max_attempts=1)
    write = only(shard.feed(AttemptReturned("t1", 1, record.node, "node draining")), WriteRecord)
    assert write.record.node == other(record.node)


def test_lost_nodes_count_only_when_a_task_loses_many() -> None:
    shard = ShardDriver(nodes=0)
    shard.fleets.join("n0", epoch=1)
    shard.run(max_attempts=2)
    ends: list[EndTask] = []
    lost = 0
    while not ends:
        lost += 1
        shard.fleets.join("n0", epoch=lost + 1)
        actions = shard.feed(NodeGone("n0", lost, "silent"))
        ends = of_kind(actions, EndTask)
        if not ends:
            shard.accepted(only(shard.written(only(actions, WriteRecord)), SendAssignment))
    assert lost == 5
    assert ends[0].result.failure is not None
    assert "lost: silent" in ends[0].result.failure.message


def test_even_refusals_are_bounded() -> None:
    shard = ShardDriver(nodes=1)
    actions = shard.submit(max_attempts=1)
    refusals = 0
    while not (ends := of_kind(actions, EndTask)):
        for write in of_kind(actions, WriteRecord):
            offers = of_kind(shard.written(write), SendAssignment)
            if offers:
                refusals += 1
                actions = refuse(shard, offers[0])
                break
        else:
            actions = shard.wait(6.0)
    assert refusals == 1 + EXTRA_ATTEMPTS
    assert ends[0].result.failure is not None
    assert ends[0].result.failure.message.startswith("given up after 65 attempts")
    assert len(ends[0].result.past) <= 20


def test_an_attempt_without_progress_is_moved_after_the_pools_time() -> None:
    shard = ShardDriver(pools={"chat": PoolSpec(name="chat", progress_timeout_s=30.0)})
    record = shard.run()
    assert shard.feed(AttemptStuck("t1", 1, 29.0)) == []
    assert shard.feed(AttemptStuck("t1", 2, 99.0)) == []
    write = only(shard.feed(AttemptStuck("t1", 1, 31.0)), WriteRecord)
    assert write.record.node == other(record.node)
    assert write.record.past[0].reason == "stuck: no progress for 31 s, 30 s allowed"
    assert only(shard.written(write), SendDrop).node == record.node


def test_a_move_that_cannot_be_written_is_tried_again_until_it_is() -> None:
    shard = ShardDriver()
    record = shard.run()
    write = only(lose(shard, record.node), WriteRecord)
    assert shard.feed(WriteUnavailable("t1", 1 + 1, "no leader")) == []
    again = only(shard.wait(0.2), WriteRecord)
    assert again.expected == write.expected
    shard.written(again)
    assert shard.core.states() == {"t1": "offered"}


def test_the_task_may_finish_while_its_move_is_under_way() -> None:
    shard = ShardDriver()
    record = shard.run("a")
    only(shard.feed(AttemptReturned("t1", 1, record.node, "boom")), WriteRecord)
    shard.done(record)
    assert shard.feed(RecordRefused("t1", 2)) == []
    assert shard.core.states() == {}
    assert only(shard.submit("a"), WriteRecord)


def test_a_refusal_that_the_stream_does_not_explain_is_looked_up_at_the_leader() -> None:
    shard = ShardDriver()
    write = only(shard.submit(), WriteRecord)
    shard.feed(RecordRefused("t1", 1))
    assert only(shard.wait(2.5), ReadRecord).task == "t1"
    shard.feed(RecordRead(before(write), write.expected))
    assert only(shard.wait(0.5), WriteRecord).expected == write.expected
    shard.feed(RecordRefused("t1", 1))
    only(shard.wait(2.5), ReadRecord)
    assert only(shard.wait(2.5), ReadRecord), "asked again while there is no answer"
    shard.feed(RecordMissing("t1"))
    assert shard.core.states() == {}


def before(write: WriteRecord) -> TaskRecord:
    """The record as it was before the write."""
    return replace(write.record, state="queued", attempt=0, node="", owner_epoch=0)


def test_a_read_of_our_own_write_waits_for_the_stream_before_it_offers() -> None:
    shard = ShardDriver()
    write = only(shard.submit(), WriteRecord)
    shard.feed(RecordRefused("t1", 1))
    only(shard.wait(2.5), ReadRecord)
    revision = shard.next()
    assert of_kind(shard.feed(RecordRead(write.record, revision)), SendAssignment) == []
    assert only(shard.feed(RecordStored(write.record, revision)), SendAssignment)


def test_an_illegal_move_raises_with_the_tasks_story() -> None:
    shard = ShardDriver()
    shard.run()
    state = shard.core._state
    with pytest.raises(IllegalTransition, match=r"running -> placing; story: .*placing \(n"):
        state.move(state.tasks["t1"], "placing")


def test_a_node_whose_agentd_started_anew_is_asked_at_once_what_it_has() -> None:
    shard = ShardDriver(nodes=1)
    record = shard.run()
    shard.wait(0.1)
    query = only(shard.feed(NodeResumed("n0")), QueryInventory)
    assert query.query.held == (HeldAttempt(record.task, record.attempt),)
    write = only(shard.feed(InventoryAnswered("n0", 1, query.query.held)), WriteRecord)
    assert write.record.past[-1].reason.startswith("absent")
    asked = 1
    for _ in range(30):
        asked += len(of_kind(shard.wait(1.0), QueryInventory))
    assert asked <= 5, "asking at once does not make it be asked more often"
