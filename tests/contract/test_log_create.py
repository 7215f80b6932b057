"""The contract of corefleet.bus.Log, held by NATS and by memory: what accepting a task needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from corefleet.bus import Entry, Log, Stored
from corefleet.errors import CorefleetError, Fenced
from corefleet.messages.records import ClusterSettings
from tests.contract.log_backends import Backend, Collected, MemoryBackend, NatsBackend
from tests.servers.nats import NatsServer

CALL_S = 5.0
RECORD = "cf.0.own.1.task.t"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats")) as running:
        yield running


@pytest.fixture(params=["memory", "nats"])
async def log(request: pytest.FixtureRequest, server: NatsServer) -> AsyncIterator[Log]:
    backend: Backend = MemoryBackend() if request.param == "memory" else NatsBackend(server.url)
    made = await backend.log()
    await made.ensure(ClusterSettings(shards=4, streams=1))
    yield made
    await backend.close()


async def test_append_is_fenced_on_all_subjects_that_a_pattern_stands_for(
    log: Log,
) -> None:
    """Rule 4: a record is created only if there is neither record nor result of its task."""
    subject, result = "cf.0.own.3.task.t", "cf.0.res.3.task.t"
    nothing = Entry(subject, b"new", 0, "cf.0.*.3.task.t")
    other = await log.append(Entry("cf.0.res.3.task.tx", b"another task's"), CALL_S)
    created = await log.append(nothing, CALL_S)
    assert created > other
    with pytest.raises(Fenced):
        await log.append(nothing, CALL_S)
    await log.append(Entry(subject, b"ended", created, rollup=True, ttl_s=1), CALL_S)
    await log.append(Entry(result, b"result"), CALL_S)
    async with asyncio.timeout(10):
        while await log.last(subject, CALL_S) is not None:  # noqa: ASYNC110 - expiry tells nobody
            await asyncio.sleep(0.05)
    with pytest.raises(Fenced):
        await log.append(nothing, CALL_S)
    assert await log.last(subject, CALL_S) is None


async def test_append_soon_tells_what_append_would_return_or_raise(log: Log) -> None:
    told = Collected[int | CorefleetError]()
    log.append_soon(Entry(RECORD, b"1", 0), CALL_S, told)
    assert told.items == []
    [first] = await told.at_least(1)
    assert first == (await log.last(RECORD, CALL_S) or Stored("", b"", 0)).sequence
    log.append_soon(Entry(RECORD, b"again", 0), CALL_S, told)
    assert isinstance((await told.at_least(2))[1], Fenced)
