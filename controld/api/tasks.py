"""The service that clients call: corefleet.v1.Tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from controld.api import render
from controld.api.followers import Followers
from controld.api.guard import Access
from controld.api.refusals import AlreadyEnded
from controld.api.story import Stories
from controld.api.submitting import SubmitSession, submission_of
from controld.api.trace import attempts
from controld.api.watching import Watcher
from controld.calls import OwnerCalls
from controld.cluster import Cluster
from controld.intake import Intake
from corefleet.errors import InvalidInput
from corefleet.ids import check_name, check_task_id, shard_of
from corefleet.messages.wire import ListTasks
from corefleet.rpc import tasks_pb2, tasks_pb2_grpc

_PAGE = 100
_PAGE_MAX = 1000
_SHARDS_AT_ONCE = 32
_LISTED_STATES = {
    tasks_pb2.TASK_STATE_UNSPECIFIED: "",
    tasks_pb2.TASK_STATE_QUEUED: "queued",
    tasks_pb2.TASK_STATE_PLACED: "placed",
    tasks_pb2.TASK_STATE_RUNNING: "placed",
}


class TasksService(tasks_pb2_grpc.TasksServicer):
    """Submits, reads, follows and ends tasks; every controld answers for all shards."""

    def __init__(
        self,
        cluster: Cluster,
        intake: Intake,
        stories: Stories,
        followers: Followers,
        calls: OwnerCalls,
    ) -> None:
        self._cluster = cluster
        self._intake = intake
        self._stories = stories
        self._followers = followers
        self._calls = calls

    async def Submit(  # noqa: N802
        self, request: tasks_pb2.SubmitRequest, access: Access
    ) -> tasks_pb2.SubmitReply:
        access.check(request.pool, request.tenant)
        accepted = await self._intake.submit(submission_of(request, access.by))
        return tasks_pb2.SubmitReply(
            task=accepted.task, session=accepted.session, duplicate=accepted.duplicate
        )

    async def SubmitStream(  # noqa: N802
        self, requests: AsyncIterator[tasks_pb2.SubmitBatch], access: Access
    ) -> None:
        session = SubmitSession(self._cluster, self._intake, self._stories, self._followers, access)
        await session.serve(requests)

    async def Get(  # noqa: N802
        self, request: tasks_pb2.GetRequest, access: Access
    ) -> tasks_pb2.Task:
        return (await self._stories.read_for(access, request.task)).task

    async def Watch(  # noqa: N802
        self, request: tasks_pb2.WatchRequest, access: Access
    ) -> AsyncIterator[tasks_pb2.TaskEvent]:
        check_task_id(request.task, self._cluster.settings.shards)
        await self._stories.check(access, request.task)
        watcher = Watcher(self._cluster, self._stories, request.task, not request.no_tokens)
        async for event in watcher.events():
            yield event

    async def Cancel(  # noqa: N802
        self, request: tasks_pb2.CancelRequest, access: Access
    ) -> tasks_pb2.Task:
        await self._stories.check(access, request.task)
        reason = request.reason or f"cancelled by {access.by or 'a client'}"
        return await self._cancel(request.task, reason)

    async def Trace(  # noqa: N802
        self, request: tasks_pb2.TraceRequest, access: Access
    ) -> tasks_pb2.TaskTrace:
        story = await self._stories.read_for(access, request.task)
        return tasks_pb2.TaskTrace(task=story.task, attempts=attempts(story.stored))

    async def List(  # noqa: N802
        self, request: tasks_pb2.ListRequest, access: Access
    ) -> tasks_pb2.ListReply:
        if request.pool:
            access.check(request.pool)
        return await self._list(request, access)

    async def _cancel(self, task: str, reason: str) -> tasks_pb2.Task:
        check_task_id(task, self._cluster.settings.shards)
        answer = await self._calls.cancel(task, reason)
        story = await self._stories.read(task)
        if not answer.cancelled:
            state = answer.state if answer.found else _state_name(story.task.state)
            raise AlreadyEnded(f"task {task}: it had ended before, as {state}")
        return story.task

    async def _list(self, request: tasks_pb2.ListRequest, access: Access) -> tasks_pb2.ListReply:
        if request.state not in _LISTED_STATES:
            raise InvalidInput(
                "state", _state_name(request.state), "queued, placed or running: ended tasks "
                "are not listed, Get reads them",
            )  # fmt: skip
        if request.session and not request.pool:
            raise InvalidInput("pool", request.pool, "the pool of the session")
        size = min(request.page_size or _PAGE, _PAGE_MAX)
        shards = self._shards_of(request)
        place, skip = _parse_token(request.page_token)
        tasks: list[tasks_pb2.Task] = []
        while place < len(shards) and len(tasks) < size:
            group = shards[place : place + (1 if skip else _SHARDS_AT_ONCE)]
            filters = ListTasks(
                pool=request.pool,
                session=request.session,
                state=_LISTED_STATES[request.state],
                limit=size - len(tasks) + skip + 1,
            )
            answers = await asyncio.gather(*(self._calls.list(each, filters) for each in group))
            for answer in answers:
                room = size - len(tasks)
                lines = answer.tasks[skip:]
                tasks.extend(
                    render.live_task(line.record, reason=line.reason)
                    for line in lines[:room]
                    if access.allows(line.record.pool, line.record.tenant)
                )
                if len(lines) > room:
                    token = f"{place}.{skip + room}"
                    return tasks_pb2.ListReply(tasks=tasks, next_page_token=token)
                place, skip = place + 1, 0
        token = f"{place}.0" if place < len(shards) else ""
        return tasks_pb2.ListReply(tasks=tasks, next_page_token=token)

    def _shards_of(self, request: tasks_pb2.ListRequest) -> list[int]:
        count = self._cluster.settings.shards
        if request.session:
            check_name("session", request.session)
            return [shard_of(request.pool, request.session, count)]
        return list(range(count))


def _parse_token(token: str) -> tuple[int, int]:
    """Return the place in the list of shards and how many of its tasks were told."""
    if not token:
        return 0, 0
    place, dot, skip = token.partition(".")
    if not (dot and place.isdecimal() and skip.isdecimal() and len(token) < 20):
        raise InvalidInput("page_token", token, "the next_page_token of the page before")
    return int(place), int(skip)


def _state_name(state: int) -> str:
    name = tasks_pb2.TaskState.Name(state) if state in tasks_pb2.TaskState.values() else str(state)
    return name.removeprefix("TASK_STATE_").lower()
