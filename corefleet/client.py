"""The client library: submit tasks to a fleet and follow them to their end.

    async with Client("127.0.0.1:7070") as client:
        async for event in client.run("support", "What is 2 + 2?", session="alice"):
            ...

Answers are the messages of corefleet.rpc (proto/corefleet/v1); errors are those of
corefleet.errors. Calls go to one controld and move on to the next address when it does
not answer; a call is repeated only when that is safe, under the same request id.

Who is asked for a token gives it as `token`, a function that is called anew for each call:
it may return another one when the one before is about to expire.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc.aio

from corefleet import refused
from corefleet.bearer import Token, check_token, stub_with
from corefleet.errors import (
    Conflict,
    CorefleetError,
    InvalidInput,
    Timeout,
    Unauthenticated,
    Unavailable,
)
from corefleet.grpc_tls import open_channel
from corefleet.ids import RequestId
from corefleet.rpc import (
    access_pb2,
    access_pb2_grpc,
    fleet_pb2,
    fleet_pb2_grpc,
    tasks_pb2,
    tasks_pb2_grpc,
)
from corefleet.submissions import SubmissionStream
from corefleet.tls import Material, TlsFiles
from corefleet.tls_trouble import ask, speaks_tls

T = TypeVar("T")

_MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
_PAUSE_S = 0.1
_RETIRING_S = 24 * 3600.0
"""How long calls may go on over a channel of former certificates."""


class _Peer:
    """One controld's address with its channel and stubs."""

    def __init__(self, address: str, material: Material | None, token: Token | None) -> None:
        self.address = address
        self.material = material
        channel = self.channel = open_channel(address, material, _OPTIONS)
        tasks = tasks_pb2_grpc.TasksStub(channel)  # type: ignore[no-untyped-call]
        fleet = fleet_pb2_grpc.FleetStub(channel)  # type: ignore[no-untyped-call]
        access = access_pb2_grpc.AccessStub(channel)  # type: ignore[no-untyped-call]
        self.tasks: Any = stub_with(token, tasks)
        self.fleet: Any = stub_with(token, fleet)
        self.access: Any = stub_with(token, access)


class Client:
    """A connection to a fleet through any of its controlds.

    `addresses` is one host:port or several; `tls` names the certificates without which only
    an insecure fleet answers; `token` returns the token to bring, and is called for each call;
    `timeout_s` bounds each call, all its retries included (following a task is not bounded).
    Use it as an async context manager, or call `close`.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        tls: TlsFiles | None = None,
        token: Token | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        named = [addresses] if isinstance(addresses, str) else list(addresses)
        if not named or not all(named):
            raise InvalidInput("addresses", addresses, "one host:port or more")
        if token is not None and tls is None:
            check_token(named)
        self._addresses = named
        self._tls = tls
        self._token = token
        self._timeout_s = timeout_s
        self._peers: dict[str, _Peer] = {}
        self._retiring: dict[asyncio.Task[None], _Peer] = {}
        self._current = random.randrange(len(named))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; calls under way end with an error. Idempotent."""
        peers, self._peers = [*self._peers.values(), *self._retiring.values()], {}
        retiring = list(self._retiring)
        for task in retiring:
            task.cancel()
        await asyncio.gather(*retiring, return_exceptions=True)
        for peer in peers:
            await peer.channel.close(None)

    def prefer(self, address: str) -> None:
        """Call `address`, one of those given, from now on, until it does not answer."""
        if address not in self._addresses:
            raise InvalidInput("address", address, f"one of {', '.join(self._addresses)}")
        self._current = self._addresses.index(address)

    @staticmethod
    def request(
        pool: str,
        input: str | bytes,
        *,
        session: str = "",
        request_id: str = "",
        deadline_s: float = 0.0,
        kind: str = "",
        tenant: str = "",
        follow: bool = False,
    ) -> tasks_pb2.SubmitRequest:
        """Return a submission, with a new request id unless one is given."""
        return tasks_pb2.SubmitRequest(
            pool=pool,
            session=session,
            request_id=request_id or new_request_id(),
            input=input.encode() if isinstance(input, str) else input,
            deadline_ms=int(deadline_s * 1000),
            kind=kind,
            follow=follow,
            tenant=tenant,
        )

    async def submit(
        self,
        pool: str,
        input: str | bytes,
        *,
        session: str = "",
        request_id: str = "",
        deadline_s: float = 0.0,
        kind: str = "",
        tenant: str = "",
    ) -> tasks_pb2.SubmitReply:
        """Have one task accepted durably.

        Raises InvalidInput naming the field, NotFound for the pool, Conflict when the
        request id was used for something else, Exhausted with a pause, Unavailable.
        """
        request = self.request(
            pool, input, session=session, request_id=request_id, deadline_s=deadline_s,
            kind=kind, tenant=tenant,
        )  # fmt: skip
        return await self._call(lambda peer, left: peer.tasks.Submit(request, timeout=left))

    async def run(
        self,
        pool: str,
        input: str | bytes,
        *,
        session: str = "",
        request_id: str = "",
        deadline_s: float = 0.0,
        kind: str = "",
        tenant: str = "",
    ) -> AsyncIterator[tasks_pb2.TaskEvent]:
        """Submit one task and yield its events to the end; `finished` is the last."""
        request = self.request(
            pool, input, session=session, request_id=request_id, deadline_s=deadline_s,
            kind=kind, tenant=tenant, follow=True,
        )  # fmt: skip
        async for made in self.submit_many([request]):
            if made.HasField("refused"):
                raise refused.from_refusal(made.refused)
            if made.HasField("event"):
                yield made.event

    async def submit_many(
        self,
        requests: Iterable[tasks_pb2.SubmitRequest] | AsyncIterable[tasks_pb2.SubmitRequest],
        *,
        in_flight: int = 1024,
    ) -> AsyncIterator[tasks_pb2.SubmitEvent]:
        """Submit many tasks on one stream; yield what becomes of each, as it happens.

        Every request is answered by one `accepted` or `refused`; one with `follow` set
        is also told of by `event`s, the last of which is `finished`. At most `in_flight`
        requests are under way; a broken stream is continued on another controld.
        """
        stream = SubmissionStream(requests, in_flight)
        give_up = self._now() + self._timeout_s
        try:
            while not stream.finished:
                peer, brought = self._peer(), self._brought()
                try:
                    async for made in stream.carry(peer.tasks.SubmitStream):
                        give_up = self._now() + self._timeout_s
                        yield made
                except grpc.aio.AioRpcError as error:
                    await self._pause(self._broke(error, brought), give_up)
        finally:
            await stream.close()

    async def get(self, task: str) -> tasks_pb2.Task:
        """Return the task as it stands. Raises NotFound, InvalidInput, Unavailable."""
        request = tasks_pb2.GetRequest(task=task)
        return await self._call(lambda peer, left: peer.tasks.Get(request, timeout=left))

    async def watch(self, task: str, *, tokens: bool = True) -> AsyncIterator[tasks_pb2.TaskEvent]:
        """Yield a snapshot of the task, then its events to the end.

        When the controld that serves it dies another one goes on, with a new snapshot.
        Raises NotFound, InvalidInput, Unavailable.
        """
        request = tasks_pb2.WatchRequest(task=task, no_tokens=not tokens)
        give_up = self._now() + self._timeout_s
        while True:
            peer, brought = self._peer(), self._brought()
            try:
                async for event in peer.tasks.Watch(request):
                    give_up = self._now() + self._timeout_s
                    yield event
                    if event.HasField("finished"):
                        return
            except grpc.aio.AioRpcError as error:
                await self._pause(self._broke(error, brought), give_up)

    async def cancel(self, task: str, reason: str = "") -> tasks_pb2.Task:
        """End a task that has not ended.

        Raises Conflict when it had ended before, saying how; NotFound, Unavailable.
        """
        request = tasks_pb2.CancelRequest(task=task, reason=reason)
        tries = 0

        def call(peer: _Peer, left: float) -> Awaitable[tasks_pb2.Task]:
            nonlocal tries
            tries += 1
            answer: Awaitable[tasks_pb2.Task] = peer.tasks.Cancel(request, timeout=left)
            return answer

        try:
            return await self._call(call)
        except Conflict:
            ended = await self.get(task)
            if tries > 1 and ended.state == tasks_pb2.TASK_STATE_CANCELLED:
                return ended
            raise

    async def trace(self, task: str) -> tasks_pb2.TaskTrace:
        """Return the task with all its attempts. Raises NotFound, InvalidInput, Unavailable."""
        request = tasks_pb2.TraceRequest(task=task)
        return await self._call(lambda peer, left: peer.tasks.Trace(request, timeout=left))

    async def list(
        self,
        *,
        pool: str = "",
        session: str = "",
        state: tasks_pb2.TaskState = tasks_pb2.TASK_STATE_UNSPECIFIED,
        page_size: int = 100,
        page_token: str = "",
    ) -> tasks_pb2.ListReply:
        """Return one page of live tasks; pass its `next_page_token` for the next one."""
        request = tasks_pb2.ListRequest(
            pool=pool, session=session, state=state, page_size=page_size, page_token=page_token
        )
        return await self._call(lambda peer, left: peer.tasks.List(request, timeout=left))

    async def nodes(self) -> Sequence[fleet_pb2.Node]:
        """Return all nodes that ever registered, with their state."""
        request = fleet_pb2.ListNodesRequest()
        reply: fleet_pb2.ListNodesReply = await self._call(
            lambda peer, left: peer.fleet.ListNodes(request, timeout=left)
        )
        return reply.nodes

    async def pools(self) -> Sequence[fleet_pb2.Pool]:
        """Return all pools."""
        request = fleet_pb2.ListPoolsRequest()
        reply: fleet_pb2.ListPoolsReply = await self._call(
            lambda peer, left: peer.fleet.ListPools(request, timeout=left)
        )
        return reply.pools

    async def apply_pool(self, name: str, spec_toml: str) -> fleet_pb2.Pool:
        """Create or replace a pool. Raises InvalidInput naming what is wrong."""
        request = fleet_pb2.ApplyPoolRequest(name=name, spec_toml=spec_toml)
        return await self._call(lambda peer, left: peer.fleet.ApplyPool(request, timeout=left))

    async def explain(self, task: str) -> fleet_pb2.ExplainReply:
        """Return why the task was, or would be, placed where it is. Raises NotFound."""
        request = fleet_pb2.ExplainRequest(task=task)
        return await self._call(lambda peer, left: peer.fleet.Explain(request, timeout=left))

    async def controlds(self) -> Sequence[fleet_pb2.Controld]:
        """Return the living controlds with what each owns."""
        request = fleet_pb2.ListControldsRequest()
        reply: fleet_pb2.ListControldsReply = await self._call(
            lambda peer, left: peer.fleet.ListControlds(request, timeout=left)
        )
        return reply.controlds

    async def drain_node(
        self, node: str, *, reason: str = "", by: str = "", deadline_s: float = 0.0
    ) -> fleet_pb2.Drain:
        """Give a node nothing new and have its attempts moved; stands until `undrain_node`.

        With a deadline, what is still there by then is moved between steps or not.
        Raises NotFound, InvalidInput, Unavailable.
        """
        request = fleet_pb2.DrainNodeRequest(
            node=node, reason=reason, by=by, deadline_in_ms=int(deadline_s * 1000)
        )
        return await self._call(lambda peer, left: peer.fleet.DrainNode(request, timeout=left))

    async def undrain_node(self, node: str) -> fleet_pb2.UndrainNodeReply:
        """End a node's drain; harmless when none stands. Raises NotFound, Unavailable."""
        request = fleet_pb2.UndrainNodeRequest(node=node)
        return await self._call(lambda peer, left: peer.fleet.UndrainNode(request, timeout=left))

    async def watch_drain(
        self, node: str, *, interval_s: float = 0.5
    ) -> AsyncIterator[fleet_pb2.DrainProgress]:
        """Yield how far a node's drain is; the last one is `drained`, or has no `drain`.

        When the controld that serves it dies another one goes on. Raises NotFound,
        InvalidInput, Unavailable.
        """
        request = fleet_pb2.WatchDrainRequest(node=node, interval_ms=int(interval_s * 1000))
        give_up = self._now() + self._timeout_s
        while True:
            peer, brought = self._peer(), self._brought()
            try:
                async for progress in peer.fleet.WatchDrain(request):
                    give_up = self._now() + self._timeout_s
                    yield progress
                    if progress.drained or not progress.HasField("drain"):
                        return
            except grpc.aio.AioRpcError as error:
                await self._pause(self._broke(error, brought), give_up)

    async def overview(self) -> fleet_pb2.OverviewReply:
        """Return nodes summed up, and what every controld counts. Raises Unavailable."""
        request = fleet_pb2.OverviewRequest()
        return await self._call(lambda peer, left: peer.fleet.Overview(request, timeout=left))

    async def whoami(self) -> access_pb2.WhoAmIReply:
        """Return whom the server takes us for, and what we may do. Raises Unauthenticated."""
        request = access_pb2.WhoAmIRequest()
        return await self._call(lambda peer, left: peer.access.WhoAmI(request, timeout=left))

    async def _call(self, call: Callable[[_Peer, float], Awaitable[T]]) -> T:
        give_up = self._now() + self._timeout_s
        before = ""
        while True:
            try:
                return await call(self._peer(), max(0.001, give_up - self._now()))
            except grpc.aio.AioRpcError as error:
                found = refused.from_call(error)
            if isinstance(found, Timeout) and before:
                found = Timeout(f"no answer in time; before that: {before}")
            before = before if isinstance(found, Timeout) else str(found)
            await self._pause(found, give_up, unreached=bool(before))

    def _brought(self) -> str:
        return "" if self._token is None else self._token()

    def _broke(self, error: grpc.aio.AioRpcError, brought: str) -> CorefleetError:
        """Return what the end of a stream means that was opened with the token `brought`.

        A stream ends when its token does; with another one it goes on.
        """
        found = refused.from_call(error)
        if isinstance(found, Unauthenticated) and self._brought() != brought:
            return Unavailable(str(found))
        return found

    async def _pause(self, error: Exception, give_up: float, unreached: bool = False) -> None:
        """Turn to the next controld after a moment; raise `error` if that cannot help.

        The next call goes to the next one even when there is no time left for this one.
        `unreached`: an earlier call of the same was told that it did not get through.
        """
        if not isinstance(error, Unavailable):
            raise error
        late = self._now() + _PAUSE_S >= give_up
        if late and (unreached or not isinstance(error, Timeout)):
            error = await self._explained(error)
        self._current = (self._current + 1) % len(self._addresses)
        if late:
            raise error
        await asyncio.sleep(_PAUSE_S * (0.5 + random.random()))

    def _peer(self) -> _Peer:
        address = self._addresses[self._current]
        material = None if self._tls is None else self._tls.current()
        peer = self._peers.get(address)
        if peer is not None and peer.material is not material:
            self._retire(peer)
            peer = None
        if peer is None:
            peer = self._peers[address] = _Peer(address, material, self._token)
        return peer

    def _retire(self, peer: _Peer) -> None:
        """Let the calls over former certificates come to their end."""
        closing = asyncio.create_task(peer.channel.close(_RETIRING_S), name="former channel")
        self._retiring[closing] = peer
        closing.add_done_callback(lambda done: self._retiring.pop(done, None))

    async def _explained(self, error: Unavailable) -> Unavailable:
        """Return `error` with what is wrong with certificates, if that is why."""
        address = self._addresses[self._current]
        if self._tls is not None:
            trouble = await ask(address, self._tls)
        elif await speaks_tls(address):
            trouble = f"{address} speaks TLS, and no certificates are named"
        else:
            trouble = ""
        return type(error)(f"controld at {address}: {trouble}") if trouble else error

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def new_request_id() -> RequestId:
    """Mint a request id that nobody else has."""
    return RequestId(f"r-{secrets.token_hex(12)}")
