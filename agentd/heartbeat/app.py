"""The heartbeat program: a NATS connection of its own, agentd's word over a pipe.

It ends when agentd closes the pipe or dies.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import structlog

from agentd.heartbeat.beat import Heart
from agentd.heartbeat.load import LoadSampler
from agentd.heartbeat.pipe import MOST_LINE_BYTES, Setup, Status, read_line
from agentd.hostfs import HostFs
from corefleet import event_loop, logs
from corefleet.adapters.nats_bus import NatsBus
from corefleet.bus import Bus
from corefleet.clock import SystemClock
from corefleet.codec import encode
from corefleet.errors import CorefleetError, Unavailable
from corefleet.messages.wire import LoadVector
from corefleet.subjects import beat as beat_subject

_SAMPLE_EVERY_S = 1.0
_RETRY_S = 0.5

_log = structlog.get_logger(__name__)


def main() -> int:
    """Beat until standard input ends; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; agentd says when to stop.
    try:
        with event_loop.runner() as runner:
            runner.run(run())
    except CorefleetError as error:
        print(f"heartbeat: {error}", file=sys.stderr)  # noqa: T201 - last words
        return 1
    return 0


async def run() -> None:
    """Read the Setup, then beat. Raises CorruptRecord, Incompatible."""
    reader = asyncio.StreamReader(limit=MOST_LINE_BYTES)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    try:
        first = await reader.readline()
        if not first:
            return
        setup = read_line(first, Setup)
        logs.configure(setup.log, "heartbeat", node=setup.node)
        clock = SystemClock()
        heart = Heart(setup, Status(number=0), clock.monotonic())
        listening = asyncio.create_task(_listen(reader, heart, clock))
        beating = asyncio.create_task(_connect_and_beat(heart, clock))
        try:
            done, _ = await asyncio.wait((listening, beating), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            listening.cancel()
            beating.cancel()
            await asyncio.gather(listening, beating, return_exceptions=True)
    finally:
        transport.close()


async def _listen(reader: asyncio.StreamReader, heart: Heart, clock: SystemClock) -> None:
    while line := await reader.readline():
        heart.hear(read_line(line, Status), clock.monotonic())


async def _connect_and_beat(heart: Heart, clock: SystemClock) -> None:
    bus = await _connect(heart.setup)
    print("connected", flush=True)  # noqa: T201 - agentd waits for this line
    try:
        await _beat(bus, heart, clock)
    finally:
        await bus.close()


async def _connect(setup: Setup) -> NatsBus:
    while True:
        try:
            return await NatsBus.connect(setup.nats, f"heartbeat {setup.node}", _trouble)
        except Unavailable as error:
            _trouble(error)
            await asyncio.sleep(_RETRY_S)


async def _beat(bus: Bus, heart: Heart, clock: SystemClock) -> None:
    setup = heart.setup
    subject = beat_subject(setup.rack, setup.node)
    sampler = LoadSampler(HostFs(), setup.cpus)
    next_sample = next_beat = clock.monotonic()
    while True:
        now = clock.monotonic()
        if now >= next_sample:
            cpu, memory = sampler.sample()
            heart.load = LoadVector(cpu=cpu, memory=memory)
            next_sample = now + _SAMPLE_EVERY_S
        beat = heart.beat(now, clock.wall_ms())
        if beat is not None:
            bus.publish(subject, encode(beat))
        # Late beats are not made up for: only the newest counts.
        next_beat = max(next_beat + setup.interval_s, now)
        await asyncio.sleep(next_beat - now)


def _trouble(error: Exception) -> None:
    _log.warning("Trouble with NATS", reason=str(error) or repr(error))
