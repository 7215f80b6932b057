"""One client's submissions over SubmitStream, which may break and go on elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from typing import Any

from google.rpc import code_pb2

from corefleet.rpc import tasks_pb2

_BATCH = 256
_REPEATS = 40


class SubmissionStream:
    """Feeds requests into streams and keeps those that have no end yet.

    A request is open from the moment it is read from `requests` until it is refused,
    accepted without `follow`, or its `finished` event came. A new stream first repeats
    all open ones: their request ids make that harmless.
    """

    def __init__(
        self,
        requests: Iterable[tasks_pb2.SubmitRequest] | AsyncIterable[tasks_pb2.SubmitRequest],
        in_flight: int,
    ) -> None:
        self._in_flight = max(1, in_flight)
        self._open: dict[str, tasks_pb2.SubmitRequest] = {}
        self._accepted: set[str] = set()
        self._repeats: dict[str, int] = {}
        self._ready: list[tasks_pb2.SubmitRequest] = []
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._drained = False
        self._reader = asyncio.create_task(self._read(requests), name="read submissions")

    @property
    def finished(self) -> bool:
        """Whether every request has come to its end."""
        return self._drained and not self._open

    async def close(self) -> None:
        """Stop reading requests; raises what reading them raised."""
        self._reader.cancel()
        await asyncio.wait([self._reader])
        if not self._reader.cancelled():
            self._reader.result()

    async def carry(
        self, open_stream: Callable[[AsyncIterator[tasks_pb2.SubmitBatch]], Any]
    ) -> AsyncIterator[tasks_pb2.SubmitEvent]:
        """Send what is open over one stream; yield what comes back, until all is ended.

        Raises AioRpcError when the stream breaks.
        """
        wake = self._wake
        self._ready = list(self._open.values())
        wake.set()
        call = open_stream(self._batches(wake))
        try:
            async for reply in call:
                for event in reply.events:
                    if self._note(event):
                        yield event
                if self.finished:
                    self._wake.set()
        finally:
            call.cancel()
            # The writer of a broken call is not cancelled with it: send it home.
            self._wake = asyncio.Event()
            wake.set()

    async def _read(
        self,
        requests: Iterable[tasks_pb2.SubmitRequest] | AsyncIterable[tasks_pb2.SubmitRequest],
    ) -> None:
        try:
            if isinstance(requests, AsyncIterable):
                async for request in requests:
                    await self._take(request)
            else:
                for request in requests:
                    await self._take(request)
        finally:
            self._drained = True
            self._wake.set()

    async def _take(self, request: tasks_pb2.SubmitRequest) -> None:
        if len(self._open) >= self._in_flight:
            self._room.clear()
            await self._room.wait()
        self._open[request.request_id] = request
        self._ready.append(request)
        self._wake.set()

    async def _batches(self, wake: asyncio.Event) -> AsyncIterator[tasks_pb2.SubmitBatch]:
        while not self.finished:
            await wake.wait()
            wake.clear()
            await asyncio.sleep(0)
            if self._wake is not wake:
                return
            ready, self._ready = self._ready, []
            for start in range(0, len(ready), _BATCH):
                yield tasks_pb2.SubmitBatch(requests=ready[start : start + _BATCH])

    def _note(self, event: tasks_pb2.SubmitEvent) -> bool:
        """Keep the books; return whether the caller should see `event`."""
        request = self._open.get(event.request_id)
        if request is None:
            return False
        what = event.WhichOneof("what")
        if what == "accepted":
            first = event.request_id not in self._accepted
            if request.follow:
                self._accepted.add(event.request_id)
            else:
                self._end(event.request_id)
            return first
        if what == "refused":
            if event.refused.code == code_pb2.UNAVAILABLE and self._again(
                request, event.refused.retry_after_ms / 1000
            ):
                return False
            self._end(event.request_id)
        elif event.event.HasField("finished"):
            self._end(event.request_id)
        return True

    def _end(self, request_id: str) -> None:
        del self._open[request_id]
        self._accepted.discard(request_id)
        self._repeats.pop(request_id, None)
        if len(self._open) < self._in_flight:
            self._room.set()

    def _again(self, request: tasks_pb2.SubmitRequest, pause_s: float) -> bool:
        repeats = self._repeats[request.request_id] = self._repeats.get(request.request_id, 0) + 1
        if repeats > _REPEATS:
            return False

        def repeat() -> None:
            if request.request_id in self._open:
                self._ready.append(request)
                self._wake.set()

        asyncio.get_running_loop().call_later(max(0.05, pause_s), repeat)
        return True
