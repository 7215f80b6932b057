"""The node's core under any order of events: slots balance, nothing runs twice, all ends."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentd.core.node import RETURN_FOR_S, WAIT_FOR_WORKER_S
from agentd.core.node_io import (
    Answer,
    AppendJournal,
    CannotGoOn,
    CloseJournal,
    Dropped,
    EpochLost,
    FinishAsked,
    FinishJournal,
    JournalAppended,
    JournalFinished,
    JournalLost,
    JournalOpened,
    NodeAction,
    NodeTick,
    Offered,
    OpenJournal,
    Place,
    Registered,
    ReturnAsked,
    RunOn,
    StepsOffered,
    ToWorker,
    WorkerGone,
    WorkerReady,
    YieldAsked,
)
from corefleet.messages.links import AttemptOver, FinishTask, YieldTask
from corefleet.messages.records import Step
from tests.unit.agentd.test_node import Bench, assignment, over

Key = tuple[str, int]
tasks = st.integers(0, 4).map(lambda n: f"1-0000000000000000000000000{n}")
SLOTS = 3


class NodeMachine(RuleBasedStateMachine):
    """Workers, journals and owners that do anything they may."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(workers=(), slots=SLOTS)
        self.running: dict[Key, str] = {}
        """What workers hold, as they were told."""
        self.opening: list[Key] = []
        self.appending: list[Key] = []
        self.finishing: list[Key] = []
        self.accepted: set[Key] = set()
        self.denied: set[Key] = set()
        self.workers: list[str] = []
        self.named = 0
        self.epoch = 3

    def do(self, actions: list[NodeAction]) -> None:
        for action in actions:
            match action:
                case Answer(answer=answer):
                    key = (answer.task, answer.attempt)
                    if answer.accepted:
                        assert key not in self.denied
                        self.accepted.add(key)
                    elif "epoch" not in answer.reason:
                        self.denied.add(key)
                case RunOn(worker=worker, item=item):
                    key = (item.record.task, item.record.attempt)
                    assert worker in self.workers
                    assert key in self.accepted
                    assert all(held[0] != key[0] for held in self.running)
                    self.running[key] = worker
                case ToWorker(worker=worker, frame=AttemptOver(task=task, attempt=attempt)):
                    if self.running.get((task, attempt)) == worker:
                        del self.running[(task, attempt)]
                case ToWorker(worker=worker, frame=YieldTask(task=task, attempt=attempt)):
                    assert self.running[(task, attempt)] == worker
                case OpenJournal(item=item):
                    self.opening.append((item.record.task, item.record.attempt))
                case AppendJournal(item=item):
                    self.appending.append((item.record.task, item.record.attempt))
                case FinishJournal(item=item):
                    self.finishing.append((item.record.task, item.record.attempt))
                case CloseJournal(task=task, attempt=attempt):
                    assert (task, attempt) in self.accepted

    @rule(task=tasks, attempt=st.integers(1, 3))
    def offer(self, task: str, attempt: int) -> None:
        self.do(self.bench.does(Offered(assignment(task, attempt, epoch=self.epoch))))

    @rule(task=tasks, attempt=st.integers(1, 3))
    def drop(self, task: str, attempt: int) -> None:
        self.do(self.bench.does(Dropped(task, attempt, "an owner says so")))
        self.denied |= {(task, n) for n in range(1, attempt + 1)} - self.accepted

    @rule(task=tasks, attempt=st.integers(1, 3))
    def owner_wants_it_back(self, task: str, attempt: int) -> None:
        actions = self.bench.does(YieldAsked(task, attempt, "the node is drained"))
        assert all(frame.outcome == "returned" for frame in over(actions))
        assert not any(isinstance(a, RunOn) for a in actions)
        self.do(actions)

    @rule()
    def worker_comes(self) -> None:
        self.named += 1
        worker = f"w{self.named}"
        self.workers.append(worker)
        self.do(self.bench.does(WorkerReady(worker, Place("pool", 0))))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def worker_dies(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        self.workers.remove(worker)
        self.running = {key: at for key, at in self.running.items() if at != worker}
        self.do(self.bench.does(WorkerGone(worker, "killed")))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), what=st.sampled_from(["append", "finish", "return"]))
    def worker_speaks(self, data: st.DataObject, what: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.running)))
        worker = self.running[key]
        if key in self.appending or key in self.finishing:
            return
        if what == "append":
            step = Step(step=0, kind="publish")
            self.do(self.bench.does(StepsOffered(worker, *key, (step,), ())))
        elif what == "finish":
            finish = FinishTask(task=key[0], attempt=key[1])
            self.do(self.bench.does(FinishAsked(worker, finish)))
        else:
            self.do(self.bench.does(ReturnAsked(worker, *key, "enough")))

    @precondition(lambda self: self.opening or self.appending or self.finishing)
    @rule(data=st.data(), how=st.sampled_from(["done", "lost", "failed"]))
    def journal_answers(self, data: st.DataObject, how: str) -> None:
        waiting = [queue for queue in (self.opening, self.appending, self.finishing) if queue]
        queue = data.draw(st.sampled_from(waiting))
        key = queue.pop(0)
        if how == "lost":
            self.do(self.bench.does(JournalLost(*key, "fenced")))
        elif how == "failed":
            self.do(self.bench.does(CannotGoOn(*key, "NATS is away")))
        elif queue is self.opening:
            self.do(self.bench.does(JournalOpened(*key, ())))
        elif queue is self.appending:
            self.do(self.bench.does(JournalAppended(*key)))
        else:
            self.do(self.bench.does(JournalFinished(*key)))

    @rule(seconds=st.sampled_from([0.3, WAIT_FOR_WORKER_S + 1, RETURN_FOR_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.bench.now += seconds
        self.do(self.bench.does(NodeTick()))

    @rule()
    def epoch_is_lost(self) -> None:
        self.do(self.bench.does(EpochLost("declared lost")))
        assert not self.running
        self.epoch += 1
        self.do(self.bench.does(Registered(self.epoch)))

    @invariant()
    def slots_are_those_of_the_attempts_held(self) -> None:
        node = self.bench.node
        (slot,) = node.slots()
        assert slot.used == len(node.held()) == sum(node.counts())
        assert 0 <= slot.used <= SLOTS

    @invariant()
    def what_workers_hold_is_held(self) -> None:
        held = {(h.task, h.attempt) for h in self.bench.node.held()}
        assert set(self.running) <= held


TestNodeMachine = NodeMachine.TestCase
TestNodeMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
