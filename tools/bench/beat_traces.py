"""Arrivals of heartbeats: made after published delays, and recorded from the real program."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import numpy as np

from agentd.heartbeat.pipe import Setup, Status, line_of
from corefleet.adapters.nats_bus import NatsBus
from corefleet.adapters.servers import find_nats_server
from corefleet.bus import Incoming
from corefleet.codec import decode
from corefleet.config import LogConfig, NatsConfig
from corefleet.errors import Unavailable
from corefleet.messages.wire import Heartbeat
from corefleet.subjects import beats as beats_subject
from tools.bench.detectors import Beats, Floats

INTERVAL_S = 0.2

DELAYS_S = {
    "busy_dc": ((0.5, 268e-6), (0.99, 1.34e-3), (0.999, 23.35e-3), (0.9999, 1.39763)),
    "calm_dc": ((0.5, 250e-6), (0.99, 1.25e-3), (0.999, 11.07e-3), (0.9999, 105.84e-3)),
}
"""Quantiles of the time between servers of different pods, host and network together, after
Guo et al., Pingmesh (SIGCOMM 2015), for a throughput-heavy and a latency-sensitive data
centre. Entered by hand, the two lower ones of the second rounded; nothing is known above
the last one: it is the longest delay."""

_CONNECT_S = 10.0
_START_S = 30.0


def made(name: str, beats: int, rng: np.random.Generator) -> Beats:
    """Return beats with delays drawn from `DELAYS_S[name]`, log-linear between quantiles.

    They come over one TCP connection: none overtakes another.
    """
    shares, delays = zip((0.0, DELAYS_S[name][0][1] / 2), *DELAYS_S[name], strict=True)
    delay = np.exp(np.interp(rng.random(beats), shares, np.log(delays)))
    sent: Floats = np.arange(beats, dtype=np.float64) * INTERVAL_S
    arrived: Floats = np.maximum.accumulate(sent + delay, dtype=np.float64)
    return Beats(sent, arrived)


def resampled(gaps: Floats, beats: int, rng: np.random.Generator) -> Beats:
    """Return beats whose gaps are drawn anew from recorded ones, each on its own.

    So nothing longer than the longest recorded gap comes up.
    """
    arrived = np.cumsum(rng.choice(gaps, beats))
    return Beats(arrived, arrived)


def recorded(seconds: float, programs: int, busy: int) -> Floats:
    """Return the gaps between arrivals of real heartbeat programs' beats over a real NATS
    server on this machine, with `busy` processes that use all the CPU they get."""
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(_nats())
        for number in range(programs):
            beating = stack.enter_context(_ended(_heartbeat()))
            assert beating.stdin is not None
            setup = Setup(
                node=f"n{number}",
                rack="bench",
                nats=NatsConfig(servers=(url,)),
                log=LogConfig(level="error"),
                interval_s=INTERVAL_S,
                cpus=(0,),
            )
            beating.stdin.write(line_of(setup) + line_of(Status(number=1, epoch=1)))
            beating.stdin.flush()
        return asyncio.run(_hear(url, seconds, programs, busy))


async def _hear(url: str, seconds: float, programs: int, busy: int) -> Floats:
    all_beat = asyncio.Event()
    arrived: dict[str, list[float]] = {}

    def heard(message: Incoming) -> None:
        beat = decode(message.payload, Heartbeat)
        arrived.setdefault(beat.node, []).append(time.monotonic())
        if len(arrived) == programs:
            all_beat.set()

    bus = await _connect(url)
    await bus.subscribe(beats_subject("bench"), heard)
    async with asyncio.timeout(_START_S):
        await all_beat.wait()
    arrived.clear()
    with contextlib.ExitStack() as load:
        for _ in range(busy):
            load.enter_context(_ended(_busy()))
        await asyncio.sleep(seconds)
    await bus.close()
    gaps = [np.diff(times) for times in arrived.values()]
    return np.concatenate([each for each in gaps if len(each)])


async def _connect(url: str) -> NatsBus:
    give_up = time.monotonic() + _CONNECT_S
    while True:
        try:
            return await NatsBus.connect(NatsConfig(servers=(url,)), "bench", lambda error: None)
        except Unavailable:
            if time.monotonic() > give_up:
                raise
            await asyncio.sleep(0.1)


@contextlib.contextmanager
def _nats() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [str(find_nats_server()), "-js", "-sd", folder, "-a", "127.0.0.1"]
        server = subprocess.Popen(
            [*command, "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        with _ended(server):
            yield f"nats://127.0.0.1:{port}"


def _busy() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "while True: pass"])


def _heartbeat() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "agentd.heartbeat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
