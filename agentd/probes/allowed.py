"""What our own cpuset (cgroup v1 or v2) and affinity leave us, and which cgroups there are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Literal

from agentd.core.fold import Facts
from agentd.core.topology import ControlGroups
from agentd.hostfs import HostFs
from agentd.probes.lists import list_in
from agentd.probes.mounts import mounts_of

FLEET_SLICE = "corefleet.slice"

_Kind = Literal["v1", "v2", "cpuset"]
_FILES: dict[_Kind, dict[str, tuple[str, ...]]] = {
    "v1": {
        "cpus": ("cpuset.effective_cpus", "cpuset.cpus"),
        "mems": ("cpuset.effective_mems", "cpuset.mems"),
    },
    "v2": {"cpus": ("cpuset.cpus.effective",), "mems": ("cpuset.mems.effective",)},
    "cpuset": {"cpus": ("effective_cpus", "cpus"), "mems": ("effective_mems", "mems")},
}
_USUAL_MOUNTS: tuple[tuple[_Kind, str], ...] = (
    ("v1", "sys/fs/cgroup/cpuset"),
    ("v1", "sys/fs/cgroup/cpuset,cpu,cpuacct"),
    ("v2", "sys/fs/cgroup"),
    ("v2", "sys/fs/cgroup/unified"),
)
"""Where they are when nothing lists the mounts."""


@dataclass(slots=True, frozen=True)
class _Hierarchy:
    kind: _Kind
    mount: str
    path: str
    """Our group below it, with a leading slash."""


def probe(host: HostFs, facts: Facts) -> None:
    """Fill `cgroups`, `allowed_cpus` and `allowed_nodes`. Needs `systemd`."""
    hierarchies = _hierarchies(host)
    facts.cgroups = _cgroups(host, facts, hierarchies)
    of_fleet = [_of_fleet(host, each, facts.systemd) for each in hierarchies]
    # The kernel's answer for this process is about our own group, not about the fleet's.
    own = of_fleet == hierarchies
    limits: dict[str, str] = {}
    for what in ("cpus", "mems"):
        by_status = _status(host, what.capitalize(), facts) if own else None
        allowed = _both(by_status, _cpuset(host, of_fleet, what, facts, limits))
        if what == "cpus":
            facts.allowed_cpus = allowed
        else:
            facts.allowed_nodes = allowed
    facts.cgroups = replace(facts.cgroups, limits=MappingProxyType(limits))


def fleet_group(own: str, systemd: bool, slice_there: bool) -> str:
    """Return the group whose cpuset bounds the fleet: the parent of corefleet.slice.

    Not our own: `confine_system` puts agentd on the system's CPUs, and each restart would
    plan the fleet into them. Without systemd there is only our own.
    """
    parts = PurePosixPath("/", own).parts
    if FLEET_SLICE in parts:
        return str(PurePosixPath(*parts[: parts.index(FLEET_SLICE)]))
    if systemd and (slice_there or parts[1:2] == ("system.slice",)):
        return "/"
    return str(PurePosixPath(*parts))


def _of_fleet(host: HostFs, own: _Hierarchy, systemd: bool) -> _Hierarchy:
    there = systemd and host.exists(f"{own.mount}/{FLEET_SLICE}")
    return replace(own, path=fleet_group(own.path, systemd, there))


def _hierarchies(host: HostFs) -> list[_Hierarchy]:
    """Return the hierarchies that may hold our cpuset, the most telling first."""
    v1 = v2 = ""
    for line in (host.read("proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "cpuset" in controllers.split(","):
            v1 = path
        elif not controllers:
            v2 = path
    fallback = (host.read("proc/self/cpuset") or "").strip()
    found = []
    for kind, mount in _mounts(host):
        path = (v2 if kind == "v2" else v1) or fallback
        if path:
            normal = str(PurePosixPath("/", path))
            found.append(_Hierarchy(kind, mount, "/" + normal.strip("/")))
    return found


def _mounts(host: HostFs) -> list[tuple[_Kind, str]]:
    found: list[tuple[_Kind, str]] = []
    for mount in mounts_of(host):
        if mount.kind == "cpuset" or (mount.kind == "cgroup" and "noprefix" in mount.options):
            found.append(("cpuset", mount.at))
        elif mount.kind == "cgroup" and "cpuset" in mount.options:
            found.append(("v1", mount.at))
        elif mount.kind == "cgroup2":
            found.append(("v2", mount.at))
    return sorted(found, key=lambda each: each[0] == "v2") if found else list(_USUAL_MOUNTS)


def _status(host: HostFs, what: str, facts: Facts) -> tuple[int, ...] | None:
    """The kernel's answer for this process: cpuset and affinity together."""
    name = f"{what}_allowed_list"
    text = host.status_field("self", name)
    return list_in(text, f"proc/self/status {name}", facts) or None if text else None


def _cpuset(
    host: HostFs, hierarchies: list[_Hierarchy], what: str, facts: Facts, limits: dict[str, str]
) -> tuple[int, ...] | None:
    """Look in the group, then in those above: not each has the controller.

    In a container the path may be that of the host; then only the mount's root is there.
    """
    for each in hierarchies:
        group = PurePosixPath(each.path)
        for level in (group, *group.parents):
            for name in _FILES[each.kind][what]:
                path = f"{each.mount}{str(level).rstrip('/')}/{name}"
                text = host.attribute(path)
                numbers = list_in(text, path, facts) if text else None
                if text and numbers:
                    # The oldest cpusets have no prefix; everybody else's names do.
                    limits[f"cpuset.{name.removeprefix('cpuset.')}"] = text.strip()
                    return numbers
    return None


def _both(first: tuple[int, ...] | None, second: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if first is None or second is None:
        return first if second is None else second
    common = tuple(sorted(set(first) & set(second)))
    return common or first


def _cgroups(host: HostFs, facts: Facts, hierarchies: list[_Hierarchy]) -> ControlGroups:
    mounts = mounts_of(host)
    legacy = any(mount.kind in {"cgroup", "cpuset"} for mount in mounts)
    unified = [mount.at for mount in mounts if mount.kind == "cgroup2"]
    own_v2 = next((each for each in hierarchies if each.kind == "v2"), None)
    held = next((each for each in hierarchies if _holds_cpuset(host, each)), None)
    shown = held or own_v2 or next(iter(hierarchies), None)
    group = f"{own_v2.mount}{own_v2.path.rstrip('/')}" if own_v2 else ""
    listed = host.attribute(f"{group or next(iter(unified), '')}/cgroup.controllers") or ""
    return ControlGroups(
        version=1 if legacy else 2 if unified else 0,
        hybrid=legacy and bool(unified),
        writable=bool(own_v2 and unified)
        and host.writable(group)
        and host.writable(f"{group}/cgroup.procs")
        and (not facts.systemd or host.delegated(group)),
        controllers=tuple(listed.split()),
        own=shown.path if shown else "",
        kind=shown.kind if shown and mounts else "",
        mount=shown.mount if shown and mounts else "",
    )


def _holds_cpuset(host: HostFs, each: _Hierarchy) -> bool:
    group = PurePosixPath(each.path)
    return any(
        host.exists(f"{each.mount}{str(level).rstrip('/')}/{name}")
        for level in (group, *group.parents)
        for name in _FILES[each.kind]["cpus"]
    )
