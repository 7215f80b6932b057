"""The shell around the node's core, over the in-memory bus and log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from agentd.attempts import Attempts
from agentd.core.node import Node
from agentd.core.node_io import Place, PlaceSpec, PlacesSet, Registered, WorkerReady
from corefleet.adapters.memory_bus import MemoryBus, MemoryServer
from corefleet.adapters.memory_log import MemoryLog
from corefleet.background import Background
from corefleet.bus import Entry, Incoming
from corefleet.clock import SystemClock
from corefleet.codec import decode, encode
from corefleet.errors import InvalidInput
from corefleet.journal import Journal, place
from corefleet.messages.links import (
    AppendSteps,
    AttemptOver,
    EmitEvents,
    FinishTask,
    Frame,
    MessageSent,
    ReturnTask,
    RunTask,
    SendMessage,
    StepsAppended,
)
from corefleet.messages.records import (
    ClusterSettings,
    ResultRecord,
    SessionHead,
    SessionState,
    Step,
    TaskRecord,
    Turn,
)
from corefleet.messages.wire import (
    AssignAnswer,
    AssignBatch,
    Assignment,
    EventBatch,
    StepEnded,
    SubmitAnswer,
    SubmitMessage,
    TaskEvent,
    TaskFinished,
    TaskReturned,
    TokenText,
)
from corefleet.subjects import ANY, CONTROL_SUBMIT, Layout, events_to, shard_returned

SETTINGS = ClusterSettings(shards=4, streams=1)
LAYOUT = Layout(4, 1)
TASK = "1-00000000000000000000000000"
STEP = Step(step=0, kind="publish", result=b"r", fingerprint=b"f")


class Scene:
    """One node `n1` with worker `w1`; frames and published messages are noted."""

    def __init__(self, server: MemoryServer, bus: MemoryBus, log: MemoryLog) -> None:
        self.server = server
        self.bus = bus
        self.log = log
        self.frames: list[Frame] = []
        self.events: list[TaskEvent] = []
        self.returned: list[TaskReturned] = []
        self.errors: list[BaseException] = []
        self.too_large = False
        self._news = asyncio.Event()
        self.background = Background(self.errors.append)
        self.node = Node("n1")
        self.attempts = Attempts(
            self.node,
            bus,
            lambda item: Journal(log, LAYOUT, item.record, item.revision),
            self,
            SystemClock(),
            self.background,
        )
        self.attempts.feed(Registered(1))
        self.attempts.feed(PlacesSet({Place("p", 0): PlaceSpec(4, 1, 120.0)}))
        self.attempts.feed(WorkerReady("w1", Place("p", 0)))

    def send(self, worker: str, frame: Frame) -> bool:
        if self.too_large and isinstance(frame, RunTask):
            raise InvalidInput("RunTask", 1 << 25, "less")
        self.frames.append(frame)
        self._news.set()
        return True

    def heard(self, message: Incoming) -> None:
        self.events += decode(message.payload, EventBatch).events
        self._news.set()

    def given_back(self, message: Incoming) -> None:
        self.returned.append(decode(message.payload, TaskReturned))
        self._news.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def frame(self, kind: type[Frame], count: int = 1) -> Frame:
        """Return the `count`-th frame of `kind` that a worker got."""

        def found() -> list[Frame]:
            return [frame for frame in self.frames if isinstance(frame, kind)]

        await self.until(lambda: len(found()) >= count)
        return found()[count - 1]

    async def placed(self, attempt: int = 1, before: Assignment | None = None) -> Assignment:
        record = TaskRecord(
            task=TASK,
            pool="p",
            session="s",
            request_id="r",
            input="hello",
            state="placed",
            origin="c1",
            attempt=attempt,
            node="n1",
            node_epoch=1,
            domain=0,
            owner_epoch=1,
        )
        if before is None:
            entry = Entry(LAYOUT.task(1, TASK), encode(record), fence_sequence=0)
            revision = await self.log.append(entry, 1.0)
        else:
            revision = await place(self.log, LAYOUT, record, before.revision)
        return Assignment(record=record, revision=revision, create_seq=1)

    def assign(self, *items: Assignment) -> list[AssignAnswer]:
        return self.attempts.assign(AssignBatch(controld="c1", items=items))


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    server = MemoryServer()
    bus = MemoryBus(server)
    log = MemoryLog(server)
    await log.ensure(SETTINGS)
    scene = Scene(server, bus, log)
    await bus.subscribe(events_to("c1"), scene.heard)
    await bus.subscribe(shard_returned(1, ANY), scene.given_back)
    yield scene
    await scene.attempts.settled(5.0)
    await scene.background.close()
    await bus.close()
    assert not scene.errors


async def test_a_task_is_journaled_told_and_ended(scene: Scene) -> None:
    item = await scene.placed()
    assert scene.assign(item) == [AssignAnswer(TASK, 1, accepted=True)]
    run = await scene.frame(RunTask)
    assert run == RunTask(record=item.record, revision=item.revision, create_seq=item.create_seq)
    told = StepEnded(task=TASK, step=STEP)
    scene.attempts.said("w1", AppendSteps(task=TASK, attempt=1, steps=(STEP,), events=(told,)))
    await scene.frame(StepsAppended)
    state = SessionState(history=(Turn("user", "hello"),))
    scene.attempts.said("w1", FinishTask(task=TASK, attempt=1, output="bye", state=state))
    over = await scene.frame(AttemptOver)
    assert isinstance(over, AttemptOver)
    assert over.outcome == "finished"
    await scene.until(lambda: len(scene.events) == 2)
    assert scene.events[0] == told
    finished = scene.events[1]
    assert isinstance(finished, TaskFinished)
    assert finished.result.output == "bye"
    assert finished.result.steps == (msgspec.structs.replace(STEP, result=b"", fingerprint=b""),)
    stored = await scene.log.last(LAYOUT.result(1, TASK), 1.0)
    assert stored is not None
    assert decode(stored.payload, ResultRecord) == finished.result
    head = await scene.log.last(LAYOUT.head(1, "p", "s"), 1.0)
    assert head is not None
    assert decode(head.payload, SessionHead) == SessionHead(
        pool="p", session="s", version=1, last_task=TASK, home_node="n1", home_domain=0, state=state
    )


async def test_a_later_attempt_goes_on_with_the_committed_steps(scene: Scene) -> None:
    first = await scene.placed()
    scene.assign(first)
    scene.attempts.said("w1", AppendSteps(task=TASK, attempt=1, steps=(STEP,)))
    await scene.frame(StepsAppended)
    second = await scene.placed(attempt=2, before=first)
    assert scene.assign(second)[0].accepted
    run = await scene.frame(RunTask, 2)
    assert isinstance(run, RunTask)
    assert run.journal == (STEP,)


async def test_rule_1_an_attempt_whose_record_moved_on_is_dropped(scene: Scene) -> None:
    first = await scene.placed()
    scene.assign(first)
    await scene.placed(attempt=2, before=first)
    scene.attempts.said("w1", AppendSteps(task=TASK, attempt=1, steps=(STEP,)))
    over = await scene.frame(AttemptOver)
    assert isinstance(over, AttemptOver)
    assert over.outcome == "dropped"
    assert scene.node.held() == ()


async def test_while_nats_is_away_appends_wait_and_nothing_is_lost(scene: Scene) -> None:
    scene.assign(await scene.placed())
    scene.server.reachable(False)
    scene.attempts.said("w1", AppendSteps(task=TASK, attempt=1, steps=(STEP,)))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not any(isinstance(frame, StepsAppended | AttemptOver) for frame in scene.frames)
    scene.server.reachable(True)
    await scene.frame(StepsAppended)


async def test_what_a_worker_gives_back_is_told_to_the_owner(scene: Scene) -> None:
    scene.assign(await scene.placed())
    scene.attempts.said("w1", ReturnTask(task=TASK, attempt=1, reason="no engine"))
    await scene.until(lambda: scene.returned)
    assert scene.returned[0].reason == "no engine"
    assert (scene.returned[0].node, scene.returned[0].node_epoch) == ("n1", 1)


async def test_tokens_pass_through(scene: Scene) -> None:
    scene.assign(await scene.placed())
    token = TokenText(task=TASK, step=0, text="a")
    scene.attempts.said("w1", EmitEvents(task=TASK, attempt=1, events=(token,)))
    await scene.until(lambda: scene.events)
    assert scene.events == [token]


async def test_an_attempt_too_large_for_a_worker_fails_with_the_reason(scene: Scene) -> None:
    scene.too_large = True
    scene.assign(await scene.placed())
    await scene.until(lambda: scene.events)
    finished = scene.events[0]
    assert isinstance(finished, TaskFinished)
    assert finished.result.failure is not None
    assert "too large for a worker's link" in finished.result.failure.message


async def test_a_message_is_submitted_until_it_is_taken(scene: Scene) -> None:
    asked: list[SubmitMessage] = []

    def answer(message: Incoming) -> None:
        asked.append(decode(message.payload, SubmitMessage))
        busy = SubmitAnswer(error="too much", retry_after_s=0.001)
        taken = SubmitAnswer(task="2-x", session="b")
        scene.bus.publish(message.reply, encode(busy if len(asked) == 1 else taken))

    await scene.bus.subscribe(CONTROL_SUBMIT, answer)
    scene.attempts.said(
        "w1", SendMessage(call=5, pool="p", session="b", request_id="t/1", input="hi")
    )
    assert await scene.frame(MessageSent) == MessageSent(call=5, task="2-x")
    assert [message.request_id for message in asked] == ["t/1", "t/1"]


async def test_a_message_that_is_refused_is_told_to_its_agent(scene: Scene) -> None:
    def answer(message: Incoming) -> None:
        scene.bus.publish(message.reply, encode(SubmitAnswer(error="unknown pool")))

    await scene.bus.subscribe(CONTROL_SUBMIT, answer)
    scene.attempts.said(
        "w1", SendMessage(call=5, pool="x", session="b", request_id="t/1", input="hi")
    )
    assert await scene.frame(MessageSent) == MessageSent(call=5, error="unknown pool")
