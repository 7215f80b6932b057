"""Rule 3: an attempt decides its task's end in the record, then carries it out."""

from __future__ import annotations

from msgspec.structs import replace

from controld.core.shard_io import NodeGone, RecordStored, SendAssignment, WriteRecord
from corefleet.messages.records import Ending, LostNode, TaskRecord
from tests.unit.controld.core.driving import ShardDriver, of_kind, only

ENDING = Ending(state="done", result=b"r")


def decide(shard: ShardDriver, record: TaskRecord) -> int:
    """The node's decision shows in the stream; return its sequence."""
    sequence = shard.next()
    assert shard.feed(RecordStored(replace(record, ending=ENDING), sequence)) == []
    return sequence


def test_rule_3_a_decided_end_is_no_reason_to_offer_the_attempt_again() -> None:
    shard = ShardDriver()
    record = shard.run()
    decide(shard, record)
    assert shard.core.states() == {"t1": "running"}
    shard.done(record)
    assert shard.core.states() == {}


def test_rule_3_an_end_decided_before_the_offers_answer_counts_as_accepted() -> None:
    shard = ShardDriver()
    offer = only(shard.written(only(shard.submit(), WriteRecord)), SendAssignment)
    decide(shard, offer.assignment.record)
    assert shard.core.states() == {"t1": "running"}
    assert of_kind(shard.wait(60.0), SendAssignment) == []
    assert shard.core.check() == []


def test_rule_3_a_decided_end_goes_with_the_task_when_its_node_dies() -> None:
    shard = ShardDriver()
    record = shard.run()
    sequence = decide(shard, record)
    shard.fleet.lost(LostNode(node=record.node, epoch=1, reason="silent"), shard.now)
    write = only(shard.feed(NodeGone(record.node, 1, "silent")), WriteRecord)
    assert write.expected == sequence
    assert write.record.ending == ENDING
    assert write.record.attempt == 2
