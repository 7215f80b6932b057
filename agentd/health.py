"""Reads what tells of a node's health, again and again, and hands on what follows."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from agentd.core.health import Health
from agentd.core.health_samples import (
    BeatsSent,
    ClockState,
    DiskState,
    HealthSettings,
    HealthVerdict,
    MemoryErrors,
    Sample,
    Throttled,
)
from agentd.hostfs import HostFs
from corefleet.background import Background, stop
from corefleet.clock import Clock

SAMPLE_EVERY_S = 10.0

_EDAC = "sys/devices/system/edac/mc"
_CPUS = "sys/devices/system/cpu"
_CONTROLLER = re.compile(r"mc\d+\Z")
_CPU = re.compile(r"cpu\d+\Z")
_STA_UNSYNC = 0x0040
_STA_NANO = 0x2000
_TIME_ERROR = 5

_log = structlog.get_logger(__name__)

ReadClock = Callable[[], ClockState | None]
ReadDisk = Callable[[str, Path], DiskState]


class _Timex(ctypes.Structure):
    """struct timex up to the fields that are read, with room for the rest: adjtimex(2)."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


class HealthWatch:
    """Samples every `every_s` in a thread; `told` gets each verdict that differs, on the loop.

    `paths`: directories by what they are, e.g. `data_dir`. `beats`: the beats sent, ever, and
    the seconds between two; None where no one counts them.
    """

    def __init__(
        self,
        host: HostFs,
        paths: Mapping[str, Path],
        clock: Clock,
        background: Background,
        told: Callable[[HealthVerdict], None],
        *,
        beats: Callable[[], tuple[int, float]] | None = None,
        settings: HealthSettings | None = None,
        every_s: float = SAMPLE_EVERY_S,
        read_clock: ReadClock | None = None,
        read_disk: ReadDisk | None = None,
    ) -> None:
        self._host = host
        self._paths = dict(paths)
        self._clock = clock
        self._background = background
        self._told = told
        self._beats = beats
        self._health = Health(settings)
        self._every_s = every_s
        # A recorded machine has no clock to ask.
        self._read_clock = read_clock or (kernel_clock if host.live else lambda: None)
        self._read_disk = read_disk or disk_state
        self._latest: HealthVerdict | None = None
        self._samples: tuple[Sample, ...] = ()
        self._work: asyncio.Task[None] | None = None

    @property
    def latest(self) -> HealthVerdict | None:
        """The newest verdict; None before the first sample."""
        return self._latest

    @property
    def samples(self) -> tuple[Sample, ...]:
        """What was sampled last; none before the first time."""
        return self._samples

    def start(self) -> None:
        """Begin to sample, at once and then every `every_s`."""
        self._work = self._background.spawn(self._watch(), "health")

    async def close(self) -> None:
        """Sample no more. Idempotent."""
        work, self._work = self._work, None
        await stop(work)

    async def look(self) -> HealthVerdict:
        """Sample once, now."""
        samples, not_judged = await asyncio.to_thread(self._read)
        if self._beats is None:
            not_judged += ("heartbeats: nobody counts them",)
        else:
            samples.append(BeatsSent(*self._beats()))
        self._samples = tuple(samples)
        verdict = self._health.take(samples, self._clock.monotonic(), not_judged)
        before, self._latest = self._latest, verdict
        if before is None and not_judged:
            _log.info("Health signals that this machine does not give", lines=list(not_judged))
        if verdict != before:
            self._told(verdict)
        return verdict

    async def _watch(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._every_s)

    def _read(self) -> tuple[list[Sample], tuple[str, ...]]:
        samples: list[Sample] = [self._read_disk(name, path) for name, path in self._paths.items()]
        not_judged = []
        memory = memory_errors(self._host)
        samples += memory
        if not memory:
            not_judged.append("memory errors: the kernel has no EDAC driver for this machine")
        throttled = throttle_counts(self._host)
        samples += throttled
        if not throttled:
            not_judged.append("heat: the kernel counts no thermal throttling on this machine")
        clock = self._read_clock()
        if clock is None:
            not_judged.append("clock: adjtimex is refused")
        else:
            samples.append(clock)
        return samples, tuple(not_judged)


def memory_errors(host: HostFs) -> list[MemoryErrors]:
    """Return the counts of each memory controller that has a driver.

    Format: the kernel's Documentation/admin-guide/ras.rst, `ce_count` and `ue_count`.
    """
    found = []
    for name in host.names(_EDAC):
        if _CONTROLLER.match(name):
            corrected = _number(host, f"{_EDAC}/{name}/ce_count")
            uncorrected = _number(host, f"{_EDAC}/{name}/ue_count")
            if corrected is not None or uncorrected is not None:
                found.append(MemoryErrors(name, corrected, uncorrected))
    return found


def throttle_counts(host: HostFs) -> list[Throttled]:
    """Return the counts of each package whose CPUs count throttling (x86 only).

    Format: the kernel's Documentation/ABI/testing/sysfs-devices-system-cpu, `thermal_throttle`.
    """
    packages: dict[str, dict[str, int]] = {}
    for cpu in host.names(_CPUS):
        if not _CPU.match(cpu):
            continue
        for level in ("core", "package"):
            count = _number(host, f"{_CPUS}/{cpu}/thermal_throttle/{level}_throttle_count")
            if count is not None:
                label = host.attribute(f"{_CPUS}/{cpu}/topology/physical_package_id") or "?"
                packages.setdefault(label.strip(), {})[f"{cpu}/{level}"] = count
    return [Throttled(package, counts) for package, counts in sorted(packages.items())]


def kernel_clock() -> ClockState | None:
    """Return what the kernel's clock discipline says, None if it may not be asked.

    Whoever steers the clock (chronyd, systemd-timesyncd, ntpd, ptp) tells the kernel. Only
    read, `modes` 0, which needs no right. Source: adjtimex(2).
    """
    words = _Timex()
    library = ctypes.CDLL(None, use_errno=True)
    state = library.adjtimex(ctypes.byref(words))
    if state < 0:
        return None
    unit_s = 1e-9 if words.status & _STA_NANO else 1e-6
    return ClockState(
        synchronised=state != _TIME_ERROR and not words.status & _STA_UNSYNC,
        error_s=max(abs(words.offset) * unit_s, words.esterror * 1e-6),
        offset_s=words.offset * unit_s,
    )


def disk_state(name: str, path: Path) -> DiskState:
    """Return how full the file system of `path` is, and whether it is read-only: statvfs(3)."""
    try:
        found = os.statvfs(path)
    except OSError as error:
        return DiskState(name, f"{path}", error=error.strerror or repr(error))
    return DiskState(
        name,
        f"{path}",
        used=max(
            _used(found.f_blocks - found.f_bfree, found.f_bavail),
            _used(found.f_files - found.f_ffree, found.f_favail),
        ),
        read_only=bool(found.f_flag & os.ST_RDONLY),
    )


def _used(used: int, free: int) -> float:
    """Return the share in use of what there is for all but root, as df(1) does."""
    return used / (used + free) if used + free > 0 else 0.0


def _number(host: HostFs, path: str) -> int | None:
    text = (host.attribute(path) or "").strip()
    return int(text) if text.isascii() and text.isdecimal() else None
