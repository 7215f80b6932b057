"""Attempts in motion: carries out what the node's core decides."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

import structlog

from agentd.core.ending import head_of, result_of
from agentd.core.node import Node
from agentd.core.node_io import (
    Answer,
    AnswerInventory,
    AppendJournal,
    CannotGoOn,
    CloseJournal,
    Dropped,
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
    Offered,
    OpenJournal,
    PublishEvents,
    PublishReturned,
    ReturnAsked,
    RunOn,
    StepsOffered,
    ToWorker,
    YieldAsked,
)
from corefleet.background import Background
from corefleet.bus import Bus
from corefleet.clock import Clock
from corefleet.codec import decode, encode
from corefleet.errors import (
    AttemptDropped,
    CorefleetError,
    CorruptRecord,
    Fenced,
    InvalidInput,
    NotFound,
    Unavailable,
)
from corefleet.ids import shard_of_task
from corefleet.journal import Journal
from corefleet.messages.links import (
    AppendSteps,
    EmitEvents,
    FinishTask,
    Frame,
    MessageSent,
    ReturnTask,
    RunTask,
    SendMessage,
    WorkerToAgentd,
)
from corefleet.messages.records import ResultRecord, TaskRecord
from corefleet.messages.wire import (
    AssignAnswer,
    AssignBatch,
    Assignment,
    DropAttempt,
    EventBatch,
    InventoryAnswer,
    InventoryQuery,
    SubmitAnswer,
    SubmitMessage,
    TaskEvent,
    TaskFinished,
    YieldAttempt,
)
from corefleet.subjects import CONTROL_SUBMIT, events, shard_returned

SUBMIT_S = 10.0
_SUBMIT_ANSWER_S = 2.0
_PAUSE_S = 0.2

_log = structlog.get_logger(__name__)


class Senders(Protocol):
    """The way to the workers."""

    def send(self, worker: str, frame: Frame) -> bool:
        """Queue a frame; False without a link. Raises InvalidInput for one too large."""


class Attempts:
    """The shell around the node's core: its events come in here, its actions go out."""

    def __init__(
        self,
        node: Node,
        bus: Bus,
        journal_of: Callable[[Assignment], Journal],
        senders: Senders,
        clock: Clock,
        background: Background,
    ) -> None:
        self._node = node
        self._bus = bus
        self._journal_of = journal_of
        self._senders = senders
        self._clock = clock
        self._background = background
        self._journals: dict[tuple[str, int], Journal] = {}
        self._answers: list[AssignAnswer] = []
        self._inventory = InventoryAnswer(node_epoch=0)
        self._writing = 0
        self._written = asyncio.Event()

    def feed(self, event: NodeEvent) -> None:
        """Give the core an event and do what it says."""
        for action in self._node.handle(event, self._clock.monotonic()):
            self._do(action)

    def assign(self, batch: AssignBatch) -> list[AssignAnswer]:
        """Offer each attempt to the core; return its answers."""
        for item in batch.items:
            self.feed(Offered(item))
        answers, self._answers = self._answers, []
        return answers

    def drop(self, drop: DropAttempt) -> None:
        """The attempt is over."""
        self.feed(Dropped(drop.task, drop.attempt, drop.reason))

    def yield_back(self, asked: YieldAttempt) -> None:
        """The attempt's owner wants it back at its next step boundary."""
        self.feed(YieldAsked(asked.task, asked.attempt, asked.reason))

    def inventory(self, query: InventoryQuery) -> InventoryAnswer:
        """Say which of an owner's attempts are not here."""
        self.feed(InventoryAsked(query))
        return self._inventory

    async def settled(self, timeout_s: float) -> None:
        """Return when no attempt is being ended or journaled, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._writing:
                    self._written.clear()
                    await self._written.wait()

    def said(self, worker: str, message: WorkerToAgentd) -> None:
        """Take a worker's frame."""
        match message:
            case FinishTask():
                self.feed(FinishAsked(worker, message))
            case AppendSteps(task=task, attempt=attempt, steps=steps, events=told):
                self.feed(StepsOffered(worker, task, attempt, steps, told))
            case EmitEvents(task=task, attempt=attempt, events=told):
                self.feed(EventsEmitted(worker, task, attempt, told))
            case ReturnTask(task=task, attempt=attempt, reason=reason):
                self.feed(ReturnAsked(worker, task, attempt, reason))
            case SendMessage():
                self._background.spawn(self._submit(worker, message), "submit")
            case _:
                _log.warning("Frame ignored", worker=worker, frame=type(message).__name__)

    def _do(self, action: NodeAction) -> None:
        match action:
            case ToWorker(worker=worker, frame=frame):
                self._senders.send(worker, frame)
            case RunOn():
                self._run(action)
            case Answer(answer=answer):
                self._answers.append(answer)
            case FinishJournal():
                self._finish(action)
            case AppendJournal():
                self._background.spawn(self._append(action))
            case PublishEvents(origin=origin, task=task, events=told):
                self._tell(origin, EventBatch(events=told), task)
            case CloseJournal(task=task, attempt=attempt):
                self._journals.pop((task, attempt), None)
            case OpenJournal(item=item, adopted=adopted):
                self._background.spawn(self._open(item, adopted))
            case PublishReturned(returned=returned):
                subject = shard_returned(shard_of_task(returned.task), returned.node)
                self._bus.publish(subject, encode(returned))
            case AnswerInventory(answer=answer):
                self._inventory = answer

    def _run(self, action: RunOn) -> None:
        item = action.item
        frame = RunTask(
            record=item.record,
            head=item.head,
            journal=action.steps,
            revision=item.revision,
            create_seq=item.create_seq,
            head_revision=item.head_revision,
        )
        try:
            self._senders.send(action.worker, frame)
        except InvalidInput as error:
            record = item.record
            reason = f"too large for a worker's link: {error}"
            asyncio.get_running_loop().call_soon(
                self.feed, JournalRefused(record.task, record.attempt, reason)
            )

    async def _open(self, item: Assignment, adopted: bool) -> None:
        record = item.record
        journal = self._journal(item)

        async def work() -> NodeEvent:
            try:
                steps = await (journal.resume() if adopted else journal.open(record.node))
            except AttemptDropped:
                if journal.outcome is None:
                    raise
                # An earlier attempt had decided the end, and this one carried it out.
                self._tell_finished(record, journal.outcome)
                return JournalFinished(record.task, record.attempt)
            return JournalOpened(record.task, record.attempt, steps)

        self._writing += 1
        await self._write(record, work())

    async def _append(self, action: AppendJournal) -> None:
        record = action.item.record

        async def work() -> NodeEvent:
            await self._journal(action.item).append(action.steps)
            return JournalAppended(record.task, record.attempt)

        self._writing += 1
        await self._write(record, work())

    def _finish(self, action: FinishJournal) -> None:
        item = action.item
        record = item.record
        journal = self._journal(item)
        result = result_of(item, action.finish, action.steps, self._clock.wall_ms())
        head = head_of(item, action.finish)
        over = JournalFinished(record.task, record.attempt)
        told = False

        def stands(final: ResultRecord) -> None:
            # Told even if the attempt was dropped meanwhile: the task has ended, and so.
            nonlocal told
            told = True
            self._tell_finished(record, final, action.finish.events)

        async def work(end: Callable[[], Coroutine[Any, Any, ResultRecord]]) -> NodeEvent:
            final = await end()
            if not told:
                stands(final)
            return over

        def done(rest: Callable[[], Coroutine[Any, Any, ResultRecord]] | None) -> None:
            if rest is not None:
                self._background.spawn(self._write(record, work(rest)))
                return
            self._wrote()
            self.feed(over)

        self._writing += 1
        if head is None:
            journal.finish_soon(result, stands, done)
        else:
            end = partial(journal.finish, result, head, item.head_revision, stands)
            self._background.spawn(self._write(record, work(end)))

    async def _write(self, record: TaskRecord, work: Coroutine[Any, Any, NodeEvent]) -> None:
        """Do `work` on the journal, counted as being written, and tell the core how it went."""
        task, attempt = record.task, record.attempt
        event: NodeEvent
        try:
            event = await work
        except (Fenced, AttemptDropped, NotFound) as error:
            event = JournalLost(task, attempt, str(error))
        except (InvalidInput, CorruptRecord) as error:
            event = JournalRefused(task, attempt, str(error))
        except Unavailable as error:
            event = CannotGoOn(task, attempt, str(error))
        finally:
            self._wrote()
        if not isinstance(event, JournalAppended | JournalFinished | JournalOpened):
            _log.warning(
                "Journal not written", task=task, attempt=attempt, outcome=type(event).__name__
            )
        self.feed(event)

    def _wrote(self) -> None:
        self._writing -= 1
        self._written.set()

    def _journal(self, item: Assignment) -> Journal:
        key = (item.record.task, item.record.attempt)
        journal = self._journals.get(key)
        if journal is None:
            journal = self._journals[key] = self._journal_of(item)
        return journal

    def _tell_finished(
        self, record: TaskRecord, result: ResultRecord, before: tuple[TaskEvent, ...] = ()
    ) -> None:
        event = TaskFinished(task=record.task, at_ms=self._clock.wall_ms(), result=result)
        self._tell(record.origin, EventBatch(events=(*before, event)), record.task)

    def _tell(self, origin: str, batch: EventBatch, task: str) -> None:
        if not origin:
            return
        try:
            self._bus.publish(events(origin, task), encode(batch))
        except InvalidInput as error:
            # Watchers read the result from the log instead.
            _log.warning("Events not told", task=task, reason=str(error))

    async def _submit(self, worker: str, message: SendMessage) -> None:
        """Submit until a controld answers: the request id makes repeating it harmless."""
        request = encode(
            SubmitMessage(
                pool=message.pool,
                session=message.session,
                request_id=message.request_id,
                input=message.input,
            )
        )
        give_up = self._clock.monotonic() + SUBMIT_S
        while True:
            try:
                raw = await self._bus.request(CONTROL_SUBMIT, request, _SUBMIT_ANSWER_S)
                answer = decode(raw, SubmitAnswer)
            except CorefleetError as error:
                answer = SubmitAnswer(error=str(error), retry_after_s=_PAUSE_S)
                if not isinstance(error, Unavailable):
                    break
            pause = answer.retry_after_s
            if not answer.error or not pause or self._clock.monotonic() + pause > give_up:
                break
            await asyncio.sleep(pause)
        self._senders.send(
            worker, MessageSent(call=message.call, task=answer.task, error=answer.error)
        )
