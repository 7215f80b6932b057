"""Opens and reads hardware counters by perf_event_open(2). The only caller of that system call."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from dataclasses import dataclass
from typing import Protocol

from agentd.bandwidth.events import Event
from agentd.hostfs import HostFs
from corefleet.errors import Unavailable

HARDWARE_CACHE = 3
"""PERF_TYPE_HW_CACHE of linux/perf_event.h."""

_SYSCALLS = {
    "x86_64": 298,
    "aarch64": 241,
    "riscv64": 241,
    "loongarch64": 241,
    "ppc64le": 319,
    "s390x": 331,
}
_ATTRIBUTES = struct.Struct("=IIQQQQQIIQQ")
"""perf_event_attr up to config2 (PERF_ATTR_SIZE_VER1, 72 bytes): type, size, config,
sample_period, sample_type, read_format, flags, wakeup_events, bp_type, config1, config2."""
_READ = struct.Struct("=QQQ")
_TIMES = 1 | 2
"""PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING."""
_PID_CGROUP = 4
_CLOSE_ON_EXEC = 8
_CAP_SYS_ADMIN = 21
_CAP_PERFMON = 38


@dataclass(slots=True, frozen=True)
class Reading:
    """A counter's value, and the nanoseconds it was wanted and was really counting."""

    value: int
    enabled_ns: int
    running_ns: int


class Counters(Protocol):
    """Counters of the running machine. A handle is open until `close`."""

    def open(self, event: Event, cpu: int, group: str | None = None) -> int:
        """Count `event` on a CPU from now on: of all tasks, or of a control group's.

        `group` is a directory such as `sys/fs/cgroup/x.slice`. Raises Unavailable with
        the reason.
        """
        ...

    def read(self, handle: int) -> Reading:
        """Raises Unavailable if the counter is gone, e.g. with its CPU."""
        ...

    def close(self, handle: int) -> None: ...


class Counter:
    """One open counter that tells what it counted since it was asked last."""

    def __init__(
        self, counters: Counters, event: Event, cpu: int, group: str | None = None
    ) -> None:
        self._counters = counters
        self._handle = counters.open(event, cpu, group)
        try:
            self._before = counters.read(self._handle)
        except Unavailable:
            counters.close(self._handle)
            raise

    def delta(self) -> float | None:
        """Return the count; None if it never ran while others had its place.

        A counter that shares its place is scaled by enabled over running time, as perf
        does (perf_event_open(2), PERF_FORMAT_TOTAL_TIME_RUNNING).
        """
        now, before = self._counters.read(self._handle), self._before
        self._before = now
        value = now.value - before.value
        enabled = now.enabled_ns - before.enabled_ns
        running = now.running_ns - before.running_ns
        if value < 0 or (running <= 0 < enabled):
            return None
        return value * (enabled / running) if running > 0 else float(value)

    def close(self) -> None:
        self._counters.close(self._handle)


class PerfCounters:
    """The kernel's own."""

    def __init__(self, host: HostFs) -> None:
        self._host = host
        self._number = _SYSCALLS.get(host.machine)
        self._library = ctypes.CDLL(None, use_errno=True)

    def open(self, event: Event, cpu: int, group: str | None = None) -> int:
        if not self._host.live:
            raise Unavailable("a recorded machine has no counters")
        if self._number is None:
            raise Unavailable(f"perf_event_open's number on {self._host.machine} is not known")
        attributes = ctypes.create_string_buffer(
            _ATTRIBUTES.pack(
                event.kind, _ATTRIBUTES.size, event.config, 0, 0, _TIMES, 0, 0, 0,
                event.config1, event.config2,
            )
        )  # fmt: skip
        where = -1
        flags = _CLOSE_ON_EXEC
        if group is not None:
            where = self._group(group)
            flags |= _PID_CGROUP
        try:
            handle = self._library.syscall(
                ctypes.c_long(self._number),
                ctypes.byref(attributes),
                ctypes.c_int(where),
                ctypes.c_int(cpu),
                ctypes.c_int(-1),
                ctypes.c_ulong(flags),
            )
            number = ctypes.get_errno()
        finally:
            if where >= 0:
                os.close(where)
        if handle < 0:
            raise Unavailable(self._refusal(event, cpu, number))
        return int(handle)

    def read(self, handle: int) -> Reading:
        try:
            data = os.read(handle, _READ.size)
        except OSError as error:
            raise Unavailable(f"a counter cannot be read: {error.strerror}") from error
        if len(data) < _READ.size:
            # End of file: the kernel took the counter out, e.g. its CPU went offline.
            raise Unavailable("a counter is gone")
        return Reading(*_READ.unpack(data))

    def close(self, handle: int) -> None:
        os.close(handle)

    def _group(self, group: str) -> int:
        try:
            return os.open(self._host.root / group, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise Unavailable(f"control group {group}: {error.strerror}") from error

    def _refusal(self, event: Event, cpu: int, number: int) -> str:
        """Return the kernel's refusal with what would change it."""
        said = f"{event.name} on CPU {cpu}: {errno.errorcode.get(number, number)}"
        match number:
            case errno.EACCES | errno.EPERM:
                level = (self._host.read("proc/sys/kernel/perf_event_paranoid") or "?").strip()
                held = "with" if self._may_perfmon() else "without"
                return f"{said}: not allowed, {held} CAP_PERFMON, perf_event_paranoid is {level}"
            case errno.ENOENT | errno.EOPNOTSUPP | errno.ENODEV:
                return f"{said}: this CPU does not count it, or a hypervisor hides it"
            case errno.EMFILE:
                return f"{said}: too many open files; raise LimitNOFILE"
            case errno.ENOSYS:
                return f"{said}: the kernel has no perf events, or a seccomp filter hides them"
            case _:
                return f"{said}: {os.strerror(number)}"

    def _may_perfmon(self) -> bool:
        try:
            held = int(self._host.status_field("self", "CapEff") or "0", 16)
        except ValueError:
            return False
        return bool(held >> _CAP_PERFMON & 1 or held >> _CAP_SYS_ADMIN & 1)
