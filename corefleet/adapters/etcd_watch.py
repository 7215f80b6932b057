"""A watch in etcd that survives reconnects: no event lost, none twice.

The position is the revision after the last one that was handed out whole. A response
ends at a whole revision unless it is marked as a fragment; of fragments, the newest
revision is held back until the next piece shows that it is complete, and dropped when
the stream breaks, because the next stream delivers that revision again.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import grpc.aio
import structlog
from etcd.api.etcdserverpb import rpc_pb2

from corefleet.adapters.etcd_endpoints import (
    WITH_LEADER,
    Endpoint,
    Endpoints,
    backoff,
    refused,
    translate,
)
from corefleet.errors import Unavailable
from corefleet.store import Change, Changes, Resync

DELETED = 1
"""mvccpb.Event.DELETE"""
CONNECT_S = 1.0
LONGEST_PAUSE_S = 1.0

log = structlog.get_logger(__name__)


def range_end(prefix: str) -> bytes:
    """Return the first key after all that start with `prefix`, as etcd's ranges want it."""
    stem = prefix.encode().rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"


def range_start(prefix: str) -> bytes:
    """Return the first key of all that start with `prefix`; etcd takes no empty key."""
    return prefix.encode() or b"\0"


class Assembler:
    """Makes whole revisions of the responses of one stream."""

    def __init__(self) -> None:
        self._held: list[Change] = []

    @property
    def holds(self) -> bool:
        """Whether a revision waits for its next fragment."""
        return bool(self._held)

    def add(self, events: list[Change], fragment: bool) -> list[Change]:
        """Return the events that are complete with `events`, in order."""
        all_events = self._held + events
        if not fragment or not all_events:
            self._held = []
            return all_events
        newest = all_events[-1].mod_revision
        self._held = [event for event in all_events if event.mod_revision == newest]
        return all_events[: len(all_events) - len(self._held)]


class EtcdWatch:
    """Iterator over what changes under `prefix` from revision `start` on; 0 is from now on."""

    def __init__(self, endpoints: Endpoints, prefix: str, start: int) -> None:
        self._endpoints = endpoints
        self._prefix = prefix
        self._next = start
        self._cluster = 0
        self._failures = 0
        self._ended = asyncio.Event()
        self._member: Endpoint | None = None
        self._call: Any = None
        self._reading: asyncio.Task[Any] | None = None
        self._assembler = Assembler()

    def __aiter__(self) -> EtcdWatch:
        return self

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    async def __anext__(self) -> Changes | Resync:
        while not self._ended.is_set():
            try:
                item = self._take(await self._receive())
            except grpc.aio.AioRpcError as error:
                if refused(error):
                    await self.aclose()
                    raise translate("watch", error, sent_once=False) from error
                await self._pause(f"{error.details()} ({error.code().name})")
                continue
            except Unavailable as error:
                await self._pause(str(error))
                continue
            if isinstance(item, Resync):
                await self.aclose()
            if item is not None:
                return item
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the iteration. Idempotent."""
        self._ended.set()
        reading = self._reading
        self._drop()
        if reading is not None:
            await asyncio.wait({reading})
            if not reading.cancelled():
                reading.exception()

    async def _receive(self) -> Any:
        """Return the next response; raises AioRpcError or Unavailable when the stream ends."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read(), name=f"watch {self._prefix}")
        reading = self._reading
        # A read that is cancelled would take the stream with it; this way a consumer may
        # stop waiting and come back.
        await asyncio.wait({reading})
        if reading.cancelled():
            raise Unavailable("the stream was closed")
        self._reading = None
        response = reading.result()
        if not isinstance(response, rpc_pb2.WatchResponse):
            raise Unavailable("the server ended the stream")
        return response

    async def _read(self) -> Any:
        if self._call is None:
            await self._open()
        return await self._call.read()

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        self._member = await self._endpoints.ready(loop.time() + CONNECT_S)
        self._assembler = Assembler()
        self._call = self._member.watch.Watch(metadata=WITH_LEADER)
        create = rpc_pb2.WatchCreateRequest(
            key=range_start(self._prefix),
            range_end=range_end(self._prefix),
            start_revision=max(0, self._next),
            progress_notify=True,
            fragment=True,
        )
        # A stream that has ended already refuses the write; reading it tells why.
        with contextlib.suppress(asyncio.InvalidStateError):
            await self._call.write(rpc_pb2.WatchRequest(create_request=create))

    def _take(self, response: Any) -> Changes | Resync | None:
        header = response.header
        if self._cluster and header.cluster_id != self._cluster:
            log.warning("etcd is another cluster now", prefix=self._prefix)
            return Resync(header.revision)
        self._cluster = header.cluster_id
        if response.canceled:
            if response.compact_revision:
                return Resync(response.compact_revision)
            raise Unavailable(f"the server cancelled the watch: {response.cancel_reason}")
        if response.created:
            self._failures = 0
            if self._next <= 0:
                self._next = header.revision + 1
            return None
        events = self._assembler.add([_change(e) for e in response.events], response.fragment)
        if events:
            revision = events[-1].mod_revision
            self._next = revision + 1
            return Changes(tuple(events), revision)
        # An empty response for a watch is a promise that it has seen all up to this
        # revision; the one that answers a request for progress has id -1 and, before
        # etcd 3.5.8, may overtake events.
        if not response.fragment and not self._assembler.holds and response.watch_id >= 0:
            self._next = max(self._next, header.revision + 1)
        return None

    async def _pause(self, reason: str) -> None:
        """Give up the stream and wait before the next one."""
        if self._member is not None:
            self._endpoints.demote(self._member)
        self._drop()
        if self._ended.is_set():
            return
        pause = backoff(self._failures, LONGEST_PAUSE_S)
        self._failures += 1
        log.warning("watch interrupted", prefix=self._prefix, reason=reason, pause_s=pause)
        try:
            await asyncio.wait_for(self._ended.wait(), pause)
        except TimeoutError:
            return

    def _drop(self) -> None:
        if self._call is not None:
            self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()
        self._call = self._reading = self._member = None


def _change(event: Any) -> Change:
    value = None if event.type == DELETED else event.kv.value
    return Change(event.kv.key.decode(), value, event.kv.mod_revision)
