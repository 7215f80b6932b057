"""One SubmitStream: many submissions in, their answers and events out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from controld.api import render
from controld.api.followers import Followers
from controld.api.refusals import refusal_of
from controld.api.story import Stories
from controld.api.watching import Watcher
from controld.cluster import Cluster
from controld.intake import Intake, Submission
from corefleet.errors import CorefleetError
from corefleet.messages.wire import TaskEvent, TaskFinished
from corefleet.rpc import tasks_pb2

_IN_FLIGHT = 256
_EVENTS_A_MESSAGE = 512

Write = Callable[[tasks_pb2.SubmitEvents], Awaitable[None]]


class SubmitSession:
    """Serves one stream. What is ready in one turn of the loop leaves as one message.

    At most 256 submissions are being stored at a time: beyond that nothing more is read
    from the client, which gRPC's flow control lets it feel.
    """

    def __init__(
        self, cluster: Cluster, intake: Intake, stories: Stories, followers: Followers
    ) -> None:
        self._cluster = cluster
        self._intake = intake
        self._stories = stories
        self._followers = followers
        self._out: list[tasks_pb2.SubmitEvent] = []
        self._wake = asyncio.Event()
        self._room = asyncio.Semaphore(_IN_FLIGHT)
        self._running: set[asyncio.Task[None]] = set()
        self._followed: set[str] = set()
        self._early: dict[str, list[tasks_pb2.SubmitEvent]] = {}
        self._all_read = False

    async def serve(self, requests: AsyncIterator[tasks_pb2.SubmitBatch], write: Write) -> None:
        """Return when all that was submitted is answered and all that is followed ended."""
        reader = asyncio.create_task(self._read(requests), name="read a submit stream")
        try:
            while not (self._all_read and not self._running and not self._followed):
                await self._wake.wait()
                self._wake.clear()
                await asyncio.sleep(0)
                await self._flush(write)
            await self._flush(write)
        finally:
            for task in list(self._followed):
                self._followers.leave(task)
            work = [reader, *self._running]
            for task_ in work:
                task_.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[tasks_pb2.SubmitBatch]) -> None:
        try:
            async for batch in requests:
                for request in batch.requests:
                    await self._room.acquire()
                    self._spawn(self._take(request))
        finally:
            self._all_read = True
            self._wake.set()

    async def _flush(self, write: Write) -> None:
        while self._out:
            ready, self._out = self._out[:_EVENTS_A_MESSAGE], self._out[_EVENTS_A_MESSAGE:]
            await write(tasks_pb2.SubmitEvents(events=ready))

    async def _take(self, request: tasks_pb2.SubmitRequest) -> None:
        request_id = request.request_id
        begun = ""

        def follow(task: str) -> None:
            nonlocal begun
            begun = task
            self._followed.add(task)
            self._early[task] = []
            self._followers.follow(task, lambda events: self._pass_on(request_id, task, events))

        try:
            accepted = await self._intake.submit(
                Submission(
                    pool=request.pool,
                    session=request.session,
                    request_id=request_id,
                    input=request.input,
                    deadline_ms=request.deadline_ms,
                    kind=request.kind,
                    tenant=request.tenant,
                ),
                follow if request.follow else None,
            )
        except CorefleetError as error:
            self._unfollow(begun)
            self._send(tasks_pb2.SubmitEvent(request_id=request_id, refused=refusal_of(error)))
            return
        finally:
            self._room.release()
        reply = tasks_pb2.SubmitReply(
            task=accepted.task, session=accepted.session, duplicate=accepted.duplicate
        )
        self._send(tasks_pb2.SubmitEvent(request_id=request_id, accepted=reply))
        self._out.extend(self._early.pop(begun, ()))
        if request.follow and accepted.duplicate:
            # Its events go to the controld that accepted it first, perhaps another one.
            self._unfollow(begun)
            await self._watch(request_id, accepted.task)

    def _unfollow(self, task: str) -> None:
        if task:
            self._followers.leave(task)
            self._followed.discard(task)
            self._early.pop(task, None)

    async def _watch(self, request_id: str, task: str) -> None:
        try:
            async for event in Watcher(self._cluster, self._stories, task, True).events():
                self._send(tasks_pb2.SubmitEvent(request_id=request_id, event=event))
        except CorefleetError as error:
            self._send(tasks_pb2.SubmitEvent(request_id=request_id, refused=refusal_of(error)))

    def _pass_on(self, request_id: str, task: str, events: Sequence[TaskEvent]) -> None:
        # Events may overtake the answer to the submission itself: they wait for it.
        out = self._early.get(task, self._out)
        for event in events:
            if isinstance(event, TaskFinished):
                self._followed.discard(task)
            out.append(tasks_pb2.SubmitEvent(request_id=request_id, event=render.event(event)))
        self._wake.set()

    def _send(self, event: tasks_pb2.SubmitEvent) -> None:
        self._out.append(event)
        self._wake.set()

    def _spawn(self, work: asyncio._CoroutineLike[None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._wake.set()
