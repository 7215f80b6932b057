"""What is taken out of the kernel's text before it is stored: names, serials, noise. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

KEPT_COMMAND_LINE = frozenset(
    {
        "isolcpus", "nohz_full", "numa", "numa_balancing", "maxcpus", "nr_cpus", "nosmt",
        "hugepages", "hugepagesz", "default_hugepagesz", "arm64.mpam", "rdt", "mpam", "psi",
        "systemd.unified_cgroup_hierarchy", "cgroup_no_v1", "cgroup_disable", "mitigations",
        "transparent_hugepage",
    }
)  # fmt: skip
"""Keys of the kernel's command line that a capture keeps; all others are left out."""

LONGEST_CPUINFO_BYTES = 1 << 20
"""As much of it as HostFs reads."""

_KEPT_STATUS = ("Cpus_allowed", "Cpus_allowed_list", "Mems_allowed", "Mems_allowed_list")
_KEPT_MOUNTS = frozenset({"cgroup", "cgroup2", "cpuset", "resctrl"})
_MOUNT_POINT = re.compile(r"/(sys/fs|cgroup|dev/cpuset)\b[\w/,=-]*\Z")
_KEPT_MOUNT_OPTIONS = frozenset(
    {
        "rw", "ro", "cpu", "cpuset", "cpuacct", "memory", "cpus", "mems", "noprefix", "nsdelegate",
        "mba_MBps", "cdp", "cdpl2", "debug", "memory_recursiveprot", "blkio", "pids", "devices",
        "freezer", "hugetlb", "perf_event", "net_cls", "net_prio",
    }
)  # fmt: skip
_KEPT_FILE_SYSTEMS = frozenset({"cgroup", "cgroup2", "cpuset", "resctrl", "hugetlbfs", "tmpfs"})

_SECRET_KEY = re.compile(r"serial|uuid|ppin|asset", re.IGNORECASE)
_S390_IDENTIFICATION = re.compile(r"(identification\s*[=:]\s*)[0-9A-Fa-f]+")
# They differ from one reading to the next, or nobody needs them.
_NOISE_KEYS = frozenset(
    {
        "cpu MHz", "cpu MHz static", "cpu MHz dynamic", "bogomips", "BogoMIPS",
        "power management", "TLB size", "clflush size", "cache_alignment", "address sizes", "wp",
        "fpu", "fpu_exception", "cpuid level", "initial apicid",
    }
)  # fmt: skip
_LONG_VALUE = 64

# What systemd and the container engines call their groups on every machine.
_KNOWN_GROUP = re.compile(
    r"(system|user|machine|init|kubepods|kubepods-burstable|kubepods-besteffort|corefleet"
    r"|corefleet-[a-z]+|corefleet-[a-z]+-d\d+|app|session|background)\.(slice|scope)\Z"
    r"|(corefleet-heartbeat|agentd)\.service\Z"
    r"|(docker|kubepods|burstable|besteffort|lxc|garden|init|unified)\Z"
)
_SUFFIX = re.compile(r"\.(slice|scope|service|mount|socket)\Z")


class GroupNames:
    """Neutral names for control groups; the same group always gets the same one."""

    def __init__(self) -> None:
        self._given: dict[str, str] = {}

    def path(self, path: str) -> str:
        """Return a group's path with all names replaced that are not the same everywhere."""
        return "/".join(self.name(part) for part in path.split("/"))

    def name(self, part: str) -> str:
        """Return the neutral name of one group."""
        if not part or part == ".." or _KNOWN_GROUP.match(part):
            return part
        suffix = _SUFFIX.search(part)
        return self._given.setdefault(
            part, f"group{len(self._given) + 1}{suffix.group() if suffix else ''}"
        )


def stripped(path: str, text: str, names: GroupNames) -> str:
    """Return `text`, read from `path`, without what could tell whose machine it is."""
    if path == "proc/self/cgroup":
        return _lines(text, lambda line: _own_group(line, names))
    if path == "proc/self/cpuset":
        return names.path(text.strip()) + "\n"
    strip = _STRIPS.get(path)
    return strip(text) if strip else text


def _lines(text: str, change: Callable[[str], str | None]) -> str:
    kept = [new for line in text.splitlines() if (new := change(line)) is not None]
    return "".join(f"{line}\n" for line in kept)


def _own_group(line: str, names: GroupNames) -> str | None:
    if line.count(":") < 2:
        return None
    number, controllers, path = line.split(":", 2)
    return f"{number}:{controllers}:{names.path(path.removesuffix(' (deleted)'))}"


def _cpuinfo(text: str) -> str:
    short = _S390_IDENTIFICATION.sub(lambda match: f"{match[1]}000000", text)
    short = _lines(short, _cpuinfo_line)
    if len(short) > LONGEST_CPUINFO_BYTES // 4:
        short = _said_once(short)
    if len(short) > LONGEST_CPUINFO_BYTES:
        short = short[:LONGEST_CPUINFO_BYTES].rpartition("\n\n")[0] + "\n\n"
    return short


def _cpuinfo_line(line: str) -> str | None:
    key = line.partition(":")[0].strip()
    return None if key in _NOISE_KEYS or _SECRET_KEY.search(key) else line


def _said_once(text: str) -> str:
    """Leave out a long value (flags) where it repeats: what all CPUs have stays the same."""
    last: dict[str, str] = {}

    def change(line: str) -> str | None:
        key, _, value = line.partition(":")
        if len(value) <= _LONG_VALUE:
            return line
        if last.get(key) == value:
            return None
        last[key] = value
        return line

    return _lines(text, change)


def _cmdline(text: str) -> str:
    kept = [word for word in text.split() if word.partition("=")[0] in KEPT_COMMAND_LINE]
    return " ".join(kept) + "\n"


def _mounts(text: str) -> str:
    def change(line: str) -> str | None:
        words = line.split(" ")
        if len(words) < 4 or words[2] not in _KEPT_MOUNTS or not _MOUNT_POINT.match(words[1]):
            return None
        options = [option for option in words[3].split(",") if option in _KEPT_MOUNT_OPTIONS]
        if "name=systemd" in words[3].split(","):
            options.append("name=systemd")
        return f"{words[2]} {words[1]} {words[2]} {','.join(options)} 0 0"

    return _lines(text, change)


def _version(text: str) -> str:
    """The numbers alone: what follows them is often the builder's or the owner's name."""
    match = re.match(r"Linux version (\d+\.\d+(?:\.\d+)?)", text)
    return f"Linux version {match[1]}\n" if match else ""


def _smaps(text: str) -> str:
    """The page size alone; the rest is where our own files are mapped."""
    match = re.search(r"^KernelPageSize:\s+\d+ kB$", text, re.MULTILINE)
    return f"{match[0]}\n" if match else ""


def _status(text: str) -> str:
    return _lines(text, lambda line: line if line.partition(":")[0] in _KEPT_STATUS else None)


def _stat(text: str) -> str:
    return _lines(text, lambda line: line if line.startswith("cpu") else None)


def _file_systems(text: str) -> str:
    return _lines(text, lambda line: line if line.split()[-1:] and line.split()[-1] in
                  _KEPT_FILE_SYSTEMS else None)  # fmt: skip


_STRIPS: Mapping[str, Callable[[str], str]] = {
    "proc/cpuinfo": _cpuinfo,
    "proc/cmdline": _cmdline,
    "proc/mounts": _mounts,
    "proc/self/mounts": _mounts,
    "proc/version": _version,
    "proc/self/status": _status,
    "proc/self/smaps": _smaps,
    "proc/stat": _stat,
    "proc/filesystems": _file_systems,
}
