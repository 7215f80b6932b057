"""A simulated message server: connections that break, and the Bus protocol over them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from corefleet.adapters.memory_stream import subject_matches
from corefleet.bus import Incoming
from corefleet.errors import NoResponders, Timeout, Unavailable
from tests.sim.loop import Process, World
from tests.sim.wires import Route, drawn

NOTICE_S = (0.5, 2.5)
"""How long an end takes to notice that its connection carries nothing."""
RECONNECT_S = (0.02, 0.5)

Reply = Callable[[Any], None]
Serve = Callable[[Reply], None]


class NatsServer:
    """Who listens on what. Core messages are kept for nobody."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng("nats")
        self._exact: dict[str, list[SimSubscription]] = {}
        self._starred: dict[str, list[SimSubscription]] = {}
        self._connections = 0
        self.up = True
        self.connections: dict[int, SimBus] = {}

    def join(self, bus: SimBus) -> int:
        self._connections += 1
        self.connections[self._connections] = bus
        return self._connections

    def part(self, bus: SimBus) -> None:
        self.connections.pop(bus.number, None)

    def attach(self, subscription: SimSubscription) -> None:
        if subscription.open:
            kept = self._table(subscription.subject).setdefault(subscription.subject, [])
            if subscription not in kept:
                kept.append(subscription)

    def detach(self, subscription: SimSubscription) -> None:
        kept = self._table(subscription.subject).get(subscription.subject, [])
        if subscription in kept:
            kept.remove(subscription)

    def publish(self, message: Incoming) -> int:
        """Hand a message on; return to how many."""
        if message.subject.startswith("_INBOX."):
            _, number, call = message.subject.split(".")
            asker = self.connections.get(int(number))
            if asker is not None:
                asker.down.send("inbox", asker.deliver, asker.answered, int(call), message.payload)
            return 1
        chosen: list[SimSubscription] = []
        groups: dict[str, list[SimSubscription]] = {}
        for each in self._matching(message.subject):
            if each.queue:
                groups.setdefault(each.queue, []).append(each)
            else:
                chosen.append(each)
        rng = self._rng
        chosen += [members[rng.randrange(len(members))] for members in groups.values()]
        for each in chosen:
            each.bus.down.send(each.subject, each.bus.deliver, each.take, message)
        return len(chosen)

    def restart(self, down_s: float) -> None:
        """Let all connections break at once, and none come about for a while."""
        self.up = False
        for bus in list(self.connections.values()):
            bus.broken()
        self._world.after(down_s, self._back)

    def _back(self) -> None:
        self.up = True

    def _table(self, subject: str) -> dict[str, list[SimSubscription]]:
        return self._starred if "*" in subject or ">" in subject else self._exact

    def _matching(self, subject: str) -> list[SimSubscription]:
        found = list(self._exact.get(subject, ()))
        found += self._starred.get(subject.rpartition(".")[0] + ".*", ())
        return found


class SimSubscription:
    """Implements corefleet.bus.Subscription."""

    def __init__(
        self, bus: SimBus, subject: str, handler: Callable[[Incoming], None], queue: str
    ) -> None:
        if subject.count("*") > 1 or ("*" in subject and not subject.endswith(".*")):
            raise AssertionError(f"{subject}: expected at most one *, at the end")
        self.bus = bus
        self.subject = subject
        self.queue = queue
        self.open = True
        self._handler = handler

    def take(self, message: Incoming) -> None:
        if self.open and subject_matches(self.subject.split("."), message.subject):
            try:
                self._handler(message)
            except Exception as error:  # noqa: BLE001 - as NatsBus does: its owner is told
                self.bus.on_error(error)

    async def close(self) -> None:
        self.open = False
        self.bus.subscriptions.pop(self, None)
        self.bus.up.send("subscribe", self.bus.server.detach, self, sure=True)


class SimBus:
    """Implements corefleet.bus.Bus for one connection of one process."""

    def __init__(
        self, server: NatsServer, process: Process, name: str, on_error: Callable[[Exception], None]
    ) -> None:
        self.server = server
        self.process = process
        self.on_error = on_error
        self.subscriptions: dict[SimSubscription, None] = {}
        world = process.world
        self.number = server.join(self)
        self.up = Route(world, f"{process.name} {name} to nats")
        self.down = Route(world, f"nats to {process.name} {name}")
        self._rng = world.rng(f"bus {process.name} {name}")
        self._connected = True
        self._closed = False
        self._listeners: list[Callable[[bool], None]] = []
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._count = 0
        self._cuts = 0

    # The protocol.

    @property
    def connected(self) -> bool:
        return self._connected and not self._closed

    def on_connection(self, listener: Callable[[bool], None]) -> None:
        self._listeners.append(listener)

    def publish(self, subject: str, payload: bytes) -> None:
        if self.connected:
            self.up.send(subject, self.server.publish, Incoming(subject, payload, ""))

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        number, future = self._call()
        asked = Incoming(subject, payload, f"_INBOX.{self.number}.{number}")
        self.up.send(subject, self._ask, asked, number)
        answer = await self._answer(number, future, subject, timeout_s)
        return bytes(answer)

    async def subscribe(
        self, subject: str, handler: Callable[[Incoming], None], queue: str = ""
    ) -> SimSubscription:
        subscription = SimSubscription(self, subject, handler, queue)
        self.subscriptions[subscription] = None
        if self.connected:
            # As with NatsBus, the server knows it on return.
            try:
                await self.call("subscribe", lambda reply: self._attach(subscription, reply), 2.0)
            except Unavailable:
                return subscription
        return subscription

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.up.send("subscribe", self._leave, sure=True)
        self._fail(Unavailable("sim: the connection is closed"))

    # What the log asks.

    async def call(self, flow: str, serve: Serve, timeout_s: float) -> Any:
        """Have the server do `serve`, which answers once or never."""
        number, future = self._call()

        def reply(answer: Any) -> None:
            self.down.send(flow, self.deliver, self.answered, number, answer, sure=True)

        self.up.send(flow, serve, reply, sure=True)
        return await self._answer(number, future, flow, timeout_s)

    def deliver(self, callback: Callable[..., None], *args: Any) -> None:
        if not self._closed:
            self.process.deliver(callback, *args)

    def answered(self, number: int, answer: Any) -> None:
        future = self._calls.pop(number, None)
        if future is None or future.done():
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    # Faults.

    def cut(self, up: bool, down: bool) -> None:
        """Let nothing pass any more in these directions, until `heal`."""
        self.up.cut = self.up.cut or up
        self.down.cut = self.down.cut or down
        self._cuts += 1
        notice = drawn(self._rng, *NOTICE_S)
        self.process.world.after(notice, self._notice, self._cuts)

    def heal(self) -> None:
        """Let pass again; what waited on a connection that still stands comes late."""
        self._cuts += 1
        if not self._connected:
            self.up.reset()
            self.down.reset()
        self.up.heal()
        self.down.heal()

    def broken(self) -> None:
        """The connection is gone, and both ends know."""
        self._forget()
        self.deliver(self._lost)

    def gone(self) -> None:
        """The process died: the server finds out at once."""
        self._forget()
        self.server.part(self)

    def _notice(self, cut: int) -> None:
        if cut == self._cuts and (self.up.cut or self.down.cut):
            self.broken()

    def _forget(self) -> None:
        for subscription in self.subscriptions:
            self.server.detach(subscription)
        self.up.reset()
        self.down.reset()

    def _lost(self) -> None:
        if not self._connected:
            return
        self._connected = False
        self._fail(Unavailable("sim: connection lost"))
        for listener in list(self._listeners):
            listener(False)
        self.process.loop.call_later(drawn(self._rng, *RECONNECT_S), self._reconnect)

    def _reconnect(self) -> None:
        if self._closed:
            return
        if self.up.cut or self.down.cut or not self.server.up:
            self.process.loop.call_later(drawn(self._rng, *RECONNECT_S), self._reconnect)
            return
        self.up.reset()
        self.down.reset()
        self._connected = True
        for subscription in self.subscriptions:
            self.server.attach(subscription)
        for listener in list(self._listeners):
            listener(True)

    # Inside.

    def _call(self) -> tuple[int, asyncio.Future[Any]]:
        if not self.connected:
            raise Unavailable("sim: not connected")
        self._count += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[self._count] = future
        return self._count, future

    async def _answer(
        self, number: int, future: asyncio.Future[Any], what: str, timeout_s: float
    ) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise Timeout(f"sim: no answer on {what} in {timeout_s} s") from None
        finally:
            self._calls.pop(number, None)

    def _ask(self, asked: Incoming, number: int) -> None:
        if self.server.publish(asked) == 0:
            error = NoResponders(f"sim: nobody listens on {asked.subject}")
            self.down.send("inbox", self.deliver, self.answered, number, error)

    def _attach(self, subscription: SimSubscription, reply: Reply) -> None:
        self.server.attach(subscription)
        reply(None)

    def _leave(self) -> None:
        self._forget()
        self.server.part(self)

    def _fail(self, error: Unavailable) -> None:
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(error)
