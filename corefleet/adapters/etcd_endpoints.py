"""Calls to an etcd cluster: which member to ask, how long to wait, what to raise.

A call goes to the member that worked last. One that is not connected gets a short head
start, then the next one is tried beside it, so that a dead member costs a few
milliseconds once. A request is sent a second time only if the caller says that this
does no harm; otherwise a lost answer is a Timeout, and the caller finds out.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio
import structlog
from etcd.api.etcdserverpb import rpc_pb2_grpc

from corefleet.errors import (
    CorefleetError,
    Incompatible,
    InvalidInput,
    NotFound,
    Timeout,
    Unavailable,
)
from corefleet.grpc_tls import open_channel
from corefleet.tls import Material, TlsFiles
from corefleet.tls_trouble import ask

T = TypeVar("T")

HEAD_START_S = 0.02
"""How long a member that is not connected is waited for before the next one is tried."""
ATTEMPTS = 3
"""A call that may be repeated gives one attempt this part of its deadline at most."""

WITH_LEADER = (("hasleader", "true"),)
"""Metadata by which a member that has no leader refuses at once instead of hanging."""

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # etcd drops clients that ping more often than every 5 s.
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]

_REFUSED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE,
}


_LET_GO_S = 30.0
"""How long calls over a channel of former certificates may go on; watches begin anew then."""

_log = structlog.get_logger(__name__)


class Compacted(Unavailable):
    """The revision to read at is compacted away; a newer one may be read."""


def refused(error: grpc.aio.AioRpcError) -> bool:
    """Whether the cluster said no: it had no effect, and every member would say the same."""
    return error.code() in _REFUSED


def translate(what: str, error: grpc.aio.AioRpcError, *, sent_once: bool) -> CorefleetError:
    """Return what to raise for `error` of the call named `what`.

    `sent_once` means that the request may have taken effect although it failed.
    """
    code, details = error.code(), error.details()
    message = f"etcd {what}: {details} ({code.name})"
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidInput(what, details, "a request that etcd accepts")
    if code is grpc.StatusCode.NOT_FOUND:
        return NotFound(message)
    if code is grpc.StatusCode.OUT_OF_RANGE:
        return Compacted(message)
    if code in _REFUSED:
        return Incompatible(message)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Unavailable(message)
    if sent_once:
        return Timeout(f"{message}; it may have taken effect")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Timeout(message)
    return Unavailable(message)


def backoff(failures: int, longest_s: float) -> float:
    """Return how long to wait after so many failures in a row: doubling, with jitter."""
    return min(longest_s, 0.02 * 2.0 ** min(failures, 10)) * random.uniform(0.5, 1.0)


class Endpoint:
    """One member: its channel, connected when first needed, and the stubs over it.

    With other certificates in `tls` it gets another channel; calls over the former one end
    in their own time.
    """

    def __init__(self, address: str, tls: TlsFiles | None) -> None:
        self.address = address
        self.trouble = ""
        """Why the member is not reached, as far as TLS is the reason."""
        self._tls = tls
        self._connecting: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._letting_go: dict[asyncio.Task[None], Any] = {}
        self._open(None if tls is None else tls.current())

    def _open(self, material: Material | None) -> None:
        self._material = material
        self._channel = open_channel(self.address, material, _OPTIONS)
        self.kv = rpc_pb2_grpc.KVStub(self._channel)
        self.watch = rpc_pb2_grpc.WatchStub(self._channel)
        self.lease = rpc_pb2_grpc.LeaseStub(self._channel)
        self.maintenance = rpc_pb2_grpc.MaintenanceStub(self._channel)

    def refresh(self) -> None:
        """Take up certificates that were replaced."""
        if self._tls is None or self._tls.current() is self._material:
            return
        former = self._channel
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        self._open(self._tls.current())
        closing = asyncio.create_task(former.close(_LET_GO_S), name=f"etcd {self.address} former")
        self._letting_go[closing] = former
        closing.add_done_callback(lambda done: self._letting_go.pop(done, None))

    def ready(self) -> bool:
        return bool(self._channel.get_state() is grpc.ChannelConnectivity.READY)

    def connecting(self) -> asyncio.Task[None]:
        """Return the task that ends when the member is connected; all callers share it."""
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect(), name=f"etcd {self.address}")
        return self._connecting

    async def _connect(self) -> None:
        channel = self._channel
        state = channel.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                self._find_out(self._tls)
            await channel.wait_for_state_change(state)
            state = channel.get_state(try_to_connect=True)
        self.trouble = ""

    def _find_out(self, tls: TlsFiles | None) -> None:
        """Ask why the member is not reached; gRPC keeps that to itself."""
        if tls is not None and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._ask(tls), name=f"etcd {self.address} trouble")

    async def _ask(self, tls: TlsFiles) -> None:
        trouble = await ask(self.address, tls)
        if trouble and trouble != self.trouble:
            _log.warning("etcd member not reached", member=self.address, reason=trouble)
        self.trouble = trouble

    async def close(self) -> None:
        channels = [self._channel, *self._letting_go.values()]
        tasks = {*self._letting_go, *filter(None, (self._connecting, self._asking))}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for channel in channels:
            await channel.close(None)


class Endpoints:
    """All members, and which of them worked last."""

    def __init__(
        self, addresses: Sequence[str], timeout_s: float, tls: TlsFiles | None = None
    ) -> None:
        if not addresses:
            raise InvalidInput("endpoints", addresses, "at least one host:port")
        for address in addresses:
            if "://" in address or ":" not in address:
                raise InvalidInput("endpoints", address, "host:port")
        self.timeout_s = timeout_s
        self._members = [Endpoint(address, tls) for address in addresses]
        self._preferred = 0
        self._closed = False

    async def ready(self, deadline: float) -> Endpoint:
        """Return a connected member, by `deadline` on the loop's clock; raises Unavailable."""
        loop = asyncio.get_running_loop()
        members = self._members[self._preferred :] + self._members[: self._preferred]
        waiting: dict[asyncio.Task[None], Endpoint] = {}
        for member in members:
            self._check_open()
            member.refresh()
            if member.ready():
                return self._prefer(member)
            waiting[member.connecting()] = member
            until = deadline if member is members[-1] else loop.time() + HEAD_START_S
            timeout = max(0.0, min(until, deadline) - loop.time())
            done, _ = await asyncio.wait(
                waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            self._check_open()
            for task in done:
                if task.cancelled():
                    # Another call took up new certificates meanwhile, or the store was closed.
                    return await self.ready(deadline)
                task.result()
                return self._prefer(waiting[task])
        addresses = ", ".join(
            f"{member.address} ({member.trouble})" if member.trouble else member.address
            for member in self._members
        )
        raise Unavailable(f"etcd: no connection to any of {addresses} within the deadline")

    def demote(self, member: Endpoint) -> None:
        """Ask another member first from now on, because this one failed."""
        if self._members[self._preferred] is member:
            self._preferred = (self._preferred + 1) % len(self._members)

    async def call(
        self,
        what: str,
        send: Callable[[Endpoint, float], Awaitable[T]],
        *,
        repeat: bool,
        timeout_s: float | None = None,
        attempt_s: float | None = None,
    ) -> T:
        """Do `send(member, timeout in seconds)` within `timeout_s` (default: the configured).

        With `repeat`, a failed or late attempt (longer than `attempt_s`, default a third
        of the deadline) is made again, on the next member. Without, the request is sent
        once, and Timeout means that it may have taken effect. Raises Unavailable when
        it was not sent or when no attempt succeeded, and what `translate` returns.
        """
        loop = asyncio.get_running_loop()
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = loop.time() + timeout_s
        longest = timeout_s if not repeat else attempt_s or timeout_s / ATTEMPTS
        failures = 0
        while True:
            member = await self.ready(deadline)
            try:
                return await send(member, max(0.001, min(longest, deadline - loop.time())))
            except grpc.aio.AioRpcError as error:
                raised = translate(what, error, sent_once=not repeat)
                if refused(error):
                    raise raised from error
                self.demote(member)
                failures += 1
                pause = 0.0
                if failures % len(self._members) == 0:
                    pause = backoff(failures // len(self._members), 0.5)
                if not repeat or loop.time() + pause >= deadline:
                    raise raised from error
            except asyncio.CancelledError:
                # Closing a channel cancels its calls, which must not look as if the
                # caller's own task had been cancelled.
                task = asyncio.current_task()
                if not self._closed or task is None or task.cancelling():
                    raise
                raise Timeout(f"etcd {what}: the store was closed meanwhile") from None
            await asyncio.sleep(pause)

    def _prefer(self, member: Endpoint) -> Endpoint:
        self._preferred = self._members.index(member)
        return member

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("etcd: the store is closed")

    async def close(self) -> None:
        """End every connection. Idempotent."""
        self._closed = True
        await asyncio.gather(*(member.close() for member in self._members))
