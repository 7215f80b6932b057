"""Assignments of one turn to one node go as one message, and each gets one answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from controld import assigner
from controld.assigner import Assigner
from controld.cluster import Cluster
from controld.core.shard_io import AssignAnswered, AssignUnanswered
from controld.gauges import make_gauges
from corefleet.adapters.memory_bus import MemoryBus, MemoryServer
from corefleet.background import Background
from corefleet.bus import Incoming
from corefleet.clock import SystemClock
from corefleet.codec import decode, encode
from corefleet.messages.records import ClusterSettings, TaskRecord
from corefleet.messages.wire import AssignAnswer, AssignAnswers, AssignBatch, Assignment
from corefleet.metrics import Metrics
from corefleet.subjects import Layout, node_assign


class Fixture:
    """An assigner, a node that keeps its batches, and what was answered."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []
        self.bus = MemoryBus(MemoryServer())
        self.background = Background(self.failures.append)
        cluster = Cluster(
            "c1", ClusterSettings(), Layout(16, 2), self.bus, None, None, SystemClock()  # type: ignore[arg-type]
        )  # fmt: skip
        self.assigner = Assigner(cluster, self.background, make_gauges(Metrics()))
        self.batches: list[AssignBatch] = []
        self.answered: list[AssignAnswered | AssignUnanswered] = []
        self.refused: set[str] = set()
        self.ignored: set[str] = set()

    async def listen(self) -> None:
        await self.bus.subscribe(node_assign("n1"), self._assigned)

    def offer(self, task: str, text: str = "") -> None:
        record = TaskRecord(task=task, pool="p", session="s", request_id="r", input=text)
        self.assigner.offer(
            "n1", Assignment(record=record, revision=1, create_seq=1), self.answered.append
        )

    async def settle(self) -> None:
        """Return when everything offered was answered."""
        await asyncio.sleep(0)
        await self.background.drained()

    def _assigned(self, message: Incoming) -> None:
        batch = decode(message.payload, AssignBatch)
        self.batches.append(batch)
        items = tuple(
            AssignAnswer(item.record.task, 0, item.record.task not in self.refused, "full")
            for item in batch.items
            if item.record.task not in self.ignored
        )
        self.bus.publish(message.reply, encode(AssignAnswers(items=items)))


@pytest.fixture
async def fixture() -> AsyncIterator[Fixture]:
    made = Fixture()
    yield made
    await made.bus.close()
    assert made.failures == []


async def test_one_turn_makes_one_message(fixture: Fixture) -> None:
    await fixture.listen()
    for number in range(5):
        fixture.offer(f"t{number}")
    await fixture.settle()
    assert [len(batch.items) for batch in fixture.batches] == [5]
    assert all(isinstance(each, AssignAnswered) for each in fixture.answered)


async def test_each_gets_its_own_answer(fixture: Fixture) -> None:
    await fixture.listen()
    fixture.refused, fixture.ignored = {"t1"}, {"t2"}
    for number in range(3):
        fixture.offer(f"t{number}")
    await fixture.settle()
    accepted, refused, silent = fixture.answered
    assert isinstance(accepted, AssignAnswered)
    assert accepted.answer.accepted
    assert isinstance(refused, AssignAnswered)
    assert (refused.answer.accepted, refused.answer.reason) == (False, "full")
    assert silent == AssignUnanswered("n1", "t2", 0)


async def test_nobody_there_is_no_answer(fixture: Fixture) -> None:
    fixture.offer("t1")
    await fixture.settle()
    assert fixture.answered == [AssignUnanswered("n1", "t1", 0)]


async def test_a_message_stays_below_what_nats_carries(fixture: Fixture) -> None:
    await fixture.listen()
    for number in range(6):
        fixture.offer(f"t{number}", "x" * 200_000)
    await fixture.settle()
    assert [len(batch.items) for batch in fixture.batches] == [2, 2, 2]
    assert len(fixture.answered) == 6


async def test_a_batch_has_a_length(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assigner, "_ITEMS", 4)
    await fixture.listen()
    for number in range(10):
        fixture.offer(f"t{number}")
    await fixture.settle()
    assert [len(batch.items) for batch in fixture.batches] == [4, 4, 2]
