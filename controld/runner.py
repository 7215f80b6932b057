"""A shard in motion: its part of the stream in, its core's decisions out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog

from controld.assigner import Assigner
from controld.cluster import Cluster
from controld.core.shard import ShardCore
from controld.core.shard_io import (
    Action,
    AnswerCancel,
    AttemptReturned,
    CancelRequested,
    CaughtUp,
    EndTask,
    Event,
    HeadStored,
    InventoryAnswered,
    Notify,
    QueryInventory,
    ReadRecord,
    RecordMissing,
    RecordRead,
    RecordRefused,
    RecordStored,
    RecordWritten,
    SendAssignment,
    SendDrop,
    SendYield,
    TaskEnded,
    WriteRecord,
    WriteUnavailable,
)
from controld.gauges import Gauges
from corefleet.acceptance import rewrite
from corefleet.background import Background
from corefleet.bus import Entry, Follower, Incoming, Stored, Subscription
from corefleet.codec import decode, encode
from corefleet.errors import (
    CorefleetError,
    CorruptRecord,
    Fenced,
    IllegalTransition,
    NotFound,
    StoreFull,
    Unavailable,
)
from corefleet.journal import end_task, place
from corefleet.messages.records import TERMINAL, OwnerMark, SessionHead, TaskRecord
from corefleet.messages.wire import (
    CancelTask,
    EventBatch,
    ExplainTask,
    InventoryAnswer,
    ListTasks,
    TaskList,
    TaskReturned,
)
from corefleet.subjects import (
    call_of,
    events,
    kind_of,
    node_drop,
    node_inventory,
    node_yield,
    sender_of,
    shard_calls,
)

_log = structlog.get_logger(__name__)

_WRITE_S = 2.0
_INVENTORY_S = 1.0
_MARK_S = 2.0
_RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all shards of a controld share."""

    cluster: Cluster
    background: Background
    assigner: Assigner
    gauges: Gauges
    may_act: Callable[[], bool]
    """Whether our lease lets us decide at this moment; halts everything when not."""
    handled: Callable[[], None]
    """Called after a core was fed: what waits for room in the fleet may go on."""
    superseded: Callable[[int, int], None]
    """Called with shard and epoch when a newer owner's mark was found."""
    broken: Callable[[int], None]
    """Called with the shard when its core was found wrong: it decides nothing any more."""


class ShardRunner:
    """Runs the core of one shard from its take-over until ownership ends.

    `anew`: the core replaces one of the same epoch, behind a mark of its own.
    """

    def __init__(
        self,
        surroundings: Surroundings,
        core: ShardCore,
        shard: int,
        epoch: int,
        anew: bool = False,
    ) -> None:
        self._anew = anew
        self._on = surroundings
        self._cluster = surroundings.cluster
        self._core = core
        self.shard = shard
        self.epoch = epoch
        self._halted = False
        self._mark = 0
        self._begun = 0.0
        self._follower: Follower | None = None
        self._calls: Subscription | None = None
        self._held: list[Incoming] = []
        self._cancels: dict[int, str] = {}
        self._numbers = 0

    @property
    def live(self) -> bool:
        """Whether the take-over is complete, so that we decide."""
        return self._core.live and not self._halted

    @property
    def core(self) -> ShardCore:
        return self._core

    async def start(self) -> None:
        """Take the shard over; returns once the stream is being followed.

        Nothing is decided before our own mark was seen in the stream, behind all that
        earlier owners wrote (docs/architecture.md, rule 7).
        """
        self._begun = self._cluster.clock.monotonic()
        self._calls = await self._cluster.bus.subscribe(shard_calls(self.shard), self._called)
        self._mark = await self._write_mark()
        layout = self._cluster.layout
        while not self._halted and self._follower is None:
            try:
                self._follower = await self._cluster.log.follow(
                    layout.stream_of(self.shard), [layout.owned(self.shard)], self._stored
                )
            except Unavailable as error:
                _log.warning("shard not followed yet", shard=self.shard, error=str(error))
                await asyncio.sleep(_RETRY_S)

    def halt(self) -> None:
        """Decide nothing more, at once. Writes under way may still land: they are fenced."""
        if not self._halted:
            self._halted = True
            self._core.close(self._cluster.clock.monotonic())

    async def close(self) -> None:
        """Return when nothing moves any more. Idempotent."""
        self.halt()
        follower, self._follower = self._follower, None
        calls, self._calls = self._calls, None
        if follower is not None:
            await follower.close()
        if calls is not None:
            await calls.close()

    def handle(self, event: Event) -> None:
        """Feed the core and carry out what it decides."""
        if self._halted or not self._on.may_act() or self._halted:
            return
        clock = self._cluster.clock
        began = clock.monotonic()
        try:
            actions = self._core.handle(event, began, clock.wall_ms())
        except IllegalTransition as error:
            self._broke(error)
            return
        if actions:
            self._count_decisions(actions, clock.monotonic() - began)
        for action in actions:
            self._carry_out(action)
        self._on.handled()

    def _broke(self, error: IllegalTransition) -> None:
        """This shard's core is wrong, and only this one: what the records say is still right."""
        _log.error("shard's core is wrong", shard=self.shard, epoch=self.epoch, error=str(error))
        self._on.gauges.broken_cores().inc()
        self.halt()
        self._on.broken(self.shard)

    def _count_decisions(self, actions: list[Action], took_s: float) -> None:
        placed = sum(type(act) is WriteRecord and act.record.state == "placed" for act in actions)
        for _ in range(placed):
            self._on.gauges.decision_s().observe(took_s / placed)

    async def _write_mark(self) -> int:
        """Append our epoch to the shard's marks; return its sequence."""
        log, subject = self._cluster.log, self._cluster.layout.owner(self.shard)
        mark = OwnerMark(shard=self.shard, epoch=self.epoch, controld=self._cluster.controld)
        while not self._halted:
            try:
                last = await log.last(subject, _MARK_S)
                if last is not None:
                    found = decode(last.payload, OwnerMark)
                    if found == mark and not self._anew:
                        return last.sequence
                    if found != mark and found.epoch >= self.epoch:
                        self._give_up(found)
                        break
                entry = Entry(
                    subject, encode(mark), fence_sequence=last.sequence if last else 0, rollup=True
                )
                return await log.append(entry, _MARK_S)
            except Fenced:
                continue
            except Unavailable as error:
                _log.warning("owner's mark not written yet", shard=self.shard, error=str(error))
                await asyncio.sleep(_RETRY_S)
        return 0

    def _give_up(self, found: OwnerMark) -> None:
        _log.warning(
            "a newer owner has marked the shard",
            shard=self.shard,
            epoch=self.epoch,
            newer=found.epoch,
            controld=found.controld,
        )
        self.halt()
        self._on.superseded(self.shard, found.epoch)

    def _stored(self, stored: Stored) -> None:
        kind = kind_of(stored.subject)
        try:
            if kind == "task":
                record = decode(stored.payload, TaskRecord)
                self._count_end(record)
                self.handle(RecordStored(record, stored.sequence))
            elif kind == "head":
                self.handle(HeadStored(decode(stored.payload, SessionHead), stored.sequence))
            else:
                self._owner_marked(stored)
        except CorruptRecord as error:
            # One bad record must not hold up the shard; nobody can run that task.
            _log.error(
                "record in the stream is not usable", subject=stored.subject, error=str(error)
            )

    def _owner_marked(self, stored: Stored) -> None:
        found = decode(stored.payload, OwnerMark)
        if stored.sequence == self._mark:
            self.handle(CaughtUp())
            took = self._cluster.clock.monotonic() - self._begun
            self._on.gauges.takeover_s().observe(took)
            _log.debug(
                "shard taken over", shard=self.shard, epoch=self.epoch, took_s=round(took, 3)
            )
            held, self._held = self._held, []
            for message in held:
                self._called(message)
        elif found.epoch > self.epoch:
            self._give_up(found)

    def _carry_out(self, action: Action) -> None:
        match action:
            case WriteRecord():
                self._write(action)
            case SendAssignment():
                self._on.assigner.offer(action.node, action.assignment, self.handle)
            case Notify():
                record_subject = events(action.origin, action.event.task)
                batch = EventBatch(events=(action.event,))
                self._cluster.bus.publish(record_subject, encode(batch))
            case EndTask():
                self._on.background.spawn(self._end(action))
            case SendDrop():
                self._cluster.bus.publish(node_drop(action.node), encode(action.drop))
            case SendYield():
                self._on.gauges.yields().inc()
                self._cluster.bus.publish(node_yield(action.node), encode(action.ask))
            case QueryInventory():
                self._on.background.spawn(self._query(action))
            case AnswerCancel():
                reply = self._cancels.pop(action.call, "")
                if reply:
                    self._cluster.bus.publish(reply, encode(action.answer))
            case ReadRecord():
                self._on.background.spawn(self._read(action.task))

    def _write(self, action: WriteRecord) -> None:
        """Write with nobody waiting; only an answer that is not plain makes a task of it."""
        cluster = self._cluster

        def answered(outcome: int | CorefleetError) -> None:
            if isinstance(outcome, CorefleetError):
                self._on.background.spawn(self._write_surely(action, outcome))
            else:
                self._written(action, outcome)

        entry = rewrite(cluster.layout, action.record, action.expected)
        cluster.log.append_soon(entry, _WRITE_S, answered)

    def _written(self, action: WriteRecord, revision: int) -> None:
        record = action.record
        self._count_written(action)
        self.handle(RecordWritten(record.task, record.attempt, revision))

    async def _write_surely(self, action: WriteRecord, first: CorefleetError | None) -> None:
        record, cluster = action.record, self._cluster
        while True:
            try:
                revision = await place(
                    cluster.log, cluster.layout, record, action.expected, first=first
                )
            except Fenced:
                self._on.gauges.lost_races().inc()
                self.handle(RecordRefused(record.task, record.attempt))
                return
            except StoreFull as error:
                self.handle(WriteUnavailable(record.task, record.attempt, str(error)))
                return
            except Unavailable as error:
                # Whether it had an effect is not known: only the same write again can tell.
                if self._halted:
                    return
                _log.warning("record not written yet", task=record.task, error=str(error))
                first = error
                continue
            self._written(action, revision)
            return

    def _count_end(self, record: TaskRecord) -> None:
        """Count a terminal record, whoever wrote it; those before our time were counted then."""
        if record.state in TERMINAL and self._core.live:
            self._on.gauges.finished(record.pool, record.state).inc()
            self._on.gauges.tallies.of(record.pool).finished += 1

    def _count_written(self, action: WriteRecord) -> None:
        record, gauges = action.record, self._on.gauges
        tally = gauges.tallies.of(record.pool)
        if action.left:
            gauges.requeued(record.pool, action.left).inc()
            tally.count_left(action.left)
        if record.state == "placed":
            gauges.placed(record.pool).inc()
            gauges.affinity(record.pool, action.home).inc()
            waited_s = None
            if record.attempt == 1:
                waited_s = max(0, self._cluster.clock.wall_ms() - record.created_ms) / 1000
                gauges.queue_wait_s(record.pool).observe(waited_s)
            tally.count_placed(action.home, waited_s)

    async def _end(self, action: EndTask) -> None:
        record = action.record
        while True:
            try:
                stands = await end_task(
                    self._cluster.log, self._cluster.layout, record, action.expected, action.result
                )
            except (Fenced, NotFound):
                # Rewritten without an end, or long over: the stream shows which.
                self._on.gauges.lost_races().inc()
                self.handle(TaskEnded(record.task, won=False, result=None))
                return
            except StoreFull as error:
                self.handle(WriteUnavailable(record.task, record.attempt, str(error)))
                return
            except Unavailable as error:
                if self._halted:
                    return
                _log.warning("task not ended yet", task=record.task, error=str(error))
                continue
            won = stands == action.result
            if won:
                self._on.gauges.ended(action.result.state).inc()
            self.handle(TaskEnded(record.task, won, stands))
            return

    async def _read(self, task: str) -> None:
        subject = self._cluster.layout.task(self.shard, task)
        while not self._halted:
            try:
                stored = await self._cluster.log.last(subject, _WRITE_S)
            except Unavailable as error:
                _log.warning("record not read yet", task=task, error=str(error))
                await asyncio.sleep(_RETRY_S)
                continue
            if stored is None:
                self.handle(RecordMissing(task))
                return
            try:
                record = decode(stored.payload, TaskRecord)
            except CorruptRecord as error:
                _log.error("stored record is not usable", subject=subject, error=str(error))
                return
            self.handle(RecordRead(record, stored.sequence))
            return

    async def _query(self, action: QueryInventory) -> None:
        try:
            payload = await self._cluster.bus.request(
                node_inventory(action.node), encode(action.query), _INVENTORY_S
            )
            answer = decode(payload, InventoryAnswer)
        except (Unavailable, CorruptRecord) as error:
            _log.debug("no inventory", node=action.node, error=str(error))
            return
        self.handle(InventoryAnswered(action.node, answer.node_epoch, answer.absent))

    def _called(self, message: Incoming) -> None:
        if self._halted:
            # Whoever owns the shard now knows better.
            return
        if not self._core.live:
            self._held.append(message)
            return
        try:
            self._answer(message)
        except CorruptRecord as error:
            _log.warning("call is not usable", subject=message.subject, error=str(error))

    def _answer(self, message: Incoming) -> None:
        match call_of(message.subject):
            case "returned":
                given = decode(message.payload, TaskReturned)
                if given.node != (sender := sender_of(message.subject)):
                    raise CorruptRecord(f"{sender} gives back what {given.node} has")
                self.handle(AttemptReturned(given.task, given.attempt, given.node, given.reason))
            case "cancel":
                asked = decode(message.payload, CancelTask)
                self._numbers += 1
                self._cancels[self._numbers] = message.reply
                self.handle(CancelRequested(self._numbers, asked.task, asked.reason))
            case "explain":
                explained = self._core.explain(decode(message.payload, ExplainTask).task)
                self._cluster.bus.publish(message.reply, encode(explained))
            case "list":
                listed = self._core.list_tasks(decode(message.payload, ListTasks))
                self._cluster.bus.publish(message.reply, encode(_without_inputs(listed)))


def _without_inputs(listed: TaskList) -> TaskList:
    """A list must fit into one message, and nobody reads the inputs in it."""
    tasks = tuple(
        msgspec.structs.replace(line, record=msgspec.structs.replace(line.record, input=""))
        for line in listed.tasks
    )
    return msgspec.structs.replace(listed, tasks=tasks)
