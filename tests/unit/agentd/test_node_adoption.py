"""The node's core takes over what workers of an earlier agentd run."""

from __future__ import annotations

from agentd.core.node import Node
from agentd.core.node_io import (
    Adopted,
    AnswerInventory,
    AppendJournal,
    InventoryAsked,
    JournalOpened,
    OpenJournal,
    PublishEvents,
    Registered,
    RunOn,
    StepsOffered,
    ToWorker,
    WorkerGone,
    WorkerReady,
)
from corefleet.messages.links import RunResumed, StepsAppended
from corefleet.messages.records import Step
from corefleet.messages.wire import Assignment, HeldAttempt, InventoryQuery
from tests.unit.agentd.test_node import PLACE, STEP, TASK, Bench, assignment, over


def adopting(worker: str = "w1") -> tuple[Bench, Assignment]:
    bench = Bench(workers=(worker,))
    item = assignment()
    (opening,) = bench.does(Adopted(worker, item))
    assert opening == OpenJournal(item, adopted=True)
    return bench, item


def test_an_adopted_attempt_goes_on_where_its_journal_says() -> None:
    bench, item = adopting()
    assert bench.used() == 1
    assert bench.node.held() == (HeldAttempt(TASK, 1),)
    (resumed,) = bench.does(JournalOpened(TASK, 1, (STEP,)))
    assert resumed == ToWorker("w1", RunResumed(task=TASK, attempt=1))
    known, said = bench.does(StepsOffered("w1", TASK, 1, (STEP,), ()))
    assert known == PublishEvents("c1", TASK, ())
    assert said == ToWorker("w1", StepsAppended(task=TASK, attempt=1))
    new = Step(step=1, kind="publish")
    assert bench.does(StepsOffered("w1", TASK, 1, (new,), ())) == [AppendJournal(item, (new,))]
    assert bench.offer(item).accepted, "its owner may ask again"


def test_an_adopted_attempt_whose_worker_dies_while_it_is_opened_goes_to_another() -> None:
    bench, item = adopting()
    bench.does(WorkerReady("w2", PLACE))
    bench.does(WorkerGone("w1", "killed"))
    assert bench.does(JournalOpened(TASK, 1, (STEP,))) == [RunOn("w2", item, (STEP,))]
    assert bench.used() == 1


def test_an_adopted_attempt_of_another_epoch_or_called_absent_is_dropped() -> None:
    bench = Bench()
    (frame,) = over(bench.does(Adopted("w1", assignment(epoch=2))))
    assert frame.outcome == "dropped"
    query = InventoryQuery(shard=1, owner_epoch=1, held=(HeldAttempt(TASK, 1),))
    bench.does(InventoryAsked(query))
    (frame,) = over(bench.does(Adopted("w1", assignment())))
    assert frame.outcome == "dropped"
    assert bench.used() == 0


def test_before_it_is_registered_the_node_calls_nothing_absent() -> None:
    node = Node("n1")
    query = InventoryQuery(shard=1, owner_epoch=1, held=(HeldAttempt(TASK, 1),))
    (answer,) = node.handle(InventoryAsked(query), 100.0)
    assert isinstance(answer, AnswerInventory)
    assert answer.answer.absent == ()
    node.handle(Registered(3), 100.0)
    node.handle(WorkerReady("w1", PLACE), 100.0)
    assert node.handle(Adopted("w1", assignment()), 100.0) == [
        OpenJournal(assignment(), adopted=True)
    ]
