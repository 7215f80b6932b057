"""The client library against small servers: retries, fail-over, and streams that break."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio
import pytest

from corefleet.client import Client
from corefleet.errors import Conflict, Exhausted, InvalidInput, NotFound, Timeout, Unavailable
from corefleet.rpc import tasks_pb2, tasks_pb2_grpc

TASK = "3-0123456789abcdefghjkmnpqrs"


class FakeTasks(tasks_pb2_grpc.TasksServicer):
    """Answers as it is told to and remembers what it was asked."""

    def __init__(self) -> None:
        self.refuse: list[grpc.StatusCode] = []
        self.submitted: list[str] = []
        self.watched = 0
        self.break_streams_after = 10**9
        self.cancelled = False

    async def _refuse(self, context: Any) -> None:
        if self.refuse:
            await context.abort(self.refuse.pop(0), "told to")

    async def Submit(  # noqa: N802
        self, request: tasks_pb2.SubmitRequest, context: Any
    ) -> tasks_pb2.SubmitReply:
        self.submitted.append(request.request_id)
        await self._refuse(context)
        return tasks_pb2.SubmitReply(task=TASK, session=request.session)

    async def Get(self, request: tasks_pb2.GetRequest, context: Any) -> tasks_pb2.Task:  # noqa: N802
        await self._refuse(context)
        return tasks_pb2.Task(task=request.task, state=tasks_pb2.TASK_STATE_CANCELLED)

    async def Cancel(  # noqa: N802
        self, request: tasks_pb2.CancelRequest, context: Any
    ) -> tasks_pb2.Task:
        if self.cancelled:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "it had ended before")
        self.cancelled = True
        await self._refuse(context)
        return tasks_pb2.Task(task=request.task, state=tasks_pb2.TASK_STATE_CANCELLED)

    async def Watch(  # noqa: N802
        self, request: tasks_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[tasks_pb2.TaskEvent]:
        self.watched += 1
        yield tasks_pb2.TaskEvent(task=request.task, snapshot=tasks_pb2.Task(task=request.task))
        await self._refuse(context)
        yield tasks_pb2.TaskEvent(task=request.task, finished=tasks_pb2.Task(task=request.task))

    async def SubmitStream(  # noqa: N802
        self, requests: AsyncIterator[tasks_pb2.SubmitBatch], context: Any
    ) -> AsyncIterator[tasks_pb2.SubmitEvents]:
        answered = 0
        async for batch in requests:
            for request in batch.requests:
                if answered >= self.break_streams_after:
                    self.break_streams_after = 10**9
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "told to break")
                answered += 1
                self.submitted.append(request.request_id)
                yield tasks_pb2.SubmitEvents(events=events_for(request))


def events_for(request: tasks_pb2.SubmitRequest) -> list[tasks_pb2.SubmitEvent]:
    request_id = request.request_id
    if request.pool == "full":
        refusal = tasks_pb2.Refusal(code=8, message="too much", retry_after_ms=500)
        return [tasks_pb2.SubmitEvent(request_id=request_id, refused=refusal)]
    events = [
        tasks_pb2.SubmitEvent(request_id=request_id, accepted=tasks_pb2.SubmitReply(task=TASK))
    ]
    if request.follow:
        ended = tasks_pb2.TaskEvent(task=TASK, finished=tasks_pb2.Task(output="four"))
        events.append(tasks_pb2.SubmitEvent(request_id=request_id, event=ended))
    return events


Serve = Callable[[FakeTasks], Any]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Return a coroutine function that serves a FakeTasks and returns its address."""
    async with AsyncExitStack() as stack:

        async def start(service: FakeTasks) -> str:
            server = grpc.aio.server()
            tasks_pb2_grpc.add_TasksServicer_to_server(service, server)  # type: ignore[no-untyped-call]
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, None)
            return f"127.0.0.1:{port}"

        yield start


async def test_a_retried_submission_keeps_its_request_id(serve: Serve) -> None:
    service = FakeTasks()
    service.refuse = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE]
    async with Client(await serve(service)) as client:
        reply = await client.submit("p", "hi", session="s")
    assert (reply.task, reply.session) == (TASK, "s")
    assert len(service.submitted) == 3
    assert len(set(service.submitted)) == 1


async def test_another_controld_answers_when_one_is_gone(
    serve: Serve, free_port: Callable[[], int]
) -> None:
    service = FakeTasks()
    addresses = [f"127.0.0.1:{free_port()}", await serve(service)]
    async with Client(addresses) as client:
        for _ in range(4):
            assert (await client.submit("p", "hi")).task == TASK
    assert len(service.submitted) == 4


async def test_a_controld_that_is_frozen_is_asked_once_and_then_left(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = [f"127.0.0.1:{silent.getsockname()[1]}", await serve(FakeTasks())]
        async with Client(addresses, timeout_s=0.5) as client:
            client.prefer(addresses[0])
            with pytest.raises(Timeout):
                await client.get(TASK)
            assert (await client.get(TASK)).task == TASK


async def test_nobody_there_is_unavailable_in_time(free_port: Callable[[], int]) -> None:
    async with Client(f"127.0.0.1:{free_port()}", timeout_s=0.5) as client:
        with pytest.raises(Unavailable):
            await client.get(TASK)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidInput),
        (grpc.StatusCode.NOT_FOUND, NotFound),
        (grpc.StatusCode.ALREADY_EXISTS, Conflict),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Exhausted),
    ],
)
async def test_an_answer_that_says_no_is_not_retried(
    serve: Serve, code: grpc.StatusCode, kind: type[Exception]
) -> None:
    service = FakeTasks()
    service.refuse = [code]
    async with Client(await serve(service)) as client:
        with pytest.raises(kind, match="told to"):
            await client.submit("p", "hi")
    assert len(service.submitted) == 1


async def test_a_cancel_that_is_repeated_finds_its_own_effect(serve: Serve) -> None:
    service = FakeTasks()
    service.refuse = [grpc.StatusCode.UNAVAILABLE]
    async with Client(await serve(service)) as client:
        ended = await client.cancel(TASK)
        assert ended.state == tasks_pb2.TASK_STATE_CANCELLED
        with pytest.raises(Conflict):
            await client.cancel(TASK)


async def test_a_watch_that_breaks_goes_on_with_a_new_snapshot(serve: Serve) -> None:
    service = FakeTasks()
    service.refuse = [grpc.StatusCode.UNAVAILABLE]
    async with Client(await serve(service)) as client:
        seen = [event.WhichOneof("what") async for event in client.watch(TASK)]
    assert seen == ["snapshot", "snapshot", "finished"]


async def test_run_yields_events_to_the_end(serve: Serve) -> None:
    async with Client(await serve(FakeTasks())) as client:
        seen = [event async for event in client.run("p", "hi")]
    assert [event.WhichOneof("what") for event in seen] == ["finished"]
    assert seen[-1].finished.output == "four"


async def test_run_raises_what_the_submission_was_refused_for(serve: Serve) -> None:
    async with Client(await serve(FakeTasks())) as client:
        with pytest.raises(Exhausted, match="too much") as caught:
            [event async for event in client.run("full", "hi")]
    assert caught.value.retry_after_s == 0.5


async def test_many_go_on_after_a_broken_stream_and_each_is_answered_once(serve: Serve) -> None:
    service = FakeTasks()
    service.break_streams_after = 300
    requests = [Client.request("p", "hi", follow=bool(n % 2)) for n in range(1000)]
    async with Client(await serve(service)) as client:
        events = [event async for event in client.submit_many(requests, in_flight=64)]
    accepted = [event.request_id for event in events if event.HasField("accepted")]
    finished = [event.request_id for event in events if event.HasField("event")]
    assert sorted(accepted) == sorted(request.request_id for request in requests)
    assert sorted(finished) == sorted(r.request_id for r in requests if r.follow)


async def test_what_fails_in_the_callers_iterable_reaches_the_caller(serve: Serve) -> None:
    async def requests() -> AsyncIterator[tasks_pb2.SubmitRequest]:
        yield Client.request("p", "hi")
        raise ValueError("the caller's own")

    async with Client(await serve(FakeTasks())) as client:
        events = client.submit_many(requests())
        assert (await anext(events)).HasField("accepted")
        with pytest.raises(ValueError, match="the caller's own"):
            await anext(events)


def test_a_client_needs_an_address() -> None:
    with pytest.raises(InvalidInput, match="addresses"):
        Client([])
