"""What changes from one moment to the next, word for word: for reports, never for plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from agentd.core.cpu_times import parse_stat
from agentd.hostfs import HostFs
from agentd.probes.mounts import mounts_of
from agentd.probes.resctrl import BASE as RESCTRL
from agentd.probes.resctrl import values_by_domain

_GROUP_FILES = (
    "cpuset.cpus.effective",
    "cpuset.mems.effective",
    "cgroup.subtree_control",
    "cpu.max",
    "cpu.pressure",
    "memory.current",
    "memory.high",
    "memory.max",
)
_MOST_GROUPS = 1000
_NOT_GROUPS = frozenset({"info", "mon_data", "mon_groups"})

Tree = Mapping[str, object]
"""JSON: texts, lists of texts, and trees by name."""


def _nothing() -> Tree:
    return MappingProxyType({})


@dataclass(slots=True, frozen=True)
class Readings:
    """A moment of a machine; what is absent there is absent here."""

    cpu_times: Mapping[int, Mapping[str, int]] = field(default_factory=lambda: MappingProxyType({}))
    """Milliseconds by CPU and column of /proc/stat."""
    pressure: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """The lines of each of /proc/pressure that can be read."""
    cgroups: Tree = field(default_factory=_nothing)
    """By path below the cgroup v2 mount, `.` being the root: at most 1000 groups."""
    resctrl: Tree = field(default_factory=_nothing)


def read_readings(host: HostFs) -> Readings:
    """Return the moment. Blocking: some files for each control group."""
    return Readings(
        cpu_times=parse_stat(host.read("proc/stat") or ""),
        pressure={
            name: tuple(text.strip().splitlines())
            for name in host.names("proc/pressure")
            if (text := host.attribute(f"proc/pressure/{name}"))
        },
        cgroups=_cgroups(host),
        resctrl=_resctrl(host),
    )


def _cgroups(host: HostFs) -> dict[str, Tree]:
    mount = next((mount.at for mount in mounts_of(host) if mount.kind == "cgroup2"), None)
    if mount is None:
        return {}
    found: dict[str, Tree] = {}
    waiting = ["."]
    while waiting and len(found) < _MOST_GROUPS:
        path = waiting.pop(0)
        base = mount if path == "." else f"{mount}/{path}"
        found[path] = _group(host, base)
        waiting += [name if path == "." else f"{path}/{name}" for name in host.directories(base)]
    return found


def _group(host: HostFs, base: str) -> Tree:
    group: dict[str, object] = _texts(host, base, _GROUP_FILES)
    times = (line.split() for line in (host.attribute(f"{base}/cpu.stat") or "").splitlines())
    stat = {pair[0]: pair[1] for pair in times if len(pair) == 2}
    return {**group, "cpu.stat": stat} if stat else group


def _resctrl(host: HostFs) -> Tree:
    info: dict[str, object] = {
        name: _texts(host, f"{RESCTRL}/info/{name}", host.names(f"{RESCTRL}/info/{name}"))
        for name in host.directories(f"{RESCTRL}/info")
    }
    if not info:
        return {}
    info |= _texts(host, f"{RESCTRL}/info", ("last_cmd_status",))
    found: dict[str, object] = {
        "info": info,
        "root": _resctrl_group(host, RESCTRL),
        "groups": {
            name: _resctrl_group(host, f"{RESCTRL}/{name}")
            for name in host.directories(RESCTRL)
            if name not in _NOT_GROUPS
        },
        "mon_domains": host.names(f"{RESCTRL}/mon_data"),
        "mon_groups": host.directories(f"{RESCTRL}/mon_groups"),
    }
    return {name: value for name, value in found.items() if value or name == "groups"}


def _resctrl_group(host: HostFs, base: str) -> Tree:
    group: dict[str, object] = _texts(host, base, ("cpus_list", "mode"))
    group["schemata_parsed"] = values_by_domain(host.attribute(f"{base}/schemata") or "")
    monitors = host.directories(f"{base}/mon_groups")
    return {**group, "mon_groups": monitors} if monitors else group


def _texts(host: HostFs, base: str, names: tuple[str, ...] | list[str]) -> dict[str, object]:
    return {
        name: text.strip()
        for name in names
        if (text := host.attribute(f"{base}/{name}")) is not None
    }
