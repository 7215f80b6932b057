"""A message server in this process, and the bus over it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from corefleet.adapters.memory_stream import MemoryStream, subject_matches
from corefleet.bus import Incoming
from corefleet.clock import Clock, SystemClock
from corefleet.errors import NoResponders, Timeout, Unavailable


class MemoryServer:
    """What the buses and logs of one process share; it forgets all with the process.

    `reachable(False)` is a server that is gone for everybody until `reachable(True)`.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.streams: dict[str, MemoryStream] = {}
        self.up = True
        self._subscriptions: list[_Subscription] = []
        self._turns: dict[str, int] = {}
        self._listeners: list[Callable[[bool], None]] = []

    def reachable(self, up: bool) -> None:
        """Let every client lose the server, or find it again."""
        if up == self.up:
            return
        self.up = up
        for listener in list(self._listeners):
            listener(up)

    def listen(self, listener: Callable[[bool], None]) -> None:
        """Call `listener` when the server is lost or found."""
        self._listeners.append(listener)

    def forget(self, listener: Callable[[bool], None]) -> None:
        self._listeners.remove(listener)

    def attach(self, subscription: _Subscription) -> None:
        self._subscriptions.append(subscription)

    def detach(self, subscription: _Subscription) -> None:
        """Idempotent."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def deliver(self, message: Incoming) -> int:
        """Hand `message` to whom it concerns; return how many that are."""
        matching = [each for each in self._subscriptions if each.matches(message.subject)]
        groups: dict[str, list[_Subscription]] = {}
        chosen = []
        for each in matching:
            if each.queue:
                groups.setdefault(each.queue, []).append(each)
            else:
                chosen.append(each)
        for queue, members in groups.items():
            turn = self._turns.get(queue, 0)
            self._turns[queue] = turn + 1
            chosen.append(members[turn % len(members)])
        for each in chosen:
            each.take(message)
        return len(chosen)


class _Subscription:
    """Hands messages to a handler in later turns of the loop, in order."""

    def __init__(
        self,
        server: MemoryServer,
        subject: str,
        queue: str,
        handler: Callable[[Incoming], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self.queue = queue
        self._server = server
        self._tokens = subject.split(".")
        self._handler = handler
        self._on_error = on_error
        self._waiting: deque[Incoming] = deque()

    def matches(self, subject: str) -> bool:
        return subject_matches(self._tokens, subject)

    def take(self, message: Incoming) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._drain)
        self._waiting.append(message)

    async def close(self) -> None:
        self._server.detach(self)
        self._waiting.clear()

    def _drain(self) -> None:
        while self._waiting:
            message = self._waiting.popleft()
            try:
                self._handler(message)
            except Exception as error:  # noqa: BLE001 - one bad message must not end the rest
                self._on_error(error)


class MemoryBus:
    """The Bus protocol over a MemoryServer."""

    def __init__(
        self, server: MemoryServer, on_error: Callable[[Exception], None] | None = None
    ) -> None:
        self._server = server
        self._on_error = on_error or _raise
        self._listeners: list[Callable[[bool], None]] = []
        self._subscriptions: list[_Subscription] = []
        self._waiting: set[asyncio.Future[bytes]] = set()
        self._numbers = 0
        self._closed = False
        server.listen(self._changed)

    @property
    def connected(self) -> bool:
        return self._server.up and not self._closed

    def on_connection(self, listener: Callable[[bool], None]) -> None:
        self._listeners.append(listener)

    def publish(self, subject: str, payload: bytes) -> None:
        if self.connected:
            self._server.deliver(Incoming(subject, payload, ""))

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        if not self.connected:
            raise Unavailable("memory server: not connected")
        self._numbers += 1
        inbox = f"_INBOX.{id(self):x}.{self._numbers}"
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def answer(message: Incoming) -> None:
            if not answered.done():
                answered.set_result(message.payload)

        subscription = _Subscription(self._server, inbox, "", answer, self._on_error)
        self._server.attach(subscription)
        self._waiting.add(answered)
        try:
            if self._server.deliver(Incoming(subject, payload, inbox)) == 0:
                raise NoResponders(f"memory server: nobody listens on {subject}")
            async with asyncio.timeout(timeout_s):
                return await answered
        except TimeoutError:
            raise Timeout(f"memory server: no answer on {subject} in {timeout_s} s") from None
        finally:
            self._waiting.discard(answered)
            await subscription.close()

    async def subscribe(
        self, subject: str, handler: Callable[[Incoming], None], queue: str = ""
    ) -> _Subscription:
        subscription = _Subscription(self._server, subject, queue, handler, self._on_error)
        self._subscriptions.append(subscription)
        self._server.attach(subscription)
        return subscription

    async def close(self) -> None:
        if self._closed:
            return
        self._changed(False)
        self._closed = True
        self._server.forget(self._changed)
        for subscription in self._subscriptions:
            await subscription.close()

    def _changed(self, up: bool) -> None:
        if not up:
            for answered in list(self._waiting):
                if not answered.done():
                    answered.set_exception(Unavailable("memory server: connection lost"))
        for listener in list(self._listeners):
            listener(up)


def _raise(error: Exception) -> None:
    raise error
