"""One connection to one NATS server: nats-py with its reconnecting switched off.

nats-py waits for its outgoing bytes to drain before it gives a connection up, so a
frozen server holds it for ever. Here a connection that does not answer is aborted, and
`NatsBus` opens another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError, UnexpectedEOF

from corefleet.adapters.nats_client import LeanClient, Receive
from corefleet.errors import Incompatible, InvalidInput, Unavailable
from corefleet.tls import TlsFiles
from corefleet.tls_trouble import ask, why

_OLDEST_SERVER = (2, 12)
_MOST_UNSENT_BYTES = 32 * 1024 * 1024
_CHECK_S = 0.25
_PING_EVERY_S = 1.0
_PING_TIMEOUT_S = 3
_NEVER_S = 10**8
_CLOSE_S = 1.0


class Connection:
    """A connection from `open` until `lost` returns; it is never used again after that."""

    def __init__(self, client: LeanClient, lost: asyncio.Event, url: str) -> None:
        self._client = client
        self._lost = lost
        self._subscriptions: set[Subscription] = set()
        self.url = url

    @classmethod
    async def open(
        cls,
        url: str,
        name: str,
        timeout_s: float,
        on_error: Callable[[Exception], None],
        tls: TlsFiles | None = None,
    ) -> Connection:
        """Connect to `url` within `timeout_s`, with what `tls` holds now.

        Raises Unavailable, or Incompatible when the server is older than 2.12.
        """
        client = LeanClient()
        lost = asyncio.Event()
        connected = False
        reason: Exception | None = None

        async def failed(error: Exception) -> None:
            nonlocal reason
            reason = reason or error
            if connected:
                if isinstance(error, OSError | UnexpectedEOF):
                    lost.set()
                on_error(error)

        async def closed() -> None:
            lost.set()

        connection = cls(client, lost, url)
        try:
            async with asyncio.timeout(timeout_s):
                await client.connect(
                    url,
                    name=name,
                    error_cb=failed,
                    closed_cb=closed,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    ping_interval=_NEVER_S,
                    pending_size=0,
                    inbox_prefix="_INBOX.cf",
                    tls=None if tls is None else tls.client_context(),
                )
            if not client.is_connected:
                raise ConnectionResetError("the server closed the connection")
            if tls is not None:
                _check_secured(client, url)
            _check_version(client, url)
        except (NatsError, OSError) as error:
            await connection.close(abort=True)
            told = await _reason(reason or error, url, client, tls)
            raise Unavailable(f"NATS at {url}: {told}") from error
        except BaseException:  # whatever ended this, the half-open client must not stay
            await connection.close(abort=True)
            raise
        connected = True
        return connection

    def send(self, subject: str, payload: bytes, reply: str = "", headers: str = "") -> None:
        """Hand a message to the client, which writes it with the others of this loop turn.

        `headers` are lines that end in CRLF. Raises Unavailable when the server has not
        taken what was sent before, and InvalidInput when the payload is larger than the
        server allows.
        """
        client = self._client
        if client.unsent_bytes > _MOST_UNSENT_BYTES:
            raise Unavailable(f"NATS at {self.url}: does not read what is sent")
        try:
            client.send(subject, payload, reply, headers)
        except MaxPayloadError:
            raise InvalidInput(
                "payload", f"{len(payload)} bytes for {subject}", f"at most {client.max_payload}"
            ) from None
        except NatsError as error:
            self._lost.set()
            raise Unavailable(f"NATS at {self.url}: {error}") from error

    async def listen(self, subject: str, queue: str, receive: Receive) -> Subscription:
        """Subscribe; `receive` gets the messages one after another. Raises Unavailable."""
        try:
            subscription = await self._client.listen(subject, queue, receive)
        except (NatsError, OSError) as error:
            self._lost.set()
            raise Unavailable(f"NATS at {self.url}: {error}") from error
        self._subscriptions.add(subscription)
        return subscription

    async def unlisten(self, subscription: Subscription) -> None:
        """End a subscription; nothing is delivered after this returns."""
        self._subscriptions.discard(subscription)
        self._client.unlisten(subscription)
        try:
            await subscription.unsubscribe()
        except (NatsError, OSError):
            # Only a closed connection refuses, and it delivers nothing any more.
            self._lost.set()

    async def _ping(self) -> bool:
        """Whether the server answers; a late PONG would break the reader, so no is final."""
        try:
            await self._client.rtt(_PING_TIMEOUT_S)
        except (NatsError, OSError):
            self._lost.set()
            return False
        return True

    async def lost(self) -> None:
        """Return when the server has gone, closed the connection or stopped answering."""
        loop = asyncio.get_running_loop()
        ping_at = loop.time() + _PING_EVERY_S
        while self._client.is_connected and not self._lost.is_set():
            try:
                async with asyncio.timeout(_CHECK_S):
                    await self._lost.wait()
            except TimeoutError:
                if loop.time() < ping_at:
                    continue
                if not await self._ping():
                    return
                ping_at = loop.time() + _PING_EVERY_S

    async def close(self, abort: bool) -> None:
        """Disconnect within a second; with `abort` what waits to be sent is lost. Idempotent."""
        if abort:
            self._client.abort()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._client.close()
        except (TimeoutError, NatsError, OSError):
            self._client.abort()
        for subscription in self._subscriptions:
            self._client.unlisten(subscription)
        self._subscriptions.clear()


async def _reason(error: Exception, url: str, client: LeanClient, tls: TlsFiles | None) -> str:
    if tls is None:
        if client.asked_for_tls:
            return "the server asks for TLS, and `nats.tls` is not set"
        return str(error) or repr(error)
    address = url.rpartition("/")[2].rpartition("@")[2]
    told = ""
    if client.asked_for_tls and isinstance(error, ConnectionError):
        # What was written to a server that had refused us by then hides why.
        told = await ask(address, tls, greeted=True)
    return told or why(error, address, tls)


def _check_secured(client: LeanClient, url: str) -> None:
    """Raise Unavailable for a server in plain text, to which nats-py connects all the same."""
    if not client.secured:
        raise Unavailable(f"NATS at {url}: the server does not speak TLS, and `nats.tls` is set")
    client.note_tls()


def _check_version(client: Client, url: str) -> None:
    version = client.connected_server_version
    try:
        found = (version.major or 0, version.minor or 0)
    except ValueError:
        found = (0, 0)
    if found < _OLDEST_SERVER:
        raise Incompatible(
            f"NATS at {url}: server version {version!r}; expected 2.12 or newer "
            "(older ones ignore time to live and atomic batches)"
        )
