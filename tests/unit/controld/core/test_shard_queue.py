"""Order, fairness, waiting reasons and take-over of a shard's queue."""

from __future__ import annotations

from msgspec.structs import replace

from controld.core.shard_io import (
    CancelRequested,
    CaughtUp,
    EndTask,
    HeadStored,
    NodeGone,
    QueryInventory,
    RecordRead,
    RecordRefused,
    RecordStored,
    RecordWritten,
    SendAssignment,
    WriteRecord,
    WriteUnavailable,
)
from corefleet.messages.records import PoolSpec, SessionHead, TaskRecord
from corefleet.messages.wire import ListTasks, SlotUse, TaskEvent, TaskPlaced, TaskWaiting
from tests.unit.controld.core.driving import ShardDriver, of_kind, only, registration, told


def test_a_task_is_placed_written_and_only_then_offered() -> None:
    shard = ShardDriver()
    write = only(shard.submit(), WriteRecord)
    assert write.expected == 101
    assert (write.record.state, write.record.attempt, write.record.owner_epoch) == ("placed", 1, 3)
    assert (write.record.create_seq, write.record.node_epoch) == (101, 1)
    actions = shard.written(write)
    offer = only(actions, SendAssignment)
    assert offer.node == write.record.node
    assert (offer.assignment.revision, offer.assignment.create_seq) == (102, 101)
    placed = told(actions)[0]
    assert isinstance(placed, TaskPlaced)
    assert placed.why == write.record.why != ""


def test_the_stream_may_show_our_write_before_its_answer() -> None:
    shard = ShardDriver()
    write = only(shard.submit(), WriteRecord)
    revision = shard.next()
    assert only(shard.feed(RecordStored(write.record, revision)), SendAssignment)
    assert shard.feed(RecordWritten("t1", 1, revision)) == []
    assert shard.core.states() == {"t1": "offered"}


def test_a_refused_write_that_was_ours_goes_on() -> None:
    shard = ShardDriver()
    write = only(shard.submit(), WriteRecord)
    assert shard.feed(RecordRefused("t1", 1)) == []
    assert only(shard.feed(RecordStored(write.record, shard.next())), SendAssignment)


def test_a_refused_write_that_another_owner_won_is_adopted() -> None:
    shard = ShardDriver()
    write = only(shard.submit(), WriteRecord)
    shard.feed(RecordRefused("t1", 1))
    theirs = replace(write.record, owner_epoch=4, node="n9", attempt=1)
    assert shard.feed(RecordStored(theirs, shard.next())) == []
    assert shard.core.states() == {"t1": "running"}


def test_a_write_without_effect_is_tried_again_after_a_pause() -> None:
    shard = ShardDriver()
    write = only(shard.submit(), WriteRecord)
    assert shard.feed(WriteUnavailable("t1", 1, "no leader")) == []
    assert "backs off" in shard.core.reason("t1")
    again = only(shard.wait(0.2), WriteRecord)
    assert again.expected == write.expected


def test_rule_6_session_order_is_create_order_even_when_rebuilt_from_rewritten_records() -> None:
    shard = ShardDriver(live=False)
    later = shard.record("a")
    earlier = replace(shard.record("a"), create_seq=50)
    shard.feed(RecordStored(later, shard.next()))
    shard.feed(RecordStored(earlier, shard.next()))
    write = only(shard.feed(CaughtUp()), WriteRecord)
    assert write.record.task == earlier.task
    assert write.record.create_seq == 50
    assert shard.core.reason(later.task) == f"waits for task {earlier.task} of the same session"


def test_rule_6_a_back_off_never_lets_a_later_task_of_the_session_pass() -> None:
    shard = ShardDriver()
    only(shard.submit("a"), WriteRecord)
    assert shard.submit("a") == []
    shard.feed(WriteUnavailable("t1", 1, "no leader"))
    assert shard.core.states() == {"t1": "queued", "t2": "queued"}
    assert only(shard.wait(0.2), WriteRecord).record.task == "t1"


def test_the_next_task_of_a_session_starts_with_the_head_that_the_last_one_wrote() -> None:
    shard = ShardDriver()
    first = shard.run("a")
    assert shard.submit("a") == []
    write = only(shard.done(first, head=False), WriteRecord)
    revision = shard.next()
    head = SessionHead(pool="chat", session="a", version=1, last_task="t1")
    early = shard.feed(RecordWritten("t2", 1, revision + 1))
    assert of_kind(early, SendAssignment) == [], "the head is still on its way"
    shard.feed(HeadStored(head, revision))
    offer = only(shard.feed(RecordStored(write.record, revision + 1)), SendAssignment)
    assert (offer.assignment.head, offer.assignment.head_revision) == (head, revision)


def test_a_session_goes_home() -> None:
    shard = ShardDriver(nodes=3)
    first = shard.run("a")
    shard.done(first)
    write = only(shard.submit("a"), WriteRecord)
    assert write.record.node == first.node
    assert "home" in write.record.why


def test_online_goes_before_batch() -> None:
    shard = ShardDriver(nodes=1, slots=1)
    running = shard.run(pool="crunch", pool_class="batch")
    shard.submit(pool="crunch", pool_class="batch")
    held = shard.run(pool="chat")
    shard.submit(pool="chat")
    shard.fleets.see("n0", state="suspect")
    shard.done(running)
    shard.done(held)
    shard.fleets.see("n0")
    placed = [w.record.pool for w in of_kind(shard.wait(0.1), WriteRecord)]
    assert placed == ["chat", "crunch"]


def test_pools_of_a_class_take_turns_by_weight() -> None:
    shard = ShardDriver(nodes=0, pools={"crunch": PoolSpec(name="crunch", weight=2)})
    for pool in ["chat"] * 4 + ["crunch"] * 6:
        shard.submit(pool=pool)
    shard.fleets.join("n0", slots=9)
    placed = [write.record.pool for write in of_kind(shard.wait(0.3), WriteRecord)]
    assert len(placed) == 10
    assert sorted(placed[:3]) == ["chat", "crunch", "crunch"]
    assert sorted(placed[3:6]) == ["chat", "crunch", "crunch"]


def test_a_pool_that_waits_for_a_place_does_not_hold_up_another() -> None:
    shard = ShardDriver(nodes=1, slots=1)
    shard.run(pool="chat")
    assert shard.submit(pool="chat") == []
    assert only(shard.submit(pool="crunch"), WriteRecord).record.pool == "crunch"


def test_watchers_are_told_why_a_task_waits_and_when_the_reason_changes() -> None:
    shard = ShardDriver(nodes=0)
    assert shard.submit() == []
    first = told(shard.wait(0.3))
    assert _reasons(first) == ["no node offers pool chat"]
    assert told(shard.wait(2.5)) == [], "the reason is the same"
    shard.fleet.registered(registration("n0", slots=1), shard.now)
    shard.fleets.see("n0", slots=(SlotUse("chat", 0, 1, 1),))
    second = told(shard.wait(2.5))
    assert _reasons(second) == ["all 1 eligible place (node and domain) are full"]


def _reasons(events: list[TaskEvent]) -> list[str]:
    return [event.reason for event in events if isinstance(event, TaskWaiting)]


def test_a_task_placed_at_once_tells_nobody_that_it_waits() -> None:
    shard = ShardDriver()
    shard.run()
    assert told(shard.wait(3.0)) == []


def test_rule_7_nothing_is_decided_before_the_mark_is_seen() -> None:
    shard = ShardDriver(live=False)
    assert shard.submit() == []
    assert shard.wait(5.0) == []
    assert shard.core.reason("t1") == "the shard's new owner reads its records"
    assert only(shard.feed(CaughtUp()), WriteRecord).record.task == "t1"


def test_rule_7_a_new_owner_offers_nothing_before_the_stream_shows_its_own_write() -> None:
    # A task that ended behind our mark may have replaced the record we should have seen.
    shard = ShardDriver(live=False)
    shard.submit("a")
    write = only(shard.feed(CaughtUp()), WriteRecord)
    revision = shard.next() + 1
    assert shard.feed(RecordWritten("t1", 1, revision)) == []
    head = SessionHead(pool="chat", session="a", version=4)
    shard.feed(HeadStored(head, revision - 1))
    offer = only(shard.feed(RecordStored(write.record, revision)), SendAssignment)
    assert offer.assignment.head == head


def test_rule_8_a_new_owner_asks_nodes_for_what_they_hold_and_requeues_what_is_gone() -> None:
    shard = ShardDriver(live=False)
    here = _placed(shard, "n0", 1)
    gone = _placed(shard, "n1", 0)
    actions = shard.feed(CaughtUp())
    assert only(actions, WriteRecord).record.task == gone.task
    query = only(shard.wait(0.01), QueryInventory)
    assert query.node == "n0"
    assert [held.task for held in query.query.held] == [here.task]
    assert (query.query.shard, query.query.owner_epoch) == (7, 3)


def _placed(shard: ShardDriver, node: str, epoch: int) -> TaskRecord:
    record = shard.record(
        state="placed", attempt=1, node=node, node_epoch=epoch, domain=0, owner_epoch=2
    )
    record = replace(record, create_seq=shard.sequence)
    shard.feed(RecordStored(record, shard.next()))
    return record


def test_node_verdicts_before_the_mark_wait_for_it() -> None:
    shard = ShardDriver(live=False)
    _placed(shard, "n0", 1)
    assert shard.feed(NodeGone("n0", 1, "silent")) == []


def test_closing_gives_places_and_turns_back() -> None:
    shard = ShardDriver(nodes=1, slots=1)
    shard.run()
    shard.submit()
    shard.core.close(shard.now)
    offers = shard.fleet.offers("chat")
    assert offers is not None
    assert sum(slot.own for slots in offers.nodes.values() for slot in slots) == 0
    shard.fleets.see("n0")
    assert shard.fleet.woken() == []


def test_lists_filter_by_pool_session_and_state_up_to_a_limit() -> None:
    shard = ShardDriver(nodes=1, slots=1)
    shard.run("a")
    shard.submit("a")
    shard.submit("b")
    shard.submit("c", pool="crunch")
    listed = shard.core.list_tasks(ListTasks(pool="chat")).tasks
    assert [line.record.task for line in listed] == ["t1", "t2", "t3"]
    assert listed[1].reason == "waits for task t1 of the same session"
    assert len(shard.core.list_tasks(ListTasks(limit=2)).tasks) == 2
    states = shard.core.list_tasks(ListTasks(state="running")).tasks
    assert [line.record.task for line in states] == ["t1"]
    one = shard.core.list_tasks(ListTasks(pool="chat", session="b")).tasks
    assert [line.record.task for line in one] == ["t3"]
    assert shard.core.list_tasks(ListTasks(pool="chat", session="zz")).tasks == ()
    assert shard.core.backlog() == {"chat": 2}


def test_explain_says_where_and_why_or_why_not() -> None:
    shard = ShardDriver(nodes=2)
    record = shard.run()
    answer = shard.core.explain("t1")
    assert (answer.found, answer.chosen, answer.why) == (True, f"{record.node}/0", record.why)
    assert {line.node for line in answer.candidates} == {"n0", "n1"}
    assert not shard.core.explain("t9").found


def test_after_an_end_learnt_by_reading_offers_wait_until_the_stream_has_shown_the_head() -> None:
    shard = ShardDriver()
    shard.run()
    write = only(shard.submit("a"), WriteRecord)
    shard.feed(RecordRefused("t2", 1))
    shard.wait(2.5)
    later = shard.record("a")
    created = shard.next()
    ended = shard.next()
    shard.feed(RecordRead(replace(write.record, state="done"), ended))
    write = only(shard.feed(RecordStored(later, created)), WriteRecord)
    revision = ended + 5
    assert shard.feed(RecordWritten(later.task, 1, revision)) == []
    head = SessionHead(pool="chat", session="a", version=1, last_task="t2")
    shard.feed(HeadStored(head, ended + 1))
    offer = only(shard.feed(RecordStored(write.record, revision)), SendAssignment)
    assert offer.assignment.head == head


def test_rule_7_a_task_cancelled_while_its_offer_waits_for_the_stream_is_never_offered() -> None:
    shard = ShardDriver(live=False)
    shard.submit("a")
    write = only(shard.feed(CaughtUp()), WriteRecord)
    revision = shard.next()
    assert of_kind(shard.feed(RecordWritten("t1", 1, revision)), SendAssignment) == []
    only(shard.feed(CancelRequested(1, "t1", "changed my mind")), EndTask)
    assert of_kind(shard.feed(RecordStored(write.record, revision)), SendAssignment) == []
