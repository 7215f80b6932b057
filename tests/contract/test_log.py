"""The contract of corefleet.bus.Log, held by JetStream and by memory."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from corefleet.adapters.nats_log import NatsLog
from corefleet.bus import Entry, Log, Stored
from corefleet.errors import (
    Fenced,
    Incompatible,
    InvalidInput,
    NotFound,
    StoreFull,
    Timeout,
    Unavailable,
)
from corefleet.messages.records import ClusterSettings
from tests.contract.conftest import Secured
from tests.contract.log_backends import (
    Backend,
    Collected,
    Errors,
    MemoryBackend,
    NatsBackend,
    connect,
)
from tests.servers.nats import NatsServer

SETTINGS = ClusterSettings(shards=4, streams=2)
CALL_S = 5.0

_names = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server that no test harms."""
    with NatsServer(tmp_path_factory.mktemp("nats")) as running:
        yield running


@pytest.fixture
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server of the test's own."""
    with NatsServer(tmp_path_factory.mktemp("mortal")) as running:
        yield running


@pytest.fixture(params=["memory", "nats", "nats over TLS"])
async def backend(
    request: pytest.FixtureRequest, server: NatsServer, secure_nats: Secured
) -> AsyncIterator[Backend]:
    made: Backend = MemoryBackend()
    if request.param == "nats":
        made = NatsBackend(server.url)
    elif request.param == "nats over TLS":
        made = NatsBackend(secure_nats.address, secure_nats.tls)
    yield made
    await made.close()


@pytest.fixture
async def log(backend: Backend) -> Log:
    made = await backend.log()
    await made.ensure(SETTINGS)
    return made


@pytest.fixture
def name() -> str:
    """Last token of subjects that no other test uses."""
    return f"n{next(_names)}"


def record(name: str) -> str:
    return f"cf.0.own.1.task.{name}"


def journal(name: str) -> str:
    return f"cf.0.log.1.{name}"


async def put(log: Log, subject: str, payload: bytes, fence: int | None = None) -> int:
    return await log.append(Entry(subject, payload, fence), CALL_S)


async def payloads(log: Log, subject: str) -> list[bytes]:
    """All that is stored on `subject`."""
    newest = await log.last(subject, CALL_S)
    if newest is None:
        return []
    return [each.payload for each in await log.read(subject, newest.sequence, CALL_S)]


async def fill(log: Log) -> int:
    """Append until the stream is full; return how many messages it took."""
    for number in range(100):
        try:
            await put(log, journal(f"full-{number}"), bytes(700), fence=0)
        except StoreFull:
            return number
    raise AssertionError("the stream takes more than its max_bytes")


# Fences


async def test_append_is_fenced_on_its_own_subject(log: Log, name: str) -> None:
    first = await put(log, record(name), b"1", fence=0)
    with pytest.raises(Fenced):
        await put(log, record(name), b"again", fence=0)
    second = await put(log, record(name), b"2", fence=first)
    with pytest.raises(Fenced):
        await put(log, record(name), b"late", fence=first)
    assert second > first
    assert await payloads(log, record(name)) == [b"1", b"2"]
    assert await log.last(record(name), CALL_S) == Stored(record(name), b"2", second)


async def test_append_is_fenced_on_another_subject(log: Log, name: str) -> None:
    placed = await put(log, record(name), b"placed", fence=0)
    step = Entry(journal(name), b"step", placed, record(name))
    await log.append(step, CALL_S)
    await log.append(step, CALL_S)
    await put(log, record(name), b"requeued", fence=placed)
    with pytest.raises(Fenced):
        await log.append(step, CALL_S)
    with pytest.raises(Fenced):
        await log.append(Entry(journal(name), b"x", placed, record(f"{name}x")), CALL_S)
    assert await payloads(log, journal(name)) == [b"step", b"step"]


async def test_append_without_a_fence_always_stores(log: Log, name: str) -> None:
    for number in range(3):
        await put(log, journal(name), b"%d" % number)
    assert await payloads(log, journal(name)) == [b"0", b"1", b"2"]


async def test_one_of_many_creates_wins(backend: Backend, log: Log, name: str) -> None:
    logs = [log, await backend.log(), await backend.log()]
    tries = [
        put(each, record(name), b"%d" % number, fence=0) for number in range(5) for each in logs
    ]
    outcomes = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(each, int) for each in outcomes) == 1
    assert sum(isinstance(each, Fenced) for each in outcomes) == len(tries) - 1


# Batches


async def test_batch_takes_consecutive_sequences_in_order(log: Log, name: str) -> None:
    before = await put(log, record(name), b"placed", fence=0)
    entries = [
        Entry(journal(name), b"finish", before, record(name), rollup=True, ttl_s=60),
        Entry(f"cf.0.own.1.head.p.{name}", b"head", 0),
        Entry(f"cf.0.res.1.{name}", b"result", 0, ttl_s=60),
        Entry(record(name), b"done", before, rollup=True, ttl_s=60),
    ]
    last = await log.append_batch(entries, CALL_S)
    found = [await log.last(entry.subject, CALL_S) for entry in entries]
    assert found == [
        Stored(entry.subject, entry.payload, last - 3 + number)
        for number, entry in enumerate(entries)
    ]
    assert await payloads(log, record(name)) == [b"done"]


@pytest.mark.parametrize("wrong", range(3))
async def test_batch_is_refused_whole(log: Log, name: str, wrong: int) -> None:
    """Whichever entry's expectation fails."""
    placed = await put(log, record(name), b"placed", fence=0)
    subjects = [journal(name), f"cf.0.res.1.{name}", record(name)]
    fences = [placed, 0, placed]
    entries = [
        Entry(subject, b"new", fence + (number == wrong), "" if number else record(name))
        for number, (subject, fence) in enumerate(zip(subjects, fences, strict=True))
    ]
    with pytest.raises(Fenced):
        await log.append_batch(entries, CALL_S)
    assert [await payloads(log, subject) for subject in subjects] == [[], [], [b"placed"]]


async def test_batch_refuses_a_fence_on_what_it_has_written(log: Log, name: str) -> None:
    placed = await put(log, record(name), b"placed", fence=0)
    entries = [
        Entry(record(name), b"done", placed),
        Entry(journal(name), b"finish", placed, record(name)),
    ]
    with pytest.raises(Fenced):
        await log.append_batch(entries, CALL_S)
    assert await payloads(log, record(name)) == [b"placed"]


async def test_batch_of_one_is_an_append(log: Log, name: str) -> None:
    sequence = await log.append_batch([Entry(record(name), b"1", 0)], CALL_S)
    assert await log.last(record(name), CALL_S) == Stored(record(name), b"1", sequence)


async def test_batch_over_two_streams_is_refused(log: Log, name: str) -> None:
    with pytest.raises(InvalidInput, match="one stream"):
        await log.append_batch([Entry(record(name), b"1"), Entry(f"cf.1.log.3.{name}", b"2")], 1.0)
    assert await payloads(log, record(name)) == []


async def test_batches_at_once_do_not_mix(log: Log, name: str) -> None:
    def entries(number: int) -> list[Entry]:
        return [Entry(journal(f"{name}-{number}-{part}"), b"x", 0) for part in range(3)]

    lasts = await asyncio.gather(*(log.append_batch(entries(n), CALL_S) for n in range(12)))
    for number, last in enumerate(lasts):
        found = [await log.last(entry.subject, CALL_S) for entry in entries(number)]
        assert [each and each.sequence for each in found] == [last - 2, last - 1, last]


# Roll-up, time to live, size


async def test_rollup_leaves_one_message(log: Log, name: str) -> None:
    first = await put(log, record(name), b"1", fence=0)
    await put(log, f"{record(name)}x", b"other", fence=0)
    await log.append(Entry(record(name), b"2", first, rollup=True), CALL_S)
    assert await payloads(log, record(name)) == [b"2"]
    assert await payloads(log, f"{record(name)}x") == [b"other"]


async def test_time_to_live_ends_a_message(log: Log, name: str) -> None:
    await log.append(Entry(record(name), b"short", 0, ttl_s=1), CALL_S)
    await log.append(Entry(journal(name), b"long", 0, ttl_s=60), CALL_S)
    async with asyncio.timeout(20):
        while await log.last(record(name), CALL_S) is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert await payloads(log, journal(name)) == [b"long"]
    # What has gone is no message: the subject can be created anew.
    await put(log, record(name), b"new", fence=0)


async def test_full_stream_stores_nothing_and_drops_nothing(
    tmp_path_factory: pytest.TempPathFactory, mortal: NatsServer
) -> None:
    for backend in (MemoryBackend(), NatsBackend(mortal.url)):
        log = await backend.log(max_bytes=10_000)
        await log.ensure(SETTINGS)
        assert await log.usage(0, CALL_S) == 0.0
        stored = await fill(log)
        assert stored >= 8
        assert 0.75 < await log.usage(0, CALL_S) <= 1.0
        with pytest.raises(StoreFull):
            await log.append_batch(
                [Entry(journal("small"), b"1", 0), Entry(journal("large"), bytes(5000), 0)], CALL_S
            )
        for number in range(stored):
            assert await payloads(log, journal(f"full-{number}")) == [bytes(700)]
        assert await payloads(log, journal("small")) == []
        # The other stream has room.
        await put(log, "cf.1.log.3.x", bytes(700), fence=0)
        await backend.close()


async def test_usage_is_zero_without_a_limit(log: Log, name: str) -> None:
    await put(log, record(name), b"1", fence=0)
    assert await log.usage(0, CALL_S) == 0.0


# Reads


async def test_last_of_an_empty_subject_is_none(log: Log, name: str) -> None:
    assert await log.last(record(name), CALL_S) is None


async def test_read_returns_what_is_there_up_to_a_sequence(log: Log, name: str) -> None:
    sequences = []
    for number in range(600):
        sequences.append(await put(log, journal(name), b"%d" % number))
        if number % 100 == 0:
            await put(log, journal(f"{name}x"), b"another's")
    found = await log.read(journal(name), sequences[-1], CALL_S)
    assert [(each.payload, each.sequence) for each in found] == [
        (b"%d" % number, sequence) for number, sequence in enumerate(sequences)
    ]
    part = await log.read(journal(name), sequences[299], CALL_S)
    assert [each.sequence for each in part] == sequences[:300]


async def test_read_of_what_was_rolled_up_is_not_found(log: Log, name: str) -> None:
    gone = await put(log, journal(name), b"1")
    await log.append(Entry(journal(name), b"2", rollup=True), CALL_S)
    with pytest.raises(NotFound, match=str(gone)):
        await log.read(journal(name), gone, CALL_S)


async def test_missing_stream_is_unavailable(log: Log) -> None:
    with pytest.raises(Unavailable):
        await put(log, "cf.7.log.1.x", b"1")
    with pytest.raises(Unavailable):
        await log.last("cf.7.log.1.x", 1.0)


# Following


async def test_follower_gets_what_was_and_what_comes(backend: Backend, log: Log, name: str) -> None:
    shard = f"cf.0.own.{name}"
    expected = []
    for number in range(100):
        subject = f"{shard}.task.t{number}"
        expected.append((subject, await put(log, subject, b"%d" % number, fence=0)))
    await put(log, f"cf.0.log.{name}.t0", b"not followed")
    seen = Collected[Stored]()
    follower = await (await backend.log()).follow(0, [f"{shard}.>"], seen)
    for number in range(100, 300):
        subject = f"{shard}.task.t{number}"
        expected.append((subject, await put(log, subject, b"%d" % number, fence=0)))
        await put(log, f"cf.0.log.{name}.t{number}", b"not followed")
    found = await seen.at_least(300)
    assert [(each.subject, each.sequence) for each in found] == expected
    assert [each.payload for each in found] == [b"%d" % number for number in range(300)]
    await follower.close()
    await follower.close()
    await put(log, f"{shard}.task.after", b"after")
    assert len(seen.items) == 300


async def test_follower_with_two_filters_from_a_sequence(log: Log, name: str) -> None:
    await put(log, f"cf.0.own.{name}.owner", b"before")
    start = await put(log, f"cf.0.own.{name}.owner", b"1")
    await put(log, f"cf.0.res.{name}.t", b"2")
    await put(log, f"cf.0.log.{name}.t", b"neither")
    await put(log, f"cf.0.own.{name}.owner", b"3")
    seen = Collected[Stored]()
    filters = [f"cf.0.own.{name}.>", f"cf.0.res.{name}.*"]
    follower = await log.follow(0, filters, seen, start)
    assert [each.payload for each in await seen.at_least(3)] == [b"1", b"2", b"3"]
    await follower.close()


async def test_follower_waits_for_a_slow_handler(log: Log, name: str) -> None:
    """One message at a time; close waits for the one that is being handled."""
    going_on = asyncio.Event()
    started = Collected[bytes]()
    ended: list[bytes] = []

    async def handle(message: Stored) -> None:
        started(message.payload)
        await going_on.wait()
        ended.append(message.payload)

    for number in range(3):
        await put(log, f"cf.0.own.{name}.owner", b"%d" % number)
    follower = await log.follow(0, [f"cf.0.own.{name}.>"], handle)
    await started.at_least(1)
    assert started.items == [b"0"]
    closing = asyncio.create_task(follower.close())
    await asyncio.sleep(0)
    assert not closing.done()
    going_on.set()
    await closing
    assert ended == started.items == [b"0"]


# NATS


async def test_follower_outlives_kills_without_gap_or_repeat(mortal: NatsServer) -> None:
    """2000 messages across a kill -9 and a restart of the server."""
    total = 2000
    writer = NatsLog(await connect(mortal.url, Errors()))
    reader = NatsLog(await connect(mortal.url, Errors()))
    await writer.ensure(SETTINGS)
    seen = Collected[Stored]()
    follower = await reader.follow(0, ["cf.0.own.1.>"], seen)

    async def write(start: int, stop: int) -> None:
        for number in range(start, stop):
            entry = Entry(f"cf.0.own.1.task.t{number}", b"%d" % number, 0)
            while True:
                try:
                    await writer.append(entry, 0.5)
                except Fenced:
                    break  # ours, with its answer lost
                except Unavailable:
                    await asyncio.sleep(0.01)
                else:
                    break

    await write(0, total // 4)
    writing = asyncio.create_task(write(total // 4, total))
    for share in (0.4, 0.7):
        await seen.at_least(int(total * share))
        await asyncio.to_thread(mortal.kill)
        await asyncio.to_thread(mortal.restart)
    await writing
    found = await seen.at_least(total)
    assert [each.payload for each in found] == [b"%d" % number for number in range(total)]
    sequences = [each.sequence for each in found]
    assert sequences == sorted(set(sequences))
    await follower.close()
    await writer._bus.close()
    await reader._bus.close()


async def test_every_append_keeps_its_deadline_while_the_server_is_frozen(
    mortal: NatsServer,
) -> None:
    bus = await connect(mortal.url, Errors())
    log = NatsLog(bus)
    await log.ensure(SETTINGS)
    mortal.freeze()
    loop = asyncio.get_running_loop()
    started = loop.time()
    calls = [log.append(Entry(f"cf.0.log.1.t{number}", bytes(2000)), 0.3) for number in range(200)]
    batch = [Entry("cf.0.log.1.a", b"1"), Entry("cf.0.log.1.b", b"2")]
    outcomes = await asyncio.gather(
        *calls, log.append_batch(batch, 0.3), log.last("cf.0.log.1.a", 0.3), return_exceptions=True
    )
    assert loop.time() - started < 1.5
    assert {type(each) for each in outcomes} == {Timeout}
    mortal.thaw()
    # Unknown means unknown: what timed out may be stored by now.
    assert await log.append(Entry("cf.0.log.1.after", b"x"), CALL_S) > 0
    await bus.close()


async def test_append_after_the_server_died_is_unavailable_at_once(mortal: NatsServer) -> None:
    bus = await connect(mortal.url, Errors())
    log = NatsLog(bus)
    await log.ensure(SETTINGS)
    told = Collected[bool]()
    bus.on_connection(told)
    await asyncio.to_thread(mortal.kill)
    await told.at_least(1)
    with pytest.raises(Unavailable):
        await log.append(Entry("cf.0.log.1.a", b"x"), 60.0)
    await bus.close()


async def test_ensure_is_idempotent_and_can_race(server: NatsServer) -> None:
    buses = [await connect(server.url, Errors()) for _ in range(4)]
    settings = ClusterSettings(shards=8, streams=6)
    await asyncio.gather(*(NatsLog(bus).ensure(settings) for bus in buses))
    await NatsLog(buses[0]).ensure(settings)
    for bus in buses:
        await bus.close()


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("discard", "old", "'new'"),
        ("max_age", 60_000_000_000, "0"),
        ("max_msgs_per_subject", 5, "-1"),
        ("allow_atomic", False, "True"),
        ("allow_msg_ttl", False, "True"),
        ("allow_rollup_hdrs", False, "True"),
        ("storage", "memory", "'file'"),
    ],
)
async def test_stream_that_is_configured_otherwise_is_refused(
    mortal: NatsServer, setting: str, value: object, expected: str
) -> None:
    bus = await connect(mortal.url, Errors())
    config: dict[str, object] = {
        "name": "cf-1",
        "subjects": ["cf.1.>"],
        "discard": "new",
        "storage": "file",
        "num_replicas": 1,
        "allow_direct": True,
        "allow_rollup_hdrs": True,
        "allow_msg_ttl": True,
        "allow_atomic": True,
        setting: value,
    }
    made = await bus.request("$JS.API.STREAM.CREATE.cf-1", msgspec.json.encode(config), CALL_S)
    assert "error" not in msgspec.json.decode(made)
    with pytest.raises(Incompatible, match=f"stream cf-1: {setting} is .*expected {expected}"):
        await NatsLog(bus).ensure(SETTINGS)
    await bus.close()
