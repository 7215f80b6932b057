"""The bus over NATS: one connection at a time, reopened with a jittered back-off."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable

import msgspec
import structlog
from nats.aio.subscription import Subscription as NatsSubscription

from corefleet.adapters.nats_client import Delivery, Receive
from corefleet.adapters.nats_connection import Connection
from corefleet.bus import Incoming
from corefleet.config import NatsConfig
from corefleet.errors import CorefleetError, NoResponders, Timeout, Unavailable
from corefleet.pki.holder import holder
from corefleet.subjects import INBOX, PLAIN_INBOXES, inboxes
from corefleet.tls import TlsFiles

_log = structlog.get_logger(__name__)

_SWEEP_S = 0.02
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 2.0
_BARRIER_S = 2.0
_CANCEL_AGAIN_S = 2.0

Answered = Callable[[Delivery | CorefleetError], None]


class Subscription:
    """A subscription that every new connection takes up again."""

    def __init__(self, bus: NatsBus, subject: str, queue: str, receive: Receive) -> None:
        self._bus = bus
        self.subject = subject
        self.queue = queue
        self.receive = receive
        self.current: NatsSubscription | None = None

    async def close(self) -> None:
        await self._bus.drop(self)


class _Call(msgspec.Struct, gc=False):
    """A request that waits. `answers` of a call for many ends with a bare status."""

    answered: Answered
    subject: str
    deadline: float
    answers: list[Delivery] | None = None


class NatsBus:
    """Core NATS behind the Bus protocol; JetStream builds on `call` and `listen`.

    Requests share one wildcard inbox. What is sent is written once a turn of the event
    loop, so a burst is one system call.
    """

    def __init__(
        self, config: NatsConfig, name: str, on_error: Callable[[Exception], None]
    ) -> None:
        self._config = config
        self._tls = TlsFiles.of(config.tls)
        self._name = name
        self._on_error = on_error
        self._servers = random.sample(config.servers, len(config.servers))
        self._connection: Connection | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._listeners: list[Callable[[bool], None]] = []
        self._subscriptions: dict[Subscription, None] = {}
        self.inboxes = _inboxes(self._tls)
        """What all our inboxes begin with."""
        self._inbox = f"{self.inboxes}.{secrets.token_hex(8)}."
        self._inbox_size = len(self._inbox)
        self._calls: dict[bytes, _Call] = {}
        self._numbers = 0
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    @classmethod
    async def connect(
        cls, config: NatsConfig, name: str, on_error: Callable[[Exception], None]
    ) -> NatsBus:
        """Connect to one of the servers.

        `on_error` is told of what goes wrong later, also of exceptions of handlers.
        Raises Unavailable when no server answers, Incompatible when one is too old,
        ConfigError when certificates cannot be used.
        """
        bus = cls(config, name, on_error)
        bus._subscriptions[Subscription(bus, f"{bus._inbox}*", "", bus._answered)] = None
        failure: Unavailable | None = None
        for url in bus._servers:
            try:
                await bus._open(url)
            except Unavailable as error:
                failure = error
                continue
            bus._keeper = asyncio.create_task(bus._keep(), name=f"nats {name}")
            return bus
        raise failure or Unavailable("NATS: no servers are configured")

    @property
    def connected(self) -> bool:
        return self._connection is not None

    @property
    def server(self) -> str:
        """URL of the server in use; '' while disconnected."""
        return "" if self._connection is None else self._connection.url

    def on_connection(self, listener: Callable[[bool], None]) -> None:
        self._listeners.append(listener)

    def forget_listener(self, listener: Callable[[bool], None]) -> None:
        """Undo `on_connection`."""
        self._listeners.remove(listener)

    def trouble(self, error: Exception) -> None:
        """Tell of what a handler of this bus raised."""
        self._on_error(error)

    def publish(self, subject: str, payload: bytes) -> None:
        """Queue a message; dropped while disconnected or the server does not read.

        Raises InvalidInput when the payload is larger than the server allows.
        """
        if self._connection is None:
            return
        try:
            self._connection.send(subject, payload)
        except Unavailable:
            # A connection that takes no more is as good as none: the message is dropped.
            return

    def send(self, subject: str, payload: bytes, reply: str, headers: str) -> None:
        """Queue a message with headers. Raises Unavailable, InvalidInput."""
        if self._connection is None:
            raise Unavailable("NATS: not connected")
        self._connection.send(subject, payload, reply, headers)

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        return (await self.call(subject, payload, timeout_s)).payload

    async def call(
        self, subject: str, payload: bytes, timeout_s: float, headers: str = ""
    ) -> Delivery:
        """Return the first answer. Raises as `request` does."""
        future: asyncio.Future[Delivery | CorefleetError]
        future = asyncio.get_running_loop().create_future()

        def answered(answer: Delivery | CorefleetError) -> None:
            if not future.done():
                future.set_result(answer)

        self.ask(subject, payload, timeout_s, headers, answered)
        answer = await future
        if isinstance(answer, CorefleetError):
            raise answer
        return answer

    async def call_many(self, subject: str, payload: bytes, timeout_s: float) -> list[Delivery]:
        """Return the answers up to and with the first that is a bare status."""
        answers: list[Delivery] = []
        future: asyncio.Future[Delivery | CorefleetError]
        future = asyncio.get_running_loop().create_future()

        def answered(answer: Delivery | CorefleetError) -> None:
            if not future.done():
                future.set_result(answer)

        self.ask(subject, payload, timeout_s, "", answered, answers)
        answer = await future
        if isinstance(answer, CorefleetError):
            raise answer
        return answers

    def ask(
        self,
        subject: str,
        payload: bytes,
        timeout_s: float,
        headers: str,
        answered: Answered,
        answers: list[Delivery] | None = None,
    ) -> None:
        """Send a request; `answered` is called once, later, with its answer or what went wrong.

        With `answers`, all are put there up to and with the first that is
        a bare status. Raises Unavailable, InvalidInput when nothing was sent.
        """
        self._numbers += 1
        number = self._numbers
        self.send(subject, payload, f"{self._inbox}{number}", headers)
        loop = asyncio.get_running_loop()
        self._calls[b"%d" % number] = _Call(answered, subject, loop.time() + timeout_s, answers)
        if self._sweeper is None:
            self._sweeper = loop.call_later(_SWEEP_S, self._sweep)

    async def subscribe(
        self, subject: str, handler: Callable[[Incoming], None], queue: str = ""
    ) -> Subscription:
        def receive(message: Delivery) -> None:
            subject, reply = message.subject.decode(), message.reply.decode()
            # Nobody can make us say something to somebody else by asking for the answer there.
            answer_to = reply if reply.startswith(INBOX) else ""
            handler(Incoming(subject, message.payload, answer_to))

        return await self.listen(subject, receive, queue)

    async def listen(self, subject: str, receive: Receive, queue: str = "") -> Subscription:
        """Subscribe with the message as it comes; the server knows it on return."""

        def guarded(message: Delivery) -> None:
            try:
                receive(message)
            except Exception as error:  # noqa: BLE001 - one bad message must not end the rest
                self._on_error(error)

        subscription = Subscription(self, subject, queue, guarded)
        self._subscriptions[subscription] = None
        connection = self._connection
        if connection is not None:
            try:
                current = await connection.listen(subject, queue, guarded)
                if connection is self._connection:
                    subscription.current = current
                await self._barrier()
            except Unavailable:
                # The keeper opens another connection, and that takes this up with the rest.
                _log.warning("subscription waits for a new connection", subject=subject)
        return subscription

    async def drop(self, subscription: Subscription) -> None:
        """End a subscription of this bus. Idempotent."""
        if subscription not in self._subscriptions:
            return
        del self._subscriptions[subscription]
        if self._connection is not None and subscription.current is not None:
            await self._connection.unlisten(subscription.current)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._keeper is not None:
            while not self._keeper.done():
                # Python 3.11's wait_for, which nats-py's ping waits by, can lose a cancellation.
                self._keeper.cancel()
                await asyncio.wait({self._keeper}, timeout=_CANCEL_AGAIN_S)
            await asyncio.gather(self._keeper, return_exceptions=True)
        connection = self._connection
        flushed = connection is not None and await self._flushed()
        self._connection = None
        self._fail_calls(Unavailable("NATS: the connection is closed"))
        if self._sweeper is not None:
            self._sweeper.cancel()
        if connection is not None:
            await connection.close(abort=not flushed)

    def _answered(self, message: Delivery) -> None:
        token = message.subject[self._inbox_size :]
        call = self._calls.get(token)
        if call is None:
            return
        if message.headers and message.status == "503":
            del self._calls[token]
            self._answer(call, NoResponders(f"NATS: nobody listens on {call.subject}"))
            return
        if call.answers is not None:
            call.answers.append(message)
            if not message.status:
                return
        del self._calls[token]
        self._answer(call, message)

    def _answer(self, call: _Call, answer: Delivery | CorefleetError) -> None:
        try:
            call.answered(answer)
        except Exception as error:  # noqa: BLE001 - one bad answer must not end the rest
            self._on_error(error)

    def _sweep(self) -> None:
        """Time out the calls whose deadline has passed: one timer for all of them."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        late = [token for token, call in self._calls.items() if call.deadline <= now]
        for token in late:
            call = self._calls.pop(token, None)
            if call is not None:
                self._answer(call, Timeout("NATS: no answer within the deadline"))
        self._sweeper = loop.call_later(_SWEEP_S, self._sweep) if self._calls else None

    def _fail_calls(self, error: CorefleetError) -> None:
        calls = list(self._calls.values())
        self._calls.clear()
        for call in calls:
            self._answer(call, error)

    async def _keep(self) -> None:
        """Hold a connection open as long as the bus lives."""
        while True:
            connection = self._connection
            if connection is not None:
                await connection.lost()
                self._connection = None
                _log.warning("connection to NATS lost", server=connection.url)
                self._fail_calls(Unavailable(f"NATS at {connection.url}: connection lost"))
                self._tell(connected=False)
                await connection.close(abort=True)
            await self._reopen()

    async def _reopen(self) -> None:
        delay = _FIRST_DELAY_S
        turn = 0
        while self._connection is None:
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            url = self._servers[turn % len(self._servers)]
            turn += 1
            try:
                await self._open(url)
            except CorefleetError as error:
                self._on_error(error)
                delay = min(delay * 2, _LONGEST_DELAY_S)

    async def _open(self, url: str) -> None:
        connection = await Connection.open(
            url, self._name, self._config.connect_timeout_s, self._on_error, self._tls
        )
        try:
            await self._take_up(connection)
            self._connection = connection
            await self._barrier()
        except BaseException:  # whatever ended this, the connection must not stay open
            self._connection = None
            await connection.close(abort=True)
            raise
        self._tell(connected=True)

    async def _flushed(self) -> bool:
        try:
            await self._barrier()
        except Unavailable:
            return False
        return True

    async def _take_up(self, connection: Connection) -> None:
        """Subscribe to all there is, and to what comes or goes meanwhile."""
        taken: set[Subscription] = set()
        while missing := [each for each in self._subscriptions if each not in taken]:
            for subscription in missing:
                taken.add(subscription)
                current = await connection.listen(
                    subscription.subject, subscription.queue, subscription.receive
                )
                subscription.current = current
                if subscription not in self._subscriptions:
                    await connection.unlisten(current)

    async def _barrier(self) -> None:
        """Return when the server has handled all that was sent before. Raises Unavailable.

        nats-py's own flush is none: its PING overtakes what waits to be written.
        """
        try:
            await self.call(f"{self._inbox}nobody.listens", b"", _BARRIER_S)
        except NoResponders:
            return

    def _tell(self, *, connected: bool) -> None:
        for listener in list(self._listeners):
            try:
                listener(connected)
            except Exception as error:  # noqa: BLE001 - the connection outlives its listeners
                self._on_error(error)


def _inboxes(tls: TlsFiles | None) -> str:
    """Return what our inboxes begin with: those of our certificate's holder, if there is one."""
    identity = None if tls is None else holder(tls.current().cert)
    return PLAIN_INBOXES if identity is None else inboxes(identity.role, identity.name)
