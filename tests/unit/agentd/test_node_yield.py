"""The node's core gives attempts back whose owner wants them: for a drain, or for others."""

from __future__ import annotations

import pytest

from agentd.core.node_io import (
    Adopted,
    FinishAsked,
    JournalAppended,
    JournalFinished,
    JournalOpened,
    NodeAction,
    Offered,
    OpenJournal,
    PublishReturned,
    ReturnAsked,
    RunOn,
    StepsOffered,
    ToWorker,
    WorkerGone,
    WorkerReady,
    YieldAsked,
)
from corefleet.messages.links import FinishTask, RunResumed, YieldTask
from tests.unit.agentd.test_node import PLACE, STEP, TASK, Bench, assignment, over

WANTED = YieldAsked(TASK, 1, "node n1 is drained")
ASKED = YieldTask(task=TASK, attempt=1, reason="node n1 is drained")


def returned(actions: list[NodeAction]) -> list[str]:
    return [a.returned.reason for a in actions if isinstance(a, PublishReturned)]


def test_a_running_attempt_goes_on_until_its_worker_returns_it() -> None:
    bench = Bench()
    bench.offer(assignment())
    assert bench.does(WANTED) == [ToWorker("w1", ASKED)]
    assert bench.does(WANTED) == [ToWorker("w1", ASKED)], "its owner may ask again"
    bench.does(StepsOffered("w1", TASK, 1, (STEP,), ()))
    bench.does(JournalAppended(TASK, 1))
    assert bench.used() == 1
    told = bench.does(ReturnAsked("w1", TASK, 1, "node n1 is drained"))
    assert returned(told) == ["node n1 is drained"]
    assert bench.used() == 0
    answer = bench.offer(assignment())
    assert (answer.accepted, answer.reason) == (False, "given back: node n1 is drained")


def test_what_no_worker_has_begun_is_given_back_at_once() -> None:
    bench = Bench()
    bench.does(Offered(assignment(attempt=2)))
    told = bench.does(YieldAsked(TASK, 2, "enough"))
    assert returned(told) == ["enough"]
    assert not bench.does(JournalOpened(TASK, 2, ())), "no worker begins it any more"
    assert bench.used() == 0


def test_an_end_under_way_is_left_alone() -> None:
    bench = Bench()
    bench.offer(assignment())
    bench.does(FinishAsked("w1", FinishTask(task=TASK, attempt=1)))
    assert bench.does(WANTED) == []
    assert over(bench.does(JournalFinished(TASK, 1)))[0].outcome == "finished"


@pytest.mark.parametrize("other", [YieldAsked(TASK, 2, "r"), YieldAsked("1-other", 1, "r")])
def test_an_attempt_that_is_not_here_is_no_matter(other: YieldAsked) -> None:
    bench = Bench()
    bench.offer(assignment())
    assert bench.does(other) == []
    assert bench.used() == 1


def test_no_other_worker_goes_on_with_it_when_its_own_dies() -> None:
    bench = Bench(workers=("w1", "w2"))
    bench.offer(assignment())
    bench.does(WANTED)
    told = bench.does(WorkerGone("w1", "killed"))
    assert returned(told) == ["node n1 is drained"]
    assert bench.used() == 0


def test_an_append_that_its_dead_worker_left_under_way_is_waited_for() -> None:
    bench = Bench(workers=("w1", "w2"))
    bench.offer(assignment())
    bench.does(StepsOffered("w1", TASK, 1, (STEP,), ()))
    bench.does(WorkerGone("w1", "killed"))
    assert bench.does(WANTED) == []
    assert returned(bench.does(JournalAppended(TASK, 1))) == ["node n1 is drained"]


def test_an_adopted_attempt_is_asked_once_its_worker_is_known_to_run_it() -> None:
    bench = Bench()
    item = assignment()
    assert bench.does(Adopted("w1", item)) == [OpenJournal(item, adopted=True)]
    assert bench.does(WANTED) == [], "its worker may be in the middle of a step"
    assert bench.does(JournalOpened(TASK, 1, ())) == [
        ToWorker("w1", RunResumed(task=TASK, attempt=1)),
        ToWorker("w1", ASKED),
    ]


def test_the_next_attempt_may_come_back_here() -> None:
    bench = Bench()
    bench.offer(assignment())
    bench.does(WANTED)
    bench.does(ReturnAsked("w1", TASK, 1, "r"))
    bench.does(Offered(assignment(attempt=2)))
    opened = bench.does(JournalOpened(TASK, 2, (STEP,)))
    assert opened == [RunOn("w1", assignment(attempt=2), (STEP,))]
    bench.does(WorkerReady("w3", PLACE))
    assert bench.used() == 1
