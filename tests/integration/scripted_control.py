"""A control plane that does as a test says: registers nodes, places tasks, listens."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable
from typing import TypeVar

import msgspec
from nats.errors import Error as NatsError

from corefleet.adapters.nats_bus import NatsBus, Subscription
from corefleet.adapters.nats_log import NatsLog
from corefleet.bus import Entry, Incoming
from corefleet.codec import decode, encode
from corefleet.config import NatsConfig
from corefleet.errors import CorefleetError, Unavailable
from corefleet.ids import shard_of, task_id_of
from corefleet.journal import place
from corefleet.messages.records import (
    ClusterSettings,
    NodeRegistration,
    PoolSpec,
    ResultRecord,
    SessionHead,
    TaskRecord,
)
from corefleet.messages.wire import (
    AssignAnswer,
    AssignAnswers,
    AssignBatch,
    Assignment,
    DropAttempt,
    EventBatch,
    Heartbeat,
    InventoryAnswer,
    InventoryQuery,
    NodeRegistered,
    PoolsChanged,
    RegisterNode,
    TaskEvent,
    TaskReturned,
    Verdict,
    YieldAttempt,
)
from corefleet.subjects import (
    ANY,
    CONTROL_REGISTER,
    POOLS_CHANGED,
    VERDICTS,
    Layout,
    beats,
    events_to,
    node_assign,
    node_drop,
    node_inventory,
    node_yield,
    shard_returned,
)

PATIENCE_S = 20.0
RACK = "rack0"
ORIGIN = "scripted"

T = TypeVar("T")


class ScriptedControl:
    """One controld's part of the conversation with nodes. Made by `start`."""

    def __init__(self, bus: NatsBus, log: NatsLog, pools: tuple[PoolSpec, ...]) -> None:
        self.bus = bus
        self.log = log
        self.pools = pools
        self.settings = ClusterSettings(shards=4, streams=1)
        self.layout = Layout(self.settings.shards, self.settings.streams)
        self.registrations: list[NodeRegistration] = []
        self.beats: list[Heartbeat] = []
        self.events: list[TaskEvent] = []
        self.returned: list[TaskReturned] = []
        self._news = asyncio.Event()
        self._pools_revision = 1
        self._epochs = itertools.count(1)
        self.resumes = True
        """Whether a node that asks for its newest epoch gets it again."""
        self._subscriptions: list[Subscription] = []

    @classmethod
    async def start(cls, url: str, pools: tuple[PoolSpec, ...]) -> ScriptedControl:
        bus = await NatsBus.connect(NatsConfig(servers=(url,)), "scripted control", _fail)
        control = cls(bus, NatsLog(bus), pools)
        await control.log.ensure(control.settings)
        handlers: dict[str, Callable[[Incoming], None]] = {
            CONTROL_REGISTER: control._register,
            beats(RACK): lambda m: control.beats.append(decode(m.payload, Heartbeat)),
            events_to(ORIGIN): lambda m: control.events.extend(
                decode(m.payload, EventBatch).events
            ),
            **{
                shard_returned(shard, ANY): lambda m: control.returned.append(
                    decode(m.payload, TaskReturned)
                )
                for shard in range(control.settings.shards)
            },
        }
        for subject, handler in handlers.items():
            control._subscriptions.append(await bus.subscribe(subject, control._noted(handler)))
        return control

    async def close(self) -> None:
        await self.bus.close()

    @property
    def epoch(self) -> int:
        """The newest epoch that was given."""
        return self.registrations[-1].epoch

    async def until(
        self, condition: Callable[[], T | None], what: str, patience_s: float = PATIENCE_S
    ) -> T:
        """Return the first true value of `condition`, asked after every message."""
        try:
            async with asyncio.timeout(patience_s):
                while True:
                    self._news.clear()
                    found = condition()
                    if found:
                        return found
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"not seen within {patience_s} s: {what}") from None

    async def event(self, task: str, kind: type[T], patience_s: float = PATIENCE_S) -> T:
        """Return the first event of `kind` of `task`."""

        def find() -> T | None:
            found = (e for e in self.events if isinstance(e, kind) and e.task == task)
            return next(found, None)

        return await self.until(find, f"{kind.__name__} of {task}", patience_s)

    async def placed(
        self, pool: str, session: str, text: str, node: str, domain: int = 0, owner_epoch: int = 1
    ) -> Assignment:
        """Write a new task's record and its placing on `node`; return the assignment."""
        shard = shard_of(pool, session, self.settings.shards)
        task = task_id_of(shard, secrets.token_hex(8))
        record = TaskRecord(
            task=task,
            pool=pool,
            session=session,
            request_id=task,
            input=text,
            origin=ORIGIN,
            owner_epoch=owner_epoch,
        )
        created = await self.log.append(
            Entry(self.layout.task(shard, task), encode(record), fence_sequence=0), 2.0
        )
        item = Assignment(record=record, revision=created, create_seq=created)
        return await self.again(item, node, domain)

    async def again(self, item: Assignment, node: str, domain: int = 0) -> Assignment:
        """Write the task's next attempt, on `node` at its newest epoch; return it."""
        record = msgspec.structs.replace(
            item.record,
            state="placed",
            attempt=item.record.attempt + 1,
            node=node,
            node_epoch=self.epoch,
            domain=domain,
            create_seq=item.create_seq,
        )
        revision = await place(self.log, self.layout, record, item.revision)
        shard = shard_of(record.pool, record.session, self.settings.shards)
        head = await self.log.last(self.layout.head(shard, record.pool, record.session), 2.0)
        return Assignment(
            record=record,
            revision=revision,
            create_seq=item.create_seq,
            head=decode(head.payload, SessionHead) if head else None,
            head_revision=head.sequence if head else 0,
        )

    async def assign(self, *items: Assignment) -> tuple[AssignAnswer, ...]:
        batch = AssignBatch(controld=ORIGIN, items=items)
        subject = node_assign(items[0].record.node)
        return decode(await self.bus.request(subject, encode(batch), 5.0), AssignAnswers).items

    async def inventory(self, node: str, query: InventoryQuery) -> InventoryAnswer:
        answer = await self.bus.request(node_inventory(node), encode(query), 5.0)
        return decode(answer, InventoryAnswer)

    def drop(self, item: Assignment, reason: str) -> None:
        record = item.record
        drop = DropAttempt(task=record.task, attempt=record.attempt, reason=reason)
        self.bus.publish(node_drop(record.node), encode(drop))

    def want_back(self, item: Assignment, reason: str) -> None:
        record = item.record
        asked = YieldAttempt(task=record.task, attempt=record.attempt, reason=reason)
        self.bus.publish(node_yield(record.node), encode(asked))

    def declare_lost(self, node: str, epoch: int) -> None:
        verdict = Verdict(
            rack=RACK, rack_epoch=1, node=node, node_epoch=epoch, state="lost", reason="a test"
        )
        self.bus.publish(VERDICTS, encode(verdict))

    def change_pools(self, *pools: PoolSpec) -> None:
        self.pools = pools
        self._pools_revision += 1
        changed = PoolsChanged(pools=pools, pools_revision=self._pools_revision)
        self.bus.publish(POOLS_CHANGED, encode(changed))

    async def result(self, item: Assignment) -> ResultRecord:
        """Return the stored result of a task, waiting for it and for the server."""
        record = item.record
        shard = shard_of(record.pool, record.session, self.settings.shards)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    stored = await self.log.last(self.layout.result(shard, record.task), 2.0)
                except Unavailable:
                    stored = None
                if stored is not None:
                    return decode(stored.payload, ResultRecord)
                await asyncio.sleep(0.02)

    def _register(self, message: Incoming) -> None:
        asked = decode(message.payload, RegisterNode).registration
        resumes = self.resumes and self.registrations and asked.epoch == self.epoch
        epoch = asked.epoch if resumes else next(self._epochs)
        made = msgspec.structs.replace(asked, epoch=epoch)
        self.registrations.append(made)
        answer = NodeRegistered(
            epoch=made.epoch,
            shards=self.settings.shards,
            streams=self.settings.streams,
            pools=self.pools,
            pools_revision=self._pools_revision,
        )
        self.bus.publish(message.reply, encode(answer))

    def _noted(self, handler: Callable[[Incoming], None]) -> Callable[[Incoming], None]:
        def handle(message: Incoming) -> None:
            handler(message)
            self._news.set()

        return handle


def _fail(error: Exception) -> None:
    if not isinstance(error, CorefleetError | NatsError | OSError):
        raise error
