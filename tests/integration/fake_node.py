"""A node for tests of the control plane: speaks its protocol, runs tasks by a function."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from corefleet.adapters.nats_bus import NatsBus
from corefleet.adapters.nats_log import NatsLog
from corefleet.bus import Bus, Incoming, Log
from corefleet.codec import decode, encode
from corefleet.config import NatsConfig
from corefleet.errors import AttemptDropped, NoResponders, Timeout
from corefleet.ids import shard_of_task
from corefleet.journal import Journal
from corefleet.messages.records import (
    DomainInfo,
    NodeRegistration,
    ResultRecord,
    SessionHead,
    Step,
)
from corefleet.messages.wire import (
    AssignAnswer,
    AssignAnswers,
    AssignBatch,
    Assignment,
    DropAttempt,
    EventBatch,
    HeldAttempt,
    InventoryAnswer,
    InventoryQuery,
    NodeRegistered,
    RegisterNode,
    SlotUse,
    StepEnded,
    TaskFinished,
    TaskReturned,
    YieldAttempt,
)
from corefleet.messages.wire import Heartbeat as Beat
from corefleet.subjects import (
    Layout,
    beat,
    control_register,
    events,
    node_assign,
    node_drop,
    node_inventory,
    node_yield,
    shard_returned,
)

Connect = Callable[[str, Callable[[Exception], None]], Awaitable[tuple[Bus, Log]]]
"""Opens a node's own bus and log; told its name and where errors go."""


def over_nats(url: str) -> Connect:
    """Return what connects nodes to a real server."""

    async def connect(name: str, on_error: Callable[[Exception], None]) -> tuple[Bus, Log]:
        bus = await NatsBus.connect(NatsConfig(servers=(url,)), name, on_error)
        return bus, NatsLog(bus)

    return connect


Run = Callable[["FakeNode", Assignment, Journal], Awaitable[str]]
"""What an attempt does; returns the task's output."""


async def echo(node: FakeNode, assignment: Assignment, journal: Journal) -> str:
    """End at once with the input as the output."""
    return assignment.record.input


class FakeNode:
    """Registers, beats, answers probes, takes assignments, and finishes them."""

    def __init__(
        self, nats: str | Connect, name: str, *, pool: str = "p", slots: int = 64, run: Run = echo
    ) -> None:
        self.name = name
        self._connect = over_nats(nats) if isinstance(nats, str) else nats
        self._pool = pool
        self._slots = slots
        self._run = run
        self._beats = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._background: list[asyncio.Task[None]] = []
        self.held: dict[str, tuple[int, asyncio.Task[None]]] = {}
        self.taken: list[tuple[str, int]] = []
        self.again: list[tuple[str, int]] = []
        """Attempts that were offered more than once."""
        self.dropped: list[tuple[str, int]] = []
        self.wanted: list[tuple[str, int, str]] = []
        """Attempts that their owners asked back, with the reason."""
        self.asked = asyncio.Event()
        """Set when an owner asks for one."""
        self.over = asyncio.Event()
        """Set once an attempt was dropped."""
        self.errors: list[Exception] = []
        self.epoch = 0
        self.yields = True
        """Whether it is at a step boundary whenever an owner asks."""

    async def __aenter__(self) -> FakeNode:
        self._bus, self._log = await self._connect(self.name, self.errors.append)
        self._server = await asyncio.start_server(self._probed, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        await self._register(f"127.0.0.1:{port}")
        await self._bus.subscribe(node_assign(self.name), self._assigned)
        await self._bus.subscribe(node_drop(self.name), self._drop)
        await self._bus.subscribe(node_yield(self.name), self._want)
        await self._bus.subscribe(node_inventory(self.name), self._inventory)
        self._background.append(asyncio.create_task(self._beat()))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()
        assert self.errors == []

    async def die(self) -> None:
        """End as a machine does: no beat, no probe, no answer, nothing written. Idempotent."""
        work = [*self._background, *self._tasks]
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        self._server.close()
        await self._server.wait_closed()
        await self._bus.close()

    async def stop_beating(self) -> None:
        """Beat no more, but answer probes and go on with what runs."""
        beating = self._background.pop(0)
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)

    def beat_again(self) -> None:
        """Go on beating."""
        self._background.insert(0, asyncio.create_task(self._beat()))

    async def fall_silent(self) -> None:
        """Beat and answer probes no more, but go on with what runs."""
        self._background[0].cancel()
        self._server.close()
        await self._server.wait_closed()

    def give(self, assignment: Assignment, *batch: StepEnded | TaskFinished) -> None:
        """Tell the task's watchers."""
        record = assignment.record
        self._bus.publish(events(record.origin, record.task), encode(EventBatch(events=batch)))

    async def feel(self, unwell: str) -> None:
        """Ask to be drained, for that reason; '' when well again."""
        await self._register(self._probe_address, unwell)

    async def _register(self, probe_address: str, unwell: str = "") -> None:
        self._probe_address = probe_address
        registration = NodeRegistration(
            node=self.name,
            epoch=self.epoch,
            probe_address=probe_address,
            draining=bool(unwell),
            draining_reason=unwell,
            domains=(DomainInfo(domain=0, cpus="0-3", slots={self._pool: self._slots}),),
        )
        payload = encode(RegisterNode(registration=registration))
        async with asyncio.timeout(10):
            while True:
                try:
                    answer = await self._bus.request(control_register(self.name), payload, 2.0)
                    break
                except (NoResponders, Timeout):
                    await asyncio.sleep(0.05)
        registered = decode(answer, NodeRegistered)
        assert registered.error == ""
        self.epoch = registered.epoch
        self.pools = {pool.name: pool for pool in registered.pools}
        self._layout = Layout(registered.shards, registered.streams)

    async def _beat(self) -> None:
        while True:
            self._beats += 1
            used = len(self.held)
            self._bus.publish(
                beat("rack0", self.name),
                encode(
                    Beat(
                        node=self.name,
                        rack="rack0",
                        epoch=self.epoch,
                        number=self._beats,
                        running=used,
                        slots=(SlotUse(self._pool, 0, self._slots, used),),
                    )
                ),
            )
            await asyncio.sleep(0.2)

    async def _probed(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            if await reader.readline() == b"probe\n":
                writer.write(f"corefleet {self.name} {self.epoch}\n".encode())
                await writer.drain()
        writer.close()

    def _assigned(self, message: Incoming) -> None:
        answers = []
        for item in decode(message.payload, AssignBatch).items:
            record = item.record
            if (record.task, record.attempt) in self.taken:
                self.again.append((record.task, record.attempt))
            else:
                self.taken.append((record.task, record.attempt))
                task = asyncio.create_task(self._work(item))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                self.held[record.task] = (record.attempt, task)
            answers.append(AssignAnswer(record.task, record.attempt, accepted=True))
        self._bus.publish(message.reply, encode(AssignAnswers(items=tuple(answers))))

    async def _work(self, item: Assignment) -> None:
        record = item.record
        journal = Journal(self._log, self._layout, record, item.revision)
        try:
            await journal.open(self.name)
            output = await self._run(self, item, journal)
            result = ResultRecord(
                task=record.task, pool=record.pool, session=record.session,
                request_id=record.request_id, state="done", output=output,
                attempt=record.attempt, node=self.name, domain=0, why=record.why,
                placed_ms=record.placed_ms, past=record.past, created_ms=record.created_ms,
                finished_ms=time.time_ns() // 1_000_000, tenant=record.tenant,
                submitted_by=record.submitted_by,
            )  # fmt: skip
            version = item.head.version + 1 if item.head else 1
            head = SessionHead(
                pool=record.pool, session=record.session, version=version,
                last_task=record.task, home_node=self.name, home_domain=0,
            )  # fmt: skip
            await journal.finish(result, head, item.head_revision)
            self.give(item, TaskFinished(task=record.task, result=result))
        except AttemptDropped:
            self._dropped(record.task, record.attempt)
        finally:
            if self.held.get(record.task, (0, None))[0] == record.attempt:
                del self.held[record.task]

    def _dropped(self, task: str, attempt: int) -> None:
        self.dropped.append((task, attempt))
        self.over.set()

    def _drop(self, message: Incoming) -> None:
        drop = decode(message.payload, DropAttempt)
        attempt, task = self.held.get(drop.task, (0, None))
        if task is not None and attempt <= drop.attempt:
            self._dropped(drop.task, attempt)
            task.cancel()

    def _want(self, message: Incoming) -> None:
        asked = decode(message.payload, YieldAttempt)
        self.wanted.append((asked.task, asked.attempt, asked.reason))
        self.asked.set()
        attempt, task = self.held.get(asked.task, (0, None))
        if task is not None and attempt == asked.attempt and self.yields:
            task.cancel()
            returned = TaskReturned(
                task=asked.task,
                attempt=attempt,
                node=self.name,
                node_epoch=self.epoch,
                reason=asked.reason,
            )
            self._bus.publish(
                shard_returned(shard_of_task(asked.task), self.name), encode(returned)
            )

    def _inventory(self, message: Incoming) -> None:
        query = decode(message.payload, InventoryQuery)
        absent = tuple(
            HeldAttempt(each.task, each.attempt)
            for each in query.held
            if self.held.get(each.task, (0, None))[0] != each.attempt
        )
        self._bus.publish(
            message.reply, encode(InventoryAnswer(node_epoch=self.epoch, absent=absent))
        )


class Gate:
    """Attempts that journal one step, then wait until they are let through."""

    def __init__(self) -> None:
        self.running = asyncio.Event()
        self.through = asyncio.Event()

    async def run(self, node: FakeNode, assignment: Assignment, journal: Journal) -> str:
        """Commit a step that names node and attempt, tell it, wait, and end."""
        record = assignment.record
        step = Step(step=record.attempt - 1, kind="tool", name=node.name, attempt=record.attempt)
        await journal.append((step,))
        node.give(assignment, StepEnded(task=record.task, step=step, summary="first"))
        self.running.set()
        await self.through.wait()
        return f"{node.name} {record.attempt}"
