"""nats-py's client with a short way for messages, in and out.

nats-py matches every message against regular expressions, parses its headers, puts it into
a queue and wakes a task that hands it on; it writes from a task, too. That was half of what
a controld and an agentd did (docs/benchmarks.md). Here whoever subscribed is called in the
turn of the loop in which the bytes came, with the headers as they came; what is sent is
written at the end of the turn. All else - connecting, TLS, authentication, PING, errors of
the server, closing - is nats-py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.errors import ConnectionClosedError, MaxPayloadError, ProtocolError
from nats.protocol.parser import MAX_CONTROL_LINE_SIZE, Parser


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """A message as it came."""

    subject: bytes
    reply: bytes
    headers: bytes
    payload: bytes

    @property
    def status(self) -> str:
        """The code of a message that is nothing but a status, '' for any other."""
        if self.payload or not self.headers.startswith(_HEADERS_START):
            return ""
        return self.headers[len(_HEADERS_START) : self.headers.index(_CRLF)].strip()[:3].decode()

    def header(self, name: bytes) -> str | None:
        """Return the value of a header, None when the message has none of that name."""
        at = self.headers.find(b"\r\n" + name + b":")
        if at < 0:
            return None
        start = at + len(name) + 3
        return self.headers[start : self.headers.index(_CRLF, start)].strip().decode()


Receive = Callable[[Delivery], None]
"""Called with each message, in order. Must not raise."""

_CRLF = b"\r\n"
_HEADERS_START = b"NATS/1.0"


class LeanClient(Client):
    """A client whose subscriptions are made by `listen` and whose messages leave by `send`."""

    def __init__(self) -> None:
        super().__init__()
        self.receivers: dict[bytes, Receive] = {}
        self._ps = _Dispatcher(self)
        self._flush_planned = False

    async def listen(self, subject: str, queue: str, receive: Receive) -> Subscription:
        """Subscribe. Raises as nats-py's subscribe does."""
        # nats-py takes the next number before it waits for anything: no message can be earlier.
        self.receivers[b"%d" % (self._sid + 1)] = receive
        return await self.subscribe(subject, queue)

    def unlisten(self, subscription: Subscription) -> None:
        """Hand nothing on any more; the server is not told."""
        self.receivers.pop(b"%d" % subscription._id, None)

    def send(self, subject: str, payload: bytes, reply: str, headers: str) -> None:
        """Write a message at the end of this turn of the loop.

        `headers` are lines that end in CRLF. Raises MaxPayloadError, ConnectionClosedError.
        """
        if not self.is_connected:
            raise ConnectionClosedError
        size = len(payload)
        if size > self._max_payload:
            raise MaxPayloadError
        to = f"{subject} {reply}" if reply else subject
        if headers:
            block = f"NATS/1.0\r\n{headers}\r\n"
            head = f"HPUB {to} {len(block)} {len(block) + size}\r\n{block}".encode()
        else:
            head = f"PUB {to} {size}\r\n".encode()
        self._pending += (head, payload, _CRLF)
        self._pending_data_size += len(head) + size + 2
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._write_pending)

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the socket has not taken."""
        writer = self._writer()
        buffered = 0 if writer is None else int(writer.transport.get_write_buffer_size())
        return buffered + self._pending_data_size

    @property
    def secured(self) -> bool:
        """Whether what is sent and read goes through TLS."""
        writer = self._writer()
        return writer is not None and writer.get_extra_info("ssl_object") is not None

    def note_tls(self) -> None:
        """Tell asyncio of TLS, as nats-py does not: it warns when a connection ends otherwise."""
        writer = self._writer()
        protocol = None if writer is None else writer.transport.get_protocol()
        if isinstance(protocol, asyncio.StreamReaderProtocol):
            vars(protocol)["_over_ssl"] = True

    @property
    def asked_for_tls(self) -> bool:
        """Whether the server said that it speaks TLS only."""
        return bool(self._server_info.get("tls_required"))

    def abort(self) -> None:
        """Drop the socket with its unsent bytes; nats-py has no public way to do that."""
        writer = self._writer()
        if writer is not None:
            writer.transport.abort()

    def _writer(self) -> asyncio.StreamWriter | None:
        writer: asyncio.StreamWriter | None = getattr(self._transport, "_io_writer", None)
        return writer

    def _write_pending(self) -> None:
        """Do what nats-py's flusher does, without waiting: `unsent_bytes` is what bounds it."""
        self._flush_planned = False
        pending, transport = self._pending, self._transport
        if not pending or transport is None or not self.is_connected:
            return
        self._pending = []
        self._pending_data_size = 0
        transport.write(b"".join(pending))


class _Dispatcher(Parser):
    """Reads messages; everything else is handed to nats-py's own parser, line by line."""

    def __init__(self, client: LeanClient) -> None:
        super().__init__(client)
        self._receivers = client.receivers
        self._parts: list[bytes] = []
        self._held = 0
        self._needed = 0

    def reset(self) -> None:
        super().reset()
        self._parts = []
        self._held = self._needed = 0

    async def parse(self, data: bytes = b"") -> None:
        """Take what was read. Raises ProtocolError for what is none of the protocol."""
        if self._held:
            self._parts.append(data)
            self._held += len(data)
            if self._held < self._needed:
                return
            data = b"".join(self._parts)
            self._parts = []
            self._held = self._needed = 0
        at = 0
        try:
            while at < len(data):
                line_end = data.find(_CRLF, at)
                if line_end < 0:
                    if len(data) - at > MAX_CONTROL_LINE_SIZE:
                        raise ProtocolError("nats: a line without an end")
                    break
                first = data[at]
                if first == 77:  # M
                    start, stop = self._message(data, at, line_end)
                elif first == 72:  # H
                    start, stop = self._message_with_headers(data, at, line_end)
                else:
                    start = stop = line_end
                    await super().parse(data[at : line_end + 2])
                if stop < start:
                    break
                at = stop + 2
        except (ValueError, IndexError) as error:
            raise ProtocolError(f"nats: malformed message: {error}") from error
        if at < len(data):
            self._parts = [data[at:]]
            self._held = len(data) - at
        # Many chunks may lie ready: what they made due comes before the next one.
        await asyncio.sleep(0)

    def _message(self, data: bytes, at: int, line_end: int) -> tuple[int, int]:
        """Hand a message on; return where its payload starts and stops, -1 if it is not whole."""
        words = data[at:line_end].split()
        start = line_end + 2
        stop = start + int(words[-1])
        if stop + 2 > len(data):
            self._needed = stop + 2 - at
            return start, -1
        receive = self._receivers.get(words[2])
        if receive is not None:
            reply = words[3] if len(words) == 5 else b""
            receive(Delivery(words[1], reply, b"", data[start:stop]))
        return start, stop

    def _message_with_headers(self, data: bytes, at: int, line_end: int) -> tuple[int, int]:
        words = data[at:line_end].split()
        start = line_end + 2
        stop = start + int(words[-1])
        if stop + 2 > len(data):
            self._needed = stop + 2 - at
            return start, -1
        body = start + int(words[-2])
        receive = self._receivers.get(words[2])
        if receive is not None:
            reply = words[3] if len(words) == 6 else b""
            receive(Delivery(words[1], reply, data[start:body], data[body:stop]))
        return start, stop
