"""A task's life on a real JetStream and in memory: accepted, placed, requeued, ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from corefleet.bus import Log, Stored
from corefleet.codec import decode
from corefleet.errors import AttemptDropped, Conflict
from corefleet.ids import new_task_id
from corefleet.journal import Journal, end_task, place, submit
from corefleet.messages.records import (
    ClusterSettings,
    RequestRecord,
    ResultRecord,
    SessionHead,
    Step,
    TaskRecord,
)
from corefleet.subjects import Layout, kind_of
from tests.contract.log_backends import Backend, Collected, MemoryBackend, NatsBackend
from tests.servers.nats import NatsServer

SETTINGS = ClusterSettings(shards=4, streams=1)
LAYOUT = Layout(4, 1)
SHARD = 2
CALL_S = 5.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats")) as running:
        yield running


@pytest.fixture(params=["memory", "nats"])
async def log(request: pytest.FixtureRequest, server: NatsServer) -> AsyncIterator[Log]:
    backend: Backend = MemoryBackend() if request.param == "memory" else NatsBackend(server.url)
    made = await backend.log()
    await made.ensure(SETTINGS)
    yield made
    await backend.close()


def submission(name: str, text: str = "do it") -> tuple[RequestRecord, TaskRecord]:
    task = new_task_id(SHARD, 1_700_000_000_000, name.encode().ljust(10, b"."))
    record = TaskRecord(
        task=task, pool="pool", session=f"s-{name}", request_id=name.split("+")[0], input=text
    )
    request = RequestRecord(
        request_id=record.request_id, task=task, session=record.session, digest=text.encode()
    )
    return request, record


async def placed(log: Log, record: TaskRecord, attempt: int) -> tuple[TaskRecord, int]:
    stored = await log.last(LAYOUT.task(SHARD, record.task), CALL_S)
    assert stored is not None
    now = decode(stored.payload, TaskRecord)
    now = msgspec.structs.replace(now, state="placed", attempt=attempt, node=f"n{attempt}")
    return now, await place(log, LAYOUT, now, stored.sequence)


def result_of(record: TaskRecord, state: str = "done") -> ResultRecord:
    return ResultRecord(
        task=record.task,
        pool=record.pool,
        session=record.session,
        request_id=record.request_id,
        state="done" if state == "done" else "cancelled",
        attempt=record.attempt,
        node=record.node,
    )


async def test_accepted_requeued_and_finished(log: Log) -> None:
    request, record = submission("life")
    seen = Collected[Stored]()
    follower = await log.follow(0, [LAYOUT.owned(SHARD)], seen)
    assert await submit(log, LAYOUT, request, record) == (record.task, False)
    assert await submit(log, LAYOUT, *submission("life+again")) == (record.task, True)
    with pytest.raises(Conflict):
        await submit(log, LAYOUT, *submission("life+other", "something else"))

    old = Journal(log, LAYOUT, *await placed(log, record, 1))
    assert await old.open("n1") == ()
    first = Step(step=0, kind="tool", name="t", result=b"r", attempt=1)
    await old.append((first,))

    second, revision = await placed(log, record, 2)
    new = Journal(log, LAYOUT, second, revision)
    assert await new.open("n2") == (first,)
    with pytest.raises(AttemptDropped):
        await old.append((Step(step=1, kind="tool", attempt=1),))
    await new.append((Step(step=1, kind="reply", attempt=2),))
    head = SessionHead(pool="pool", session=record.session, version=1, last_task=record.task)
    result = await new.finish(result_of(second), head)
    assert result == result_of(second)

    stored = await log.last(LAYOUT.result(SHARD, record.task), CALL_S)
    assert stored is not None
    assert decode(stored.payload, ResultRecord) == result
    messages = await seen.at_least(6)
    kinds = [(kind_of(each.subject), each.sequence) for each in messages[-3:]]
    assert [kind for kind, _ in kinds] == ["task", "head", "task"]
    states = [decode(each.payload, TaskRecord).state for each in (messages[-3], messages[-1])]
    assert states == ["placed", "done"]
    assert await end_task(log, LAYOUT, second, revision, result_of(second, "cancelled")) == result
    await follower.close()


async def test_cancelled_before_it_ran(log: Log) -> None:
    request, record = submission("cancel")
    await submit(log, LAYOUT, request, record)
    stored = await log.last(LAYOUT.task(SHARD, record.task), CALL_S)
    assert stored is not None
    cancelled = result_of(record, "cancelled")
    assert await end_task(log, LAYOUT, record, stored.sequence, cancelled) == cancelled
    attempt = Journal(log, LAYOUT, record, stored.sequence)
    with pytest.raises(AttemptDropped):
        await attempt.append((Step(step=0, kind="tool"),))
