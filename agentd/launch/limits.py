"""Whether a process's control group limits it as asked, read from the kernel."""

from __future__ import annotations

from agentd.core.cpulist import format_list, parse_list
from agentd.hostfs import HostFs
from agentd.launch.protocol import LaunchSpec
from corefleet.errors import InvalidInput

_MOUNT = "sys/fs/cgroup"
# Limits are rounded to pages, of 64 KiB at most.
_ROUNDING_BYTES = 1 << 16
_QUOTA_TOLERANCE = 0.02
_US = 1e6
# A large process takes its time to die of a kill.
_UNCLAIMED_S = 5.0


def group_of(host: HostFs, pid: int) -> str | None:
    """Return the cgroup v2 of a process below the mount, None if it has ended or has none."""
    for line in (host.read(f"proc/{pid}/cgroup") or "").splitlines():
        if line.startswith("0::/"):
            return line.removeprefix("0::/")
    return None


def wrong_limits(host: HostFs, group: str, spec: LaunchSpec, memory: bool) -> str | None:
    """Return what is wrong with the limits of `group`, None if nothing is.

    `memory` says whether its memory must lie in the spec's domain. A limit whose controller
    is not there cannot be verified, and is wrong if it was asked for.
    """
    wrong = _wrong_list(host, f"{group}/cpuset.cpus.effective", spec.cpus)
    if wrong is None and memory:
        wrong = _wrong_list(host, f"{group}/cpuset.mems.effective", spec.nodes)
    for name, asked, rounding in (
        ("memory.high", spec.memory_high, _ROUNDING_BYTES),
        ("memory.max", spec.memory_max, _ROUNDING_BYTES),
        ("pids.max", spec.tasks_max, 0),
    ):
        wrong = wrong or _wrong_limit(host, f"{group}/{name}", asked, rounding)
    return wrong


def at_high(host: HostFs, group: str, spec: LaunchSpec) -> bool:
    """Return whether the memory of `group` has reached the spec's `memory_high`."""
    used = (host.read(f"{_MOUNT}/{group}/memory.current") or "").strip()
    return (
        bool(spec.memory_high)
        and used.isdecimal()
        and (int(used) + _ROUNDING_BYTES >= spec.memory_high)
    )


def wrong_quota(host: HostFs, group: str, cpus: float | None) -> str | None:
    """Return what is wrong with the CPU quota of `group`; `cpus` None: there must be none.

    cpu.max holds `<quota> <period>` in microseconds, or `max` for the quota.
    """
    text = (host.read(f"{_MOUNT}/{group}/cpu.max") or "").strip()
    expected = "max" if cpus is None else f"{cpus:g} CPUs"
    quota, _, period = text.partition(" ")
    if quota == "max" or not text:
        return None if cpus is None else f"{group}/cpu.max is {text!r}; expected {expected}"
    try:
        found = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return f"{group}/cpu.max is {text!r}; expected {expected}"
    if cpus is not None and abs(found - cpus) <= max(_QUOTA_TOLERANCE * cpus, 1 / _US):
        return None
    return f"{group}/cpu.max is {text!r}; expected {expected}"


class OomKills:
    """The kernel's kills for memory in some control groups, each told of once.

    A unit's own group goes with it, but its slice's memory.events counts on.
    """

    def __init__(self, host: HostFs) -> None:
        self._host = host
        self._seen: dict[str, int] = {}
        self._looked: dict[str, tuple[float, int]] = {}

    def begin(self, group: str) -> None:
        """Count from now on, if not yet counted."""
        self._seen.setdefault(group, _oom_kills(self._host, group))

    def take(self, group: str) -> bool:
        """Whether a kill in `group` was not told of yet; now it is."""
        seen = self._seen.get(group, 0)
        if _oom_kills(self._host, group) <= seen:
            return False
        self._seen[group] = seen + 1
        return True

    def settle(self, group: str, now: float) -> None:
        """Forget kills that nobody asked for in a while: of children that a unit outlived.

        To be called now and then; `now` is any steady clock, in seconds.
        """
        looked, count = self._looked.get(group, (now, self._seen.get(group, 0)))
        if group in self._looked and now - looked < _UNCLAIMED_S:
            return
        self._seen[group] = max(self._seen.get(group, 0), count)
        self._looked[group] = (now, _oom_kills(self._host, group))


def _wrong_list(host: HostFs, path: str, asked: tuple[int, ...]) -> str | None:
    text = host.read(f"{_MOUNT}/{path}")
    if text is None:
        return f"{path} cannot be read"
    try:
        found = parse_list(text, path)
    except InvalidInput as error:
        return str(error)
    if found == tuple(sorted(asked)):
        return None
    return f"{path} is {text.strip()!r}; expected {format_list(asked)}"


def _wrong_limit(host: HostFs, path: str, asked: int, rounding: int) -> str | None:
    text = (host.read(f"{_MOUNT}/{path}") or "").strip()
    if not asked:
        return None if text in ("max", "") else f"{path} is {text}; expected max"
    if text.isdecimal() and abs(int(text) - asked) <= rounding:
        return None
    return f"{path} is {text!r}; expected {asked}"


def _oom_kills(host: HostFs, group: str) -> int:
    """Return how many processes of `group` and below the kernel killed for memory."""
    for line in (host.read(f"{_MOUNT}/{group}/memory.events") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdecimal():
            return int(value)
    return 0
