"""The node's core: answers, attempts, workers' deaths and the ends of attempts."""

from __future__ import annotations

import pytest

from agentd.core import node as node_module
from agentd.core.answers import KEPT_S
from agentd.core.attempt import TABLE, Attempt
from agentd.core.node import MOST_WORKER_DEATHS, Node
from agentd.core.node_io import (
    Answer,
    AnswerInventory,
    AppendJournal,
    CannotGoOn,
    CloseJournal,
    Draining,
    Dropped,
    EngineUsable,
    EpochLost,
    EventsEmitted,
    FinishAsked,
    FinishJournal,
    InventoryAsked,
    JournalAppended,
    JournalFinished,
    JournalLost,
    JournalOpened,
    JournalRefused,
    NodeAction,
    NodeEvent,
    NodeTick,
    Offered,
    OpenJournal,
    Place,
    PlaceSpec,
    PlacesSet,
    PublishEvents,
    PublishReturned,
    Registered,
    ReturnAsked,
    RunOn,
    StepsOffered,
    ToWorker,
    WorkerGone,
    WorkerLeaving,
    WorkerReady,
)
from corefleet.errors import IllegalTransition
from corefleet.messages.links import AttemptOver, FinishTask, StepsAppended
from corefleet.messages.records import Failure, Step, TaskRecord
from corefleet.messages.wire import (
    AssignAnswer,
    Assignment,
    HeldAttempt,
    InventoryQuery,
    TokenText,
)

PLACE = Place("pool", 0)
TASK = "1-00000000000000000000000000"
STEP = Step(step=0, kind="publish")


def assignment(
    task: str = TASK,
    attempt: int = 1,
    pool: str = "pool",
    domain: int = 0,
    epoch: int = 3,
    owner_epoch: int = 1,
    node: str = "n1",
) -> Assignment:
    record = TaskRecord(
        task=task,
        pool=pool,
        session="s",
        request_id="r",
        input="",
        attempt=attempt,
        node=node,
        node_epoch=epoch,
        domain=domain,
        owner_epoch=owner_epoch,
        origin="c1",
    )
    return Assignment(record=record, revision=7, create_seq=7)


class Bench:
    """A node with two slots and a worker `w1`, with a clock that is set by hand."""

    def __init__(self, workers: tuple[str, ...] = ("w1",), slots: int = 2) -> None:
        self.node = Node("n1")
        self.now = 100.0
        self.does(Registered(3))
        self.does(PlacesSet({PLACE: PlaceSpec(slots, 1, 120.0, "m")}))
        for worker in workers:
            self.does(WorkerReady(worker, PLACE))

    def does(self, event: NodeEvent) -> list[NodeAction]:
        return self.node.handle(event, self.now)

    def offer(self, item: Assignment) -> AssignAnswer:
        (answer,) = (a.answer for a in self.does(Offered(item)) if isinstance(a, Answer))
        return answer

    def used(self) -> int:
        return self.node.slots()[0].used


def over(actions: list[NodeAction]) -> list[AttemptOver]:
    return [
        a.frame for a in actions if isinstance(a, ToWorker) and isinstance(a.frame, AttemptOver)
    ]


def test_a_first_attempt_runs_at_once_and_ends() -> None:
    bench = Bench()
    item = assignment()
    answer, run = bench.does(Offered(item))
    assert answer == Answer(AssignAnswer(TASK, 1, accepted=True))
    assert run == RunOn("w1", item, ())
    assert bench.used() == 1
    assert bench.does(StepsOffered("w1", TASK, 1, (STEP,), ())) == [AppendJournal(item, (STEP,))]
    assert bench.does(JournalAppended(TASK, 1)) == [
        ToWorker("w1", StepsAppended(task=TASK, attempt=1))
    ]
    finish = FinishTask(task=TASK, attempt=1, output="x")
    assert bench.does(FinishAsked("w1", finish)) == [FinishJournal(item, finish, (STEP,))]
    told, closed = bench.does(JournalFinished(TASK, 1))
    assert over([told])[0].outcome == "finished"
    assert closed == CloseJournal(TASK, 1)
    assert bench.used() == 0
    assert bench.node.counts() == (0, 0)
    assert bench.offer(item) == AssignAnswer(TASK, 1, accepted=True)
    assert bench.used() == 0


def test_a_later_attempt_reads_its_journal_first() -> None:
    bench = Bench()
    item = assignment(attempt=2)
    assert bench.does(Offered(item))[1:] == [OpenJournal(item)]
    assert bench.node.counts() == (0, 1)
    assert bench.does(JournalOpened(TASK, 2, (STEP,))) == [RunOn("w1", item, (STEP,))]


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (assignment(pool="other"), "pool other is not offered here"),
        (assignment(domain=1), "pool pool is not offered in domain 1"),
        (assignment(epoch=2), "meant for epoch 2, this is 3"),
        (assignment(node="n2"), "meant for node n2"),
    ],
)
def test_refusals_name_the_reason(item: Assignment, reason: str) -> None:
    answer = Bench().offer(item)
    assert not answer.accepted
    assert reason in answer.reason


def test_a_full_node_refuses_and_goes_on_refusing_that_attempt() -> None:
    bench = Bench(slots=1)
    bench.offer(assignment())
    other = assignment("1-00000000000000000000000001")
    assert "all 1 slots" in bench.offer(other).reason
    bench.does(Dropped(TASK, 1, "cancelled"))
    assert bench.used() == 0
    assert not bench.offer(other).accepted


def test_rule_9_a_lower_owner_epoch_is_refused_and_forgotten() -> None:
    bench = Bench(slots=3)
    bench.offer(assignment(owner_epoch=5))
    late = assignment("1-00000000000000000000000001", owner_epoch=4)
    assert "owner epoch 4 of shard 1 is over" in bench.offer(late).reason
    renewed = assignment("1-00000000000000000000000001", owner_epoch=5)
    assert bench.offer(renewed).accepted
    assert bench.offer(assignment("2-00000000000000000000000000", owner_epoch=1)).accepted


def test_rule_9_the_same_attempt_gets_the_same_answer_and_a_denied_one_stays_denied() -> None:
    bench = Bench()
    assert bench.offer(assignment()).accepted
    assert bench.offer(assignment()).accepted
    assert bench.used() == 1
    bench.does(Dropped(TASK, 1, "requeued"))
    assert bench.offer(assignment()) == AssignAnswer(TASK, 1, accepted=False, reason="requeued")
    assert bench.offer(assignment(attempt=2)).accepted
    assert not bench.offer(assignment()).accepted
    bench.does(Dropped("9-00000000000000000000000000", 4, "cancelled"))
    assert not bench.offer(assignment("9-00000000000000000000000000", attempt=3)).accepted


def test_answers_are_forgotten_after_a_while() -> None:
    bench = Bench(workers=())
    bench.offer(assignment())
    bench.now += KEPT_S + 1
    bench.does(NodeTick())
    bench.does(WorkerReady("w1", PLACE))
    assert bench.offer(assignment()).accepted


def test_a_newer_attempt_here_ends_the_older_one() -> None:
    bench = Bench()
    bench.offer(assignment())
    actions = bench.does(Offered(assignment(attempt=2)))
    assert over(actions)[0].attempt == 1
    assert bench.used() == 1
    assert bench.does(StepsOffered("w1", TASK, 1, (STEP,), ())) == [
        ToWorker(
            "w1",
            AttemptOver(task=TASK, attempt=1, outcome="dropped", reason="not with this worker"),
        )
    ]


def test_a_dead_workers_attempts_go_to_the_spare_with_their_committed_steps() -> None:
    bench = Bench(workers=("w1", "w2"))
    item = assignment()
    assert bench.does(Offered(item))[1] == RunOn("w1", item, ())
    bench.does(StepsOffered("w1", TASK, 1, (STEP,), ()))
    bench.does(JournalAppended(TASK, 1))
    assert bench.does(WorkerGone("w1", "killed")) == [RunOn("w2", item, (STEP,))]
    assert bench.does(WorkerGone("w1", "killed")) == []
    assert bench.used() == 1


def test_an_append_under_way_is_waited_for_before_the_spare_goes_on() -> None:
    bench = Bench(workers=("w1", "w2"))
    item = assignment()
    bench.does(Offered(item))
    bench.does(StepsOffered("w1", TASK, 1, (STEP,), ()))
    assert bench.does(WorkerGone("w1", "killed")) == []
    assert bench.does(JournalAppended(TASK, 1)) == [RunOn("w2", item, (STEP,))]


def test_an_end_under_way_needs_no_worker() -> None:
    bench = Bench(workers=("w1", "w2"))
    bench.does(Offered(assignment()))
    bench.does(FinishAsked("w1", FinishTask(task=TASK, attempt=1)))
    assert bench.does(WorkerGone("w1", "killed")) == []
    assert bench.does(JournalFinished(TASK, 1)) == [CloseJournal(TASK, 1)]
    assert bench.used() == 0


def test_an_end_waits_for_the_append_before_it() -> None:
    bench = Bench()
    item = assignment()
    bench.does(Offered(item))
    bench.does(StepsOffered("w1", TASK, 1, (STEP,), ()))
    finish = FinishTask(task=TASK, attempt=1)
    assert bench.does(FinishAsked("w1", finish)) == []
    assert bench.does(JournalAppended(TASK, 1)) == [FinishJournal(item, finish, (STEP,))]


def test_an_attempt_that_outlived_three_workers_is_given_back() -> None:
    bench = Bench(workers=("w1", "w2", "w3", "w4"))
    bench.does(Offered(assignment()))
    for number in range(1, MOST_WORKER_DEATHS):
        assert isinstance(bench.does(WorkerGone(f"w{number}", "killed"))[0], RunOn)
    closed, returned = bench.does(WorkerGone("w3", "killed by SIGSEGV"))
    assert closed == CloseJournal(TASK, 1)
    assert isinstance(returned, PublishReturned)
    assert "SIGSEGV" in returned.returned.reason
    assert bench.used() == 0
    assert not bench.offer(assignment()).accepted


def test_without_any_worker_an_attempt_waits_then_goes_back() -> None:
    bench = Bench()
    item = assignment()
    bench.does(Offered(item))
    assert bench.does(WorkerGone("w1", "killed")) == []
    assert bench.node.slots()[0].total == 0
    assert bench.does(WorkerReady("w2", PLACE)) == [RunOn("w2", item, ())]
    bench.does(WorkerGone("w2", "killed"))
    bench.now += node_module.WAIT_FOR_WORKER_S + 1
    assert isinstance(bench.does(NodeTick())[-1], PublishReturned)


def test_a_leaving_worker_goes_on_and_takes_nothing_new() -> None:
    bench = Bench(workers=("w1", "w2"))
    bench.does(Offered(assignment()))
    bench.does(WorkerLeaving("w1"))
    other = assignment("1-00000000000000000000000001")
    assert bench.does(Offered(other))[1] == RunOn("w2", other, ())
    finish = FinishTask(task=TASK, attempt=1)
    assert isinstance(bench.does(FinishAsked("w1", finish))[0], FinishJournal)
    assert over(bench.does(JournalFinished(TASK, 1)))[0].outcome == "finished"


def test_spares_take_nothing_while_enough_are_at_work() -> None:
    bench = Bench(workers=("w1", "w2"))
    for number in range(2):
        item = assignment(f"1-0000000000000000000000000{number}")
        assert bench.does(Offered(item))[1] == RunOn("w1", item, ())


def test_a_returned_attempt_is_told_again_until_the_owner_knows() -> None:
    bench = Bench()
    bench.does(Offered(assignment()))
    actions = bench.does(ReturnAsked("w1", TASK, 1, "no engine"))
    assert over(actions)[0].outcome == "returned"
    assert isinstance(actions[-1], PublishReturned)
    assert bench.used() == 0
    assert bench.does(NodeTick()) == []
    bench.now += node_module.RETURN_EVERY_S + 0.1
    (repeated,) = bench.does(NodeTick())
    assert repeated == actions[-1]
    bench.does(Dropped(TASK, 1, "known"))
    bench.now += node_module.RETURN_EVERY_S + 0.1
    assert bench.does(NodeTick()) == []


def test_a_return_is_not_told_for_ever() -> None:
    bench = Bench()
    bench.does(Offered(assignment()))
    bench.does(ReturnAsked("w1", TASK, 1, "no engine"))
    bench.now += node_module.RETURN_FOR_S + 1
    assert bench.does(NodeTick()) == []
    assert not bench.offer(assignment()).accepted


def test_rule_8_an_inventory_names_what_is_not_here_and_that_is_never_taken() -> None:
    bench = Bench()
    bench.does(Offered(assignment()))
    gone = "1-00000000000000000000000009"
    held = (HeldAttempt(TASK, 1), HeldAttempt(gone, 2))
    (answer,) = bench.does(InventoryAsked(InventoryQuery(shard=1, owner_epoch=2, held=held)))
    assert isinstance(answer, AnswerInventory)
    assert answer.answer.node_epoch == 3
    assert answer.answer.absent == (HeldAttempt(gone, 2),)
    late = assignment(gone, attempt=2, owner_epoch=2)
    assert not bench.offer(late).accepted
    assert bench.offer(assignment(gone, attempt=3, owner_epoch=2)).accepted


def test_rule_8_a_returned_attempt_is_absent() -> None:
    bench = Bench()
    bench.does(Offered(assignment()))
    bench.does(ReturnAsked("w1", TASK, 1, "no engine"))
    query = InventoryQuery(shard=1, owner_epoch=1, held=(HeldAttempt(TASK, 1),))
    answer = bench.does(InventoryAsked(query))[-1]
    assert isinstance(answer, AnswerInventory)
    assert answer.answer.absent == (HeldAttempt(TASK, 1),)
    bench.now += node_module.RETURN_EVERY_S + 0.1
    assert bench.does(NodeTick()) == []


def test_an_old_owners_inventory_changes_nothing() -> None:
    bench = Bench()
    bench.does(Offered(assignment(owner_epoch=4)))
    query = InventoryQuery(shard=1, owner_epoch=3, held=(HeldAttempt(TASK, 9),))
    (answer,) = bench.does(InventoryAsked(query))
    assert isinstance(answer, AnswerInventory)
    assert answer.answer.absent == ()


def test_a_lost_fence_drops_the_attempt() -> None:
    bench = Bench()
    bench.does(Offered(assignment()))
    bench.does(StepsOffered("w1", TASK, 1, (STEP,), ()))
    actions = bench.does(JournalLost(TASK, 1, "fenced"))
    assert over(actions)[0].outcome == "dropped"
    assert bench.used() == 0
    assert bench.does(JournalAppended(TASK, 1)) == []


def test_a_journal_that_cannot_be_written_gives_the_attempt_back() -> None:
    bench = Bench()
    bench.does(Offered(assignment()))
    bench.does(FinishAsked("w1", FinishTask(task=TASK, attempt=1)))
    actions = bench.does(CannotGoOn(TASK, 1, "NATS is away"))
    assert over(actions)[0].outcome == "returned"
    assert isinstance(actions[-1], PublishReturned)


def test_what_can_never_be_stored_fails_the_task_and_then_gives_up() -> None:
    bench = Bench()
    item = assignment()
    bench.does(Offered(item))
    bench.does(StepsOffered("w1", TASK, 1, (STEP,), ()))
    (ending,) = bench.does(JournalRefused(TASK, 1, "payload: 2 MB"))
    assert isinstance(ending, FinishJournal)
    assert ending.finish.failure == Failure("agent_error", "payload: 2 MB")
    assert ending.steps == ()
    assert isinstance(bench.does(JournalRefused(TASK, 1, "again"))[-1], PublishReturned)


def test_events_are_published_once_their_append_is_durable() -> None:
    bench = Bench()
    bench.does(Offered(assignment()))
    token = TokenText(task=TASK, step=0, text="a")
    bench.does(StepsOffered("w1", TASK, 1, (STEP,), (token,)))
    told = bench.does(JournalAppended(TASK, 1))[0]
    assert told == PublishEvents("c1", TASK, (token,))
    assert bench.does(EventsEmitted("w1", TASK, 1, (token,))) == [told]
    assert bench.does(EventsEmitted("w2", TASK, 1, (token,))) == []


def test_two_appends_at_once_are_a_breach() -> None:
    bench = Bench()
    bench.does(Offered(assignment()))
    bench.does(StepsOffered("w1", TASK, 1, (STEP,), ()))
    actions = bench.does(StepsOffered("w1", TASK, 1, (STEP,), ()))
    assert isinstance(actions[-1], PublishReturned)


def test_a_lost_epoch_drops_all_and_refuses_until_registered_anew() -> None:
    bench = Bench()
    bench.does(Offered(assignment()))
    assert over(bench.does(EpochLost("declared lost")))[0].outcome == "dropped"
    assert bench.node.held() == ()
    assert not bench.offer(assignment("1-00000000000000000000000001")).accepted
    bench.does(Registered(4))
    assert bench.offer(assignment("1-00000000000000000000000001", epoch=4)).accepted
    assert not bench.offer(assignment("1-00000000000000000000000002", epoch=3)).accepted


def test_a_draining_node_takes_nothing_and_gives_back_what_has_not_begun() -> None:
    bench = Bench()
    bench.does(Offered(assignment(attempt=2)))
    assert isinstance(bench.does(Draining("agentd stops"))[-1], PublishReturned)
    assert "agentd stops" in bench.offer(assignment("1-00000000000000000000000001")).reason
    assert bench.does(JournalOpened(TASK, 2, ())) == []


def test_a_pool_whose_engine_does_not_start_is_not_offered() -> None:
    bench = Bench()
    bench.does(EngineUsable("m", 0, usable=False))
    assert bench.node.slots()[0].total == 0
    assert "engine of model m" in bench.offer(assignment()).reason
    bench.does(EngineUsable("m", 0, usable=True))
    assert bench.node.slots()[0].total == 2


def test_slow_tasks_are_those_without_progress_for_half_their_limit() -> None:
    bench = Bench()
    bench.does(Offered(assignment()))
    bench.now += 59.0
    assert bench.node.slow(bench.now) == ()
    bench.now += 2.0
    (slow,) = bench.node.slow(bench.now)
    assert (slow.task, slow.attempt, slow.progress_age_s) == (TASK, 1, 61.0)
    bench.does(StepsOffered("w1", TASK, 1, (STEP,), ()))
    bench.does(JournalAppended(TASK, 1))
    assert bench.node.slow(bench.now) == ()


def test_an_illegal_move_raises_with_the_attempts_story() -> None:
    attempt = Attempt(assignment(), PLACE, 0.0)
    with pytest.raises(IllegalTransition, match="opening -> finishing; story: attempt 1"):
        attempt.move("finishing")
    assert ("over", "opening") not in TABLE
