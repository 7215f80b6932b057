"""A task's life on a real JetStream and in memory: accepted, placed, requeued, ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from corefleet.bus import Log, Stored
from corefleet.codec import decode
from corefleet.errors import AttemptDropped, Conflict
from corefleet.ids import task_id_of
from corefleet.journal import Journal, end_task, place, submit
from corefleet.messages.records import (
    ClusterSettings,
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


def submission(name: str, text: str = "do it", at_ms: int = 1) -> TaskRecord:
    return TaskRecord(
        task=task_id_of(SHARD, name),
        pool="pool",
        session=f"s-{name}",
        request_id=name,
        input=text,
        created_ms=at_ms,
        digest=text.encode(),
    )


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
    record = submission("life")
    seen = Collected[Stored]()
    follower = await log.follow(0, [LAYOUT.owned(SHARD)], seen)
    assert await submit(log, LAYOUT, record) == (record.task, False)
    assert await submit(log, LAYOUT, submission("life", at_ms=2)) == (record.task, True)
    with pytest.raises(Conflict):
        await submit(log, LAYOUT, submission("life", "something else"))

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

    # A follower that lags does not see what was rolled up meanwhile: only the newest counts.
    def ended(messages: list[Stored]) -> bool:
        last = messages[-1]
        return kind_of(last.subject) == "task" and decode(last.payload, TaskRecord).state == "done"

    messages = await seen.until(ended)
    assert [kind_of(each.subject) for each in messages[-2:]] == ["head", "task"]
    assert await end_task(log, LAYOUT, second, revision, result_of(second, "cancelled")) == result
    assert await submit(log, LAYOUT, submission("life", at_ms=2)) == (record.task, True)
    await follower.close()


async def test_cancelled_before_it_ran(log: Log) -> None:
    record = submission("cancel")
    await submit(log, LAYOUT, record)
    stored = await log.last(LAYOUT.task(SHARD, record.task), CALL_S)
    assert stored is not None
    cancelled = result_of(record, "cancelled")
    assert await end_task(log, LAYOUT, record, stored.sequence, cancelled) == cancelled
    attempt = Journal(log, LAYOUT, record, stored.sequence)
    with pytest.raises(AttemptDropped):
        await attempt.append((Step(step=0, kind="tool"),))


async def test_an_attempt_is_carried_on_by_another_process_of_its_node(log: Log) -> None:
    record = submission("carried")
    await submit(log, LAYOUT, record)
    first, revision = await placed(log, record, 1)
    dead = Journal(log, LAYOUT, first, revision)
    steps = tuple(Step(step=n, kind="tool", name="t", result=b"r", attempt=1) for n in range(3))
    assert await Journal(log, LAYOUT, first, revision).resume() == ()
    await dead.append(steps[:2])
    heir = Journal(log, LAYOUT, first, revision)
    assert await heir.resume() == steps[:2]
    await heir.append(steps[2:])
    # What the dead one had on its way arrives late: the same bytes, read once.
    late = Journal(log, LAYOUT, first, revision)
    late._number = 1
    await late.append(steps[2:])
    assert await Journal(log, LAYOUT, first, revision).resume() == steps
    assert await heir.finish(result_of(first)) == result_of(first)
    with pytest.raises(AttemptDropped):
        await Journal(log, LAYOUT, first, revision).resume()


@pytest.mark.parametrize("with_head", [True, False])
async def test_an_end_that_a_dead_process_had_decided_is_carried_out_by_the_next(
    log: Log, with_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = submission(f"decided-{with_head}")
    await submit(log, LAYOUT, record)
    first, revision = await placed(log, record, 1)
    head = SessionHead(pool="pool", session=record.session, version=1, last_task=record.task)
    dead = Journal(log, LAYOUT, first, revision)

    async def dies(*_: object, **__: object) -> None:
        raise ProcessLookupError("killed here")

    target = "corefleet.journal.carry_out" if with_head else "corefleet.ending._close"
    with monkeypatch.context() as patched:
        patched.setattr(target, dies)
        with pytest.raises(ProcessLookupError):
            await dead.finish(result_of(first), head if with_head else None)
    heir = Journal(log, LAYOUT, first, revision)
    with pytest.raises(AttemptDropped):
        await heir.resume()
    assert heir.outcome == result_of(first)
    terminal = await log.last(LAYOUT.task(SHARD, record.task), CALL_S)
    assert terminal is not None
    assert decode(terminal.payload, TaskRecord).state == "done"


async def test_an_attempt_that_lost_its_fence_is_not_carried_on(log: Log) -> None:
    record = submission("fenced")
    await submit(log, LAYOUT, record)
    first, revision = await placed(log, record, 1)
    await placed(log, record, 2)
    heir = Journal(log, LAYOUT, first, revision)
    with pytest.raises(AttemptDropped):
        await heir.resume()
    assert heir.outcome is None
