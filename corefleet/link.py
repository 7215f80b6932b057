"""Links: streams of tagged messages over Unix sockets.

A frame is a 4-byte big-endian length and one MessagePack array of messages. Everything
that is sent in one turn of the event loop leaves in one frame; the peer receives a frame's
messages together.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import structlog

from corefleet.errors import Conflict, CorruptRecord, InvalidInput, Timeout, Unavailable
from corefleet.messages.links import MAX_FRAME_BYTES, Frame

R = TypeVar("R")

MAX_PENDING_BYTES = 4 * MAX_FRAME_BYTES
"""Bytes that may wait for a peer that does not read; beyond, the link is cut."""

_LENGTH = struct.Struct(">I")
_ARRAY_ROOM = 5
_READ_BUFFER_BYTES = 1 << 20
_MAX_PATH_BYTES = 107  # sockaddr_un.sun_path without its final NUL
_RETRY_S = 0.02
_CLOSE_S = 1.0
_ACCEPT_PAUSE_S = 0.1

_log = structlog.get_logger(__name__)
_encoder = msgspec.msgpack.Encoder()


class Link(Generic[R]):
    """One end of a connection; receives messages of the union `R`.

    `send` never waits: who sends much awaits `drain` now and then. One task at a time
    may receive.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: Any, name: str
    ) -> None:
        self.name = name
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[tuple[R, ...]] = msgspec.msgpack.Decoder(
            tuple[kind, ...]
        )
        self._outgoing: list[bytes] = []
        self._flush_planned = False
        self._why_closed = ""

    @property
    def closed(self) -> bool:
        """Whether this end was closed or cut; a dead peer shows when receiving."""
        return bool(self._why_closed)

    def send(self, message: Frame) -> None:
        """Queue `message` for the frame of this turn of the loop.

        Raises InvalidInput for a message too large for any frame and Unavailable when the
        link is closed or the peer has stopped reading.
        """
        if self._why_closed:
            raise Unavailable(f"{self.name}: {self._why_closed}")
        data = _encoder.encode(message)
        if len(data) + _ARRAY_ROOM > MAX_FRAME_BYTES:
            raise InvalidInput(
                type(message).__name__, len(data), f"at most {MAX_FRAME_BYTES} bytes encoded"
            )
        self._outgoing.append(data)
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    async def drain(self) -> None:
        """Wait until the peer has read enough that sending more is reasonable.

        Raises Unavailable when the peer is gone.
        """
        self._flush()
        if self._why_closed:
            raise Unavailable(f"{self.name}: {self._why_closed}")
        try:
            await self._writer.drain()
        except OSError as error:
            raise Unavailable(f"{self.name}: the peer is gone: {error}") from error

    async def receive(self) -> tuple[R, ...]:
        """Return the messages of the next frame.

        Raises Unavailable when the peer or this end closed, CorruptRecord when the bytes
        are no frame of this link; the link is of no use after either.
        """
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > MAX_FRAME_BYTES:
                raise CorruptRecord(
                    f"{self.name}: a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed"
                )
            data = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError) as error:
            why = self._why_closed or "the peer is gone"
            raise Unavailable(f"{self.name}: {why}") from error
        try:
            return self._decoder.decode(data)
        except msgspec.DecodeError as error:
            raise CorruptRecord(f"{self.name}: {error} in a frame of {length} bytes") from error

    def __aiter__(self) -> AsyncIterator[tuple[R, ...]]:
        """Iterate over frames until the peer is gone; raises CorruptRecord as `receive`."""
        return self._frames()

    async def _frames(self) -> AsyncIterator[tuple[R, ...]]:
        while True:
            try:
                batch = await self.receive()
            except Unavailable:
                return
            yield batch

    async def close(self) -> None:
        """Send what is queued, then close; a peer that does not read is cut after 1 s."""
        self._flush()
        self._why_closed = self._why_closed or "closed on this side"
        self._writer.close()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._writer.wait_closed()
        except TimeoutError:
            self._writer.transport.abort()
        except OSError:  # the peer closed first: the wanted end
            return

    def cut(self, reason: str) -> None:
        """Close at once and drop what is queued; `reason` shows in later errors."""
        self._why_closed = self._why_closed or reason
        self._outgoing.clear()
        self._writer.transport.abort()

    def _flush(self) -> None:
        self._flush_planned = False
        if self._why_closed:
            return
        messages, self._outgoing = self._outgoing, []
        start, size = 0, 0
        for at, data in enumerate(messages):
            if size + len(data) + _ARRAY_ROOM > MAX_FRAME_BYTES:
                self._write(messages[start:at])
                start, size = at, 0
            size += len(data)
        if start < len(messages):
            self._write(messages[start:])
        if self._writer.transport.get_write_buffer_size() > MAX_PENDING_BYTES:
            self.cut(f"the peer left more than {MAX_PENDING_BYTES} bytes unread")

    def _write(self, messages: list[bytes]) -> None:
        body = _array_header(len(messages)) + b"".join(messages)
        self._writer.write(_LENGTH.pack(len(body)) + body)


Handler = Callable[[Link[Any]], Awaitable[None]]


class LinkServer:
    """A listening socket and its open links. Made by `serve`."""

    def __init__(self, path: Path, listener: socket.socket, kind: Any, handler: Handler) -> None:
        self.path = path
        self._listener = listener
        self._kind = kind
        self._handler = handler
        self._inode = os.stat(path).st_ino
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def close(self) -> None:
        """Stop listening, remove the socket file, cancel the handlers and await them."""
        self._accepting.cancel()
        await asyncio.wait({self._accepting})
        self._listener.close()
        _remove_if(self.path, self._inode)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        count = 0
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # out of file descriptors; the listener stays good
                _log.warning("Cannot accept a link", path=str(self.path), reason=str(error))
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            count += 1
            task = loop.create_task(self._run(connection, f"{self.path.name}#{count}"))
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, connection))

    async def _run(self, connection: socket.socket, name: str) -> None:
        reader, writer = await asyncio.open_unix_connection(
            sock=connection, limit=_READ_BUFFER_BYTES
        )
        link: Link[Any] = Link(reader, writer, self._kind, name)
        try:
            await self._handler(link)
        except Unavailable:
            link.cut("the peer is gone")
        except CorruptRecord as error:
            _log.warning("Link closed for what its peer sent", link=name, reason=str(error))
            link.cut("the peer sent what is no message of this link")
        finally:
            await link.close()

    def _ended(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        connection.close()  # for a task that was cancelled before it wrapped the socket
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"{self.path.name}: a link's handler failed", "exception": error}
            )


async def serve(path: Path, kind: Any, handler: Handler) -> LinkServer:
    """Listen on `path`; `handler` runs once a connection and its end closes the link.

    `kind` is the union of messages that peers send. The file appears, for this user only,
    once connections are accepted; a file that a dead process left is replaced. A handler
    may let Unavailable and CorruptRecord pass: they end its link alone.
    Raises Conflict when another process listens there, InvalidInput for a path too long.
    """
    _check_path(path)
    await _refuse_living(path)
    return LinkServer(path, _listen(path), kind, handler)


async def connect(path: Path, kind: Any, timeout_s: float) -> Link[Any]:
    """Connect to `path`, waiting up to `timeout_s` for someone to listen there.

    `kind` is the union of messages that the peer sends. Raises Timeout, or InvalidInput
    for a path too long.
    """
    _check_path(path)
    loop = asyncio.get_running_loop()
    give_up = loop.time() + timeout_s
    while True:
        try:
            reader, writer = await asyncio.open_unix_connection(path, limit=_READ_BUFFER_BYTES)
            return Link(reader, writer, kind, path.name)
        except OSError as error:
            if loop.time() + _RETRY_S > give_up:
                raise Timeout(
                    f"{path}: nobody listens after {timeout_s} s: {error.strerror or error}"
                ) from error
        await asyncio.sleep(_RETRY_S)


def _array_header(count: int) -> bytes:
    if count < 16:
        return bytes((0x90 | count,))
    if count < 1 << 16:
        return b"\xdc" + count.to_bytes(2, "big")
    return b"\xdd" + count.to_bytes(4, "big")


def _check_path(path: Path) -> None:
    room = _MAX_PATH_BYTES - (len(os.fsencode(_aside(path))) - len(os.fsencode(path)))
    if len(os.fsencode(path)) > room:
        raise InvalidInput("socket path", str(path), f"at most {room} bytes")


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}")


def _listen(path: Path) -> socket.socket:
    """Listen beside `path`, then rename: the file appears ready, and replaces in one step."""
    aside = _aside(path)
    aside.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(os.fspath(aside))
        aside.chmod(0o600)
        listener.listen(128)
        listener.setblocking(False)
        aside.rename(path)
    except BaseException:  # cancelled too: the socket must not stay open
        listener.close()
        raise
    return listener


async def _refuse_living(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(probe, os.fspath(path))
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ECONNREFUSED, errno.ENOTSOCK}:
                return
            raise
    raise Conflict(f"{path}: another process listens there")


def _remove_if(path: Path, inode: int) -> None:
    """Remove `path` unless a successor has replaced it already."""
    try:
        if path.stat().st_ino == inode:
            path.unlink()
    except FileNotFoundError:
        return
