"""The bandwidth program: a Setup comes in, a Report goes out each interval.

A plain loop in a process of its own: a walk of the canary may take the time it needs. It
ends when agentd closes the pipe or dies.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from agentd.bandwidth.canary import CanarySensor, burst_bytes_per_s
from agentd.bandwidth.llc import LlcSensor
from agentd.bandwidth.monitoring import ResctrlSensor
from agentd.bandwidth.perf import Counters, PerfCounters
from agentd.bandwidth.pipe import MOST_LINE_BYTES, SOURCES, Setup, line_of, read_line
from agentd.bandwidth.pressure import PressureSensor
from agentd.bandwidth.report import Source
from agentd.bandwidth.resctrl_monitor import ResctrlMonitor
from agentd.bandwidth.sensor import Sensor
from agentd.bandwidth.uncore import UncoreSensor
from agentd.bandwidth.watch import Watch
from agentd.core.topology import Overrides
from agentd.hostfs import HostFs
from agentd.probes import discover
from corefleet import logs
from corefleet.errors import CorefleetError, CorruptRecord

_READ_BYTES = 64 * 1024

_log = structlog.get_logger(__name__)


def main() -> int:
    """Report until standard input ends; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; agentd says when to stop.
    try:
        run(sys.stdin.fileno(), sys.stdout.fileno())
    except BrokenPipeError:
        return 0  # agentd is gone.
    except CorefleetError as error:
        print(f"bandwidth: {error}", file=sys.stderr)  # noqa: T201 - last words
        return 1
    return 0


def run(source: int, sink: int) -> None:
    """Read a Setup from the descriptor `source`, write Reports to `sink` until it ends.

    Raises CorruptRecord, BrokenPipeError.
    """
    line = _first_line(source)
    if not line:
        return
    setup = read_line(line, Setup)
    logs.configure(setup.log, "bandwidth", node=setup.node)
    _allow_many_files()
    host = HostFs(Path(setup.root))
    counters = PerfCounters(host)
    watch = Watch(setup, host, counters, sensors(setup, host, counters))
    try:
        if setup.measure_peak:
            for domain in setup.domains:
                burst = burst_bytes_per_s(domain, setup.canary.most_buffer_bytes)
                if burst is not None:
                    watch.peaks.see(domain.domain, burst)
        _report(watch, setup.interval_s, source, sink)
    finally:
        watch.close()


def sensors(setup: Setup, host: HostFs, counters: Counters) -> tuple[Sensor, ...]:
    """Return every source that the Setup allows, best first."""
    domains = setup.domains

    def monitor() -> ResctrlMonitor | str:
        return ResctrlMonitor.open(host, discover(host, Overrides()))

    make: dict[Source, Callable[[], Sensor]] = {
        "resctrl": lambda: ResctrlSensor(monitor),
        "uncore": lambda: UncoreSensor(host, (one.domain for one in domains), counters),
        "llc": lambda: LlcSensor(domains, counters),
        "canary": lambda: CanarySensor(setup.canary, domains),
        "pressure": PressureSensor,
    }
    # The canary would time this machine in place of the recorded one.
    skipped = () if host.live else ("canary",)
    return tuple(make[one]() for one in SOURCES if one in setup.sources and one not in skipped)


def _report(watch: Watch, interval_s: float, source: int, sink: int) -> None:
    due = time.monotonic() + interval_s
    while True:
        while (wait_s := due - time.monotonic()) > 0:
            ready, _, _ = select.select((source,), (), (), wait_s)
            if ready and not os.read(source, _READ_BYTES):
                return
        now = time.monotonic()
        _write(sink, line_of(watch.report(now)))
        # Late reports are not made up for: only the newest counts.
        due = max(due + interval_s, now)


def _write(sink: int, line: bytes) -> None:
    while line:
        line = line[os.write(sink, line) :]


def _first_line(source: int) -> bytes:
    """Return what comes before the first line's end, b'' if the input ends before it."""
    buffer = b""
    while b"\n" not in buffer:
        part = os.read(source, _READ_BYTES)
        if not part:
            return b""
        buffer += part
        if len(buffer) > MOST_LINE_BYTES:
            raise CorruptRecord(f"Setup: the first line is longer than {MOST_LINE_BYTES} bytes")
    return buffer.partition(b"\n")[0]


def _allow_many_files() -> None:
    """Raise the limit of open files: a counter is one, and there are some for each CPU."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            _log.warning("The limit of open files stays", soft=soft, reason=str(error))
