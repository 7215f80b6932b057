"""The heartbeat program: a NATS connection of its own, agentd's word over a pipe or a socket.

On a pipe (agentd's child) it ends when agentd does. On a socket (a unit of its own) it beats
on without agentd, tells how long that has been silent, and listens for the next one.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from agentd.heartbeat.beat import Heart
from agentd.heartbeat.load import LoadSampler
from agentd.heartbeat.pipe import MOST_LINE_BYTES, Setup, Status, Word, line_of, read_line
from agentd.hostfs import HostFs
from corefleet import event_loop, logs
from corefleet.adapters.nats_bus import NatsBus
from corefleet.bus import Bus
from corefleet.clock import SystemClock
from corefleet.codec import encode
from corefleet.config import LogConfig
from corefleet.errors import ConfigError, CorefleetError, CorruptRecord, Unavailable
from corefleet.notify import Notifier
from corefleet.subjects import beat as beat_subject

_SAMPLE_EVERY_S = 1.0
_WORD_EVERY_S = 1.0
_RETRY_S = 0.5

_log = structlog.get_logger(__name__)

Say = Callable[[Word], None]


def main() -> int:
    """Beat until told to end; return the exit code."""
    parser = argparse.ArgumentParser("agentd.heartbeat", description=__doc__)
    parser.add_argument("--socket", type=Path, help="listen here for agentd, and outlive it")
    options = parser.parse_args()
    # Ctrl-C reaches all of a foreground fleet; agentd says when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with event_loop.runner() as runner:
            runner.run(run() if options.socket is None else serve(options.socket))
    except CorefleetError as error:
        print(f"heartbeat: {error}", file=sys.stderr)  # noqa: T201 - last words
        return 1
    return 0


async def run() -> None:
    """Read the Setup from standard input, then beat. Raises CorruptRecord, Incompatible."""
    reader = asyncio.StreamReader(limit=MOST_LINE_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
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

        def say(word: Word) -> None:
            print(line_of(word).decode(), end="", flush=True)  # noqa: T201 - agentd reads it

        listening = asyncio.create_task(_listen(reader, heart, clock))
        beating = asyncio.create_task(_connect_and_beat(heart, clock, say))
        await _first_of(listening, beating)
    finally:
        transport.close()


async def serve(socket: Path) -> None:
    """Beat for one agentd after the other, until SIGTERM or until one brings another Setup.

    Raises CorruptRecord, Incompatible.
    """
    logs.configure(LogConfig(), "heartbeat")
    unit = _Unit()
    server = await asyncio.start_unix_server(unit.meet, socket, limit=MOST_LINE_BYTES)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    Notifier.from_environment().ready("waiting for agentd")
    try:
        await _first_of(asyncio.create_task(stopped.wait()), asyncio.create_task(unit.beat()))
    finally:
        server.close()
        unit.part()


class _Unit:
    """The heart, and the agentd that is connected now."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._heart: Heart | None = None
        self._begun = asyncio.Event()
        self._changed = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._reached = False

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Listen to one agentd."""
        self._writers.add(writer)
        try:
            setup = read_line(await reader.readline(), Setup)
            if self._heart is None:
                logs.configure(setup.log, "heartbeat", node=setup.node)
                self._heart = Heart(setup, Status(number=0), self._clock.monotonic())
                self._begun.set()
            elif setup != self._heart.setup:
                _log.warning("agentd has another configuration: ending to take it up")
                self._changed.set()
                return
            if self._reached:
                writer.write(line_of(Word()))
            await _listen(reader, self._heart, self._clock)
            _log.warning("agentd is gone: beating on")
        except (CorruptRecord, ValueError, OSError) as error:
            _log.warning("agentd is not understood", reason=str(error))
        finally:
            self._writers.discard(writer)
            writer.close()

    async def beat(self) -> None:
        """Return when another Setup came."""
        await self._begun.wait()
        heart = self._heart
        if heart is None:
            raise AssertionError("begun without a heart")
        beating = asyncio.create_task(_connect_and_beat(heart, self._clock, self._say))
        await _first_of(beating, asyncio.create_task(self._changed.wait()))

    def part(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def _say(self, word: Word) -> None:
        self._reached = True
        for writer in self._writers:
            writer.write(line_of(word))


async def _first_of(*tasks: asyncio.Task[object]) -> None:
    """Return when the first of `tasks` ends, the others ended too; raises what it died of."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _listen(reader: asyncio.StreamReader, heart: Heart, clock: SystemClock) -> None:
    heart.meet()
    while line := await reader.readline():
        heart.hear(read_line(line, Status), clock.monotonic())


async def _connect_and_beat(heart: Heart, clock: SystemClock, say: Say) -> None:
    bus = await _connect(heart.setup)
    say(Word())
    try:
        await _beat(bus, heart, clock, say)
    finally:
        await bus.close()


async def _connect(setup: Setup) -> NatsBus:
    while True:
        try:
            return await NatsBus.connect(setup.nats, f"heartbeat {setup.node}", _trouble)
        except (Unavailable, ConfigError) as error:
            # Certificates that are just being replaced are as good as a server that is away.
            _trouble(error)
            await asyncio.sleep(_RETRY_S)


async def _beat(bus: Bus, heart: Heart, clock: SystemClock, say: Say) -> None:
    setup = heart.setup
    subject = beat_subject(setup.rack, setup.node)
    sampler = LoadSampler(HostFs(), setup.cpus)
    next_sample = next_beat = next_word = clock.monotonic()
    sent = 0
    while True:
        now = clock.monotonic()
        if now >= next_sample:
            cpu, memory = sampler.sample()
            sensed = heart.status.sensed
            heart.load = msgspec.structs.replace(sensed, cpu=cpu, memory=memory)
            next_sample = now + _SAMPLE_EVERY_S
        beat = heart.beat(now, clock.wall_ms())
        if beat is not None:
            bus.publish(subject, encode(beat))
            sent += bus.connected
        if now >= next_word:
            say(Word(sent=sent))
            sent, next_word = 0, now + _WORD_EVERY_S
        # Late beats are not made up for: only the newest counts.
        next_beat = max(next_beat + setup.interval_s, now)
        await asyncio.sleep(next_beat - now)


def _trouble(error: Exception) -> None:
    _log.warning("Trouble with NATS", reason=str(error) or repr(error))
