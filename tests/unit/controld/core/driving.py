"""Drives one ShardCore by hand: builders of records and fleets, answers to its actions."""

from __future__ import annotations

from random import Random
from typing import Any, TypeVar

from controld.core.batch_places import BatchPlaces
from controld.core.fleet import Fleet
from controld.core.limits import Limits
from controld.core.shard import ShardCore
from controld.core.shard_io import (
    Action,
    AssignAnswered,
    CaughtUp,
    EndTask,
    Event,
    FleetChanged,
    HeadStored,
    LimitOpened,
    Notify,
    PoolsSet,
    RecordStored,
    RecordWritten,
    SendAssignment,
    TaskEnded,
    Tick,
    WriteRecord,
)
from controld.core.shard_state import ShardSettings
from corefleet.messages.records import (
    DomainInfo,
    NodeRegistration,
    PoolSpec,
    SessionHead,
    TaskRecord,
)
from corefleet.messages.wire import (
    AssignAnswer,
    LoadVector,
    NodeState,
    NodeView,
    RackDigest,
    SlotUse,
    TaskEvent,
)

A = TypeVar("A")


def registration(node: str, epoch: int = 1, slots: int = 2, **changes: Any) -> NodeRegistration:
    """A node of one domain that offers pools `chat` and `crunch`."""
    domain = DomainInfo(domain=0, cpus="0-3", slots={"chat": slots, "crunch": slots})
    return NodeRegistration(**{"node": node, "epoch": epoch, "domains": (domain,), **changes})


class FleetDriver:
    """A fleet whose digests are numbered by themselves."""

    def __init__(self, nodes: int = 2, slots: int = 2, sample_size: int = 8) -> None:
        self.fleet = Fleet(sample_size)
        self.number = 0
        for index in range(nodes):
            self.join(f"n{index}", slots=slots)

    def join(self, node: str, epoch: int = 1, slots: int = 2, now: float = 0.0, **more: Any) -> Any:
        delta = self.fleet.registered(registration(node, epoch, slots, **more), now)
        self.see(node, epoch, now=now, rack=more.get("rack", "rack0"))
        return delta

    def see(
        self,
        node: str,
        epoch: int = 1,
        state: NodeState = "ready",
        now: float = 0.0,
        rack: str = "rack0",
        rack_epoch: int = 1,
        load: LoadVector | None = None,
        slots: tuple[SlotUse, ...] = (),
        beat_age_s: float = 0.0,
        **more: Any,
    ) -> Any:
        """Feed a digest that shows one node."""
        self.number += 1
        view = NodeView(
            node=node,
            epoch=epoch,
            state=state,
            load=load or LoadVector(),
            slots=slots,
            beat_age_s=beat_age_s,
            **more,
        )
        digest = RackDigest(
            rack=rack, controld="c0", epoch=rack_epoch, number=self.number, nodes=(view,)
        )
        return self.fleet.digest(digest, now)


class ShardDriver:
    """One core with a hand-moved clock and a sequence like the stream's."""

    def __init__(
        self,
        nodes: int = 2,
        slots: int = 2,
        live: bool = True,
        pools: dict[str, PoolSpec] | None = None,
        settings: ShardSettings | None = None,
    ) -> None:
        self.fleets = FleetDriver(nodes, slots)
        self.fleet = self.fleets.fleet
        self.limits = Limits()
        self.batch = BatchPlaces()
        self.core = ShardCore(7, "c1", 3, self.fleet, Random(1), settings, self.limits, self.batch)
        self.now = 1000.0
        self.sequence = 100
        self.count = 0
        self.set_pools(pools or {})
        if live:
            self.feed(CaughtUp())

    @property
    def wall_ms(self) -> int:
        return int(self.now * 1000)

    def feed(self, event: Event) -> list[Action]:
        """Handle an event and whoever's turn it is then; the invariants must hold."""
        actions = self.core.handle(event, self.now, self.wall_ms)
        while self.fleet.woken():
            actions += self.core.handle(FleetChanged(), self.now, self.wall_ms)
        while opened := self.limits.woken():
            for _, pool, tenant in opened:
                actions += self.core.handle(LimitOpened(pool, tenant), self.now, self.wall_ms)
        assert self.core.check() == []
        return actions

    def set_pools(self, pools: dict[str, PoolSpec]) -> list[Action]:
        """The pools as stored are these now."""
        self.limits.set_pools(pools)
        self.fleet.set_pools(pools)
        return self.feed(PoolsSet(pools))

    def next(self) -> int:
        self.sequence += 1
        return self.sequence

    def record(self, session: str = "", **changes: Any) -> TaskRecord:
        """A new record with its own session unless one is named."""
        self.count += 1
        number = self.count
        return TaskRecord(
            **{
                "task": f"t{number}",
                "pool": "chat",
                "session": session or f"s{number}",
                "request_id": f"r{number}",
                "input": "hello",
                "origin": "c9",
                "created_ms": self.wall_ms,
                **changes,
            }
        )

    def submit(self, session: str = "", **changes: Any) -> list[Action]:
        return self.feed(RecordStored(self.record(session, **changes), self.next()))

    def written(self, write: WriteRecord, follow: bool = True) -> list[Action]:
        """The write is durable, and the stream shows it."""
        record, revision = write.record, self.next()
        actions = self.feed(RecordWritten(record.task, record.attempt, revision))
        if follow:
            actions += self.feed(RecordStored(record, revision))
        return actions

    def accepted(self, action: SendAssignment) -> list[Action]:
        record = action.assignment.record
        answer = AssignAnswer(record.task, record.attempt, True)
        return self.feed(AssignAnswered(action.node, answer))

    def run(self, session: str = "", **changes: Any) -> TaskRecord:
        """Submit a task and bring it to `running`; return its placed record."""
        write = only(self.submit(session, **changes), WriteRecord)
        self.accepted(only(self.written(write), SendAssignment))
        assert self.core.states()[write.record.task] == "running"
        return write.record

    def done(self, record: TaskRecord, state: str = "done", head: bool = True) -> list[Action]:
        """The node ends the task, and with it the session's head."""
        final = TaskRecord(
            task=record.task,
            pool=record.pool,
            session=record.session,
            request_id=record.request_id,
            input="",
            state=state,  # type: ignore[arg-type]
            attempt=record.attempt,
        )
        actions = self.feed(RecordStored(final, self.next()))
        if head:
            newer = SessionHead(
                pool=record.pool,
                session=record.session,
                last_task=record.task,
                home_node=record.node,
                home_domain=record.domain,
            )
            actions += self.feed(HeadStored(newer, self.next()))
        return actions

    def ended(self, end: EndTask, won: bool = True) -> list[Action]:
        return self.feed(TaskEnded(end.record.task, won, end.result if won else None))

    def wait(self, seconds: float) -> list[Action]:
        """Let time pass in one step."""
        self.now += seconds
        delta = self.fleet.tick(self.now)
        actions = self.feed(FleetChanged()) if delta.capacity else []
        return actions + self.feed(Tick())


def of_kind(actions: list[Action], kind: type[A]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def only(actions: list[Action], kind: type[A]) -> A:
    """Return the one action of `kind`."""
    found = of_kind(actions, kind)
    assert len(found) == 1, f"expected one {kind.__name__} in {actions}"
    return found[0]


def told(actions: list[Action]) -> list[TaskEvent]:
    """Return the events that watchers are told."""
    return [action.event for action in of_kind(actions, Notify)]
