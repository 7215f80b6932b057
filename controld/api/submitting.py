"""One SubmitStream: many submissions in, their answers and events out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from controld.api import render
from controld.api.followers import Follower, Followers
from controld.api.guard import Access
from controld.api.refusals import name_of, refusal_of
from controld.api.story import Stories
from controld.api.watching import Watcher
from controld.audit import OK, Audit
from controld.cluster import Cluster
from controld.intake import Intake, Outcome, Submission
from corefleet.errors import CorefleetError
from corefleet.messages.wire import TaskEvent, TaskFinished
from corefleet.rpc import tasks_pb2

_IN_FLIGHT = 256
_EVENTS_A_MESSAGE = 512


def submission_of(request: tasks_pb2.SubmitRequest, by: str) -> Submission:
    """Return what a client, called `by`, asks for, not yet checked."""
    return Submission(
        pool=request.pool,
        session=request.session,
        request_id=request.request_id,
        input=request.input,
        deadline_ms=request.deadline_ms,
        kind=request.kind,
        tenant=request.tenant,
        submitted_by=by,
    )


class _Asked:
    """One submission of a stream, from its coming to its last event."""

    __slots__ = ("begun_s", "early", "follower", "request", "session")

    def __init__(self, session: SubmitSession, request: tasks_pb2.SubmitRequest) -> None:
        self.session = session
        self.request = request
        self.begun_s = session.now_s()
        self.follower: Follower | None = None
        self.early: list[TaskEvent] | None = []
        """Events may overtake the answer to the submission itself: they wait for it."""

    def begun(self, task: str) -> None:
        self.follower = self.session.followers.follow(task, self.hear)
        self.session.followed.add(self.follower)

    def hear(self, events: Sequence[TaskEvent]) -> None:
        if self.early is not None:
            self.early.extend(events)
        else:
            self.pass_on(events)

    def pass_on(self, events: Sequence[TaskEvent]) -> None:
        session, request_id = self.session, self.request.request_id
        for event in events:
            render.fill_event(session.answer(request_id).event, event)
            if isinstance(event, TaskFinished) and self.follower is not None:
                session.followed.discard(self.follower)

    def decided(self, outcome: Outcome) -> None:
        session, request = self.session, self.request
        early, self.early = self.early or [], None
        session.decided.add(request, outcome, session.now_s() - self.begun_s)
        made = session.answer(request.request_id)
        if isinstance(outcome, CorefleetError):
            made.refused.CopyFrom(refusal_of(outcome))
            self.unfollow()
        else:
            reply = made.accepted
            reply.task, reply.session = outcome.task, outcome.session
            reply.duplicate = outcome.duplicate
            if not (request.follow and outcome.duplicate):
                self.pass_on(early)
            else:
                # Its events go to the controld that accepted it first, perhaps another one.
                self.unfollow()
                session.watch(request.request_id, outcome.task)
        session.stored()

    def unfollow(self) -> None:
        follower, self.follower = self.follower, None
        if follower is not None:
            self.session.followers.leave(follower)
            self.session.followed.discard(follower)


class Decided:
    """What was decided of a stream's submissions since the audit log was last told."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._ids: dict[tuple[str, str], list[str]] = {}
        self._slowest_s: dict[tuple[str, str], float] = {}

    def add(self, request: tasks_pb2.SubmitRequest, outcome: Outcome, took_s: float) -> None:
        """Keep what became of one submission until `write`."""
        if isinstance(outcome, CorefleetError):
            key, told = (request.pool, name_of(outcome)), request.request_id
        else:
            key, told = (request.pool, OK), outcome.task
        ids = self._ids.get(key)
        if ids is None:
            self._ids[key] = [told]
            self._slowest_s[key] = took_s
        else:
            ids.append(told)
            if took_s > self._slowest_s[key]:
                self._slowest_s[key] = took_s

    def write(self) -> None:
        """Tell the audit log: one record for each pool and result."""
        if not self._ids:
            return
        for (pool, result), ids in self._ids.items():
            self._audit.submissions(pool, result, self._slowest_s[pool, result] * 1000, ids)
        self._ids.clear()
        self._slowest_s.clear()


class SubmitSession:
    """Serves one stream. What is ready in one turn of the loop leaves as one message.

    At most 256 submissions are being stored at a time: beyond that nothing more is read
    from the client, which gRPC's flow control lets it feel. No answer leaves before the
    audit log has it.
    """

    def __init__(
        self,
        cluster: Cluster,
        intake: Intake,
        stories: Stories,
        followers: Followers,
        access: Access,
    ) -> None:
        self._cluster = cluster
        self._intake = intake
        self._stories = stories
        self._access = access
        self.decided = Decided(access.audit())
        self.now_s = cluster.clock.monotonic
        self.followers = followers
        self.followed: set[Follower] = set()
        self._out: list[tasks_pb2.SubmitEvents] = []
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._storing = 0
        self._watching: set[asyncio.Task[None]] = set()
        self._all_read = False
        self._over = False

    async def serve(self, requests: AsyncIterator[tasks_pb2.SubmitBatch]) -> None:
        """Return when all that was submitted is answered and all that is followed ended."""
        reader = asyncio.create_task(self._read(requests), name="read a submit stream")
        try:
            while not self._done():
                await self._wake.wait()
                self._wake.clear()
                await asyncio.sleep(0)
                await self._flush()
            await self._flush()
        finally:
            self._over = True
            self.decided.write()
            for follower in list(self.followed):
                self.followers.leave(follower)
            work = [reader, *self._watching]
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    def answer(self, request_id: str) -> tasks_pb2.SubmitEvent:
        """Return a new part of what is sent next, to be filled in at once."""
        out = self._out
        if not out or len(out[-1].events) >= _EVENTS_A_MESSAGE:
            out.append(tasks_pb2.SubmitEvents())
        self._wake.set()
        made = out[-1].events.add()
        made.request_id = request_id
        return made

    def stored(self) -> None:
        """A submission was decided: its place is free."""
        if self._over:
            self.decided.write()
        self._storing -= 1
        self._room.set()
        self._wake.set()

    def watch(self, request_id: str, task: str) -> None:
        """Follow a task that was accepted before, by whomever."""
        if self._over:
            return
        watching = asyncio.create_task(self._watch(request_id, task))
        self._watching.add(watching)
        watching.add_done_callback(self._watched)

    def _done(self) -> bool:
        return self._all_read and not (self._storing or self._watching or self.followed)

    async def _read(self, requests: AsyncIterator[tasks_pb2.SubmitBatch]) -> None:
        try:
            async for batch in requests:
                for request in batch.requests:
                    while self._storing >= _IN_FLIGHT:
                        self._room.clear()
                        await self._room.wait()
                    self._take(request)
        finally:
            self._all_read = True
            self._wake.set()

    def _take(self, request: tasks_pb2.SubmitRequest) -> None:
        asked = _Asked(self, request)
        self._storing += 1
        access = self._access
        if not access.allows(request.pool, request.tenant):
            asked.decided(access.denial(request.pool, request.tenant))
            return
        begun = asked.begun if request.follow else None
        self._intake.offer(submission_of(request, access.by), asked.decided, begun)

    async def _flush(self) -> None:
        while self._out:
            self.decided.write()
            await self._access.write(self._out.pop(0))

    async def _watch(self, request_id: str, task: str) -> None:
        try:
            async for event in Watcher(self._cluster, self._stories, task, True).events():
                self.answer(request_id).event.CopyFrom(event)
        except CorefleetError as error:
            self.answer(request_id).refused.CopyFrom(refusal_of(error))

    def _watched(self, task: asyncio.Task[None]) -> None:
        self._watching.discard(task)
        self._wake.set()
