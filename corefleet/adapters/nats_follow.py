"""A follower over JetStream: an ordered push consumer that is made anew when it breaks.

The server's consumer is ephemeral and in memory. Whatever happens to it - a gap, missed
heartbeats, a restart, a lost connection - the next one starts behind the last message
that was handed on, and what still comes from the old one is ignored.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import structlog

from corefleet.adapters.jetstream import ConsumerAnswer, answer_error, decode_answer
from corefleet.adapters.nats_bus import NatsBus, Subscription
from corefleet.adapters.nats_client import Delivery
from corefleet.bus import Stored
from corefleet.errors import CorefleetError, Unavailable
from corefleet.subjects import consumer_create, consumer_delete

_log = structlog.get_logger(__name__)

_HEARTBEAT_S = 0.5
_SILENCE_S = 2.0
_CREATE_S = 2.0
_BEGIN_S = 10.0
_INACTIVE_S = 10.0
_RETRY_S = 0.25
_NS = 1_000_000_000


class NatsFollower:
    """Delivers messages in order, each once, until closed. Not to be closed by its handler."""

    def __init__(
        self,
        bus: NatsBus,
        stream: str,
        filters: Sequence[str],
        handler: Callable[[Stored], Awaitable[None] | None],
        start: int,
    ) -> None:
        self._bus = bus
        self._stream = stream
        self._filters = list(filters)
        self._handler = handler
        self._last = start - 1
        self._id = secrets.token_hex(6)
        self._generation = 0
        self._next_in_consumer = 1
        self._heard = 0.0
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._idle.set()
        self._busy: asyncio.Future[None] | None = None
        self._waiting: deque[tuple[int, Delivery]] = deque()
        self._broken = asyncio.Event()
        self._closed = False
        self._consumer = ""
        self._subscription: Subscription | None = None
        self._tender: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Start delivery. Raises Unavailable when the stream does not answer for 10 s."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + _BEGIN_S
        while True:
            try:
                await self._create()
                break
            except Unavailable:
                if loop.time() > give_up:
                    await self._discard()
                    raise
                await asyncio.sleep(_RETRY_S)
            except BaseException:  # whatever ended this, the subscription must not stay
                await self._discard()
                raise
        self._bus.on_connection(self._connection_changed)
        self._tender = asyncio.create_task(self._tend(), name=f"follow {self._stream}")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._bus.forget_listener(self._connection_changed)
        if self._tender is not None:
            self._tender.cancel()
            await asyncio.gather(self._tender, return_exceptions=True)
        await self._idle.wait()
        await self._discard()

    def _connection_changed(self, connected: bool) -> None:
        if connected:
            self._broken.set()

    async def _tend(self) -> None:
        """Make a new consumer whenever the one that delivers has broken."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(_SILENCE_S):
                    await self._broken.wait()
            except TimeoutError:
                waiting = self._idle.is_set() and self._bus.connected
                if not waiting or loop.time() - self._heard < _SILENCE_S:
                    continue
            try:
                await self._create()
            except CorefleetError as error:
                if not self._bus.connected:
                    continue
                _log.warning("cannot follow the stream yet", stream=self._stream, error=str(error))
                self._broken.set()
                await asyncio.sleep(_RETRY_S)

    async def _create(self) -> None:
        self._broken.clear()
        await self._discard()
        self._generation += 1
        self._next_in_consumer = 1
        generation = self._generation
        name = self._consumer = f"{self._id}-{generation}"
        inbox = f"{self._bus.inboxes}.follow.{name}"

        def receive(message: Delivery) -> None:
            if generation == self._generation and not self._closed:
                self._receive(message)

        # A subscription for each consumer: the server looks for interest in the literal
        # delivery subject, so one wildcard for all of them would not do.
        self._subscription = await self._bus.listen(inbox, receive)
        config: dict[str, object] = {
            "name": name,
            "deliver_subject": inbox,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._last + 1,
            "ack_policy": "none",
            "max_deliver": 1,
            "replay_policy": "instant",
            "flow_control": True,
            "idle_heartbeat": int(_HEARTBEAT_S * _NS),
            "inactive_threshold": int(_INACTIVE_S * _NS),
            "mem_storage": True,
            "num_replicas": 1,
        }
        if len(self._filters) == 1:
            config["filter_subject"] = self._filters[0]
        elif self._filters:
            config["filter_subjects"] = self._filters
        body = {"stream_name": self._stream, "config": config, "action": "create"}
        answer = await self._bus.call(
            consumer_create(self._stream, name), msgspec.json.encode(body), _CREATE_S
        )
        error = decode_answer(answer.payload, ConsumerAnswer).error
        if error is not None:
            raise answer_error(error, f"consumer of {self._stream}")
        self._heard = asyncio.get_running_loop().time()

    async def _discard(self) -> None:
        """Forget the consumer and tell the server, which would also find out by itself."""
        subscription = self._subscription
        if subscription is None:
            return
        self._subscription = None
        await subscription.close()
        self._bus.publish(consumer_delete(self._stream, self._consumer), b"")

    def _receive(self, message: Delivery) -> None:
        if self._busy is not None:
            self._waiting.append((self._generation, message))
            return
        self._heard = self._loop.time()
        if message.status == "100":
            self._control(message)
            return
        sequence, number = _position(message.reply)
        if number != self._next_in_consumer:
            self._break(f"message {number} where {self._next_in_consumer} was due")
            return
        self._next_in_consumer += 1
        self._last = sequence
        result = self._handler(Stored(message.subject.decode(), message.payload, sequence))
        if result is not None:
            self._idle.clear()
            self._busy = asyncio.ensure_future(self._finish(result))

    async def _finish(self, result: Awaitable[None]) -> None:
        """Wait for a handler that takes its time, then hand on what came meanwhile."""
        try:
            await result
        except Exception as error:  # noqa: BLE001 - one bad message must not end the rest
            self._bus.trouble(error)
        self._heard = self._loop.time()
        self._busy = None
        self._idle.set()
        while self._waiting and self._busy is None:
            generation, message = self._waiting.popleft()
            if generation == self._generation and not self._closed:
                try:
                    self._receive(message)
                except Exception as error:  # noqa: BLE001 - as above
                    self._bus.trouble(error)

    def _control(self, message: Delivery) -> None:
        if message.reply:
            self._bus.publish(message.reply.decode(), b"")
            return
        stalled = message.header(b"Nats-Consumer-Stalled")
        if stalled:
            self._bus.publish(stalled, b"")
        sent = message.header(b"Nats-Last-Consumer")
        if sent is not None and int(sent) >= self._next_in_consumer:
            self._break(f"{sent} messages sent, {self._next_in_consumer - 1} received")

    def _break(self, reason: str) -> None:
        _log.info("follower starts anew", stream=self._stream, after=self._last, reason=reason)
        self._generation += 1
        self._broken.set()


def _position(reply: bytes) -> tuple[int, int]:
    """Return stream sequence and consumer sequence of a delivery.

    Its reply subject is `$JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer
    seq>...`, with domain and account before the stream when the server has a domain.
    """
    tokens = reply.split(b".")
    first = 5 if len(tokens) == 9 else 7
    return int(tokens[first]), int(tokens[first + 1])
