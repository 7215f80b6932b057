"""What our own cpuset (cgroup v1 or v2) and affinity leave us."""

from __future__ import annotations

from pathlib import PurePosixPath

from agentd.core.topology import Facts
from agentd.hostfs import HostFs
from agentd.probes.lists import list_in, read_list

_V1_MOUNTS = ("sys/fs/cgroup/cpuset", "sys/fs/cgroup/cpuset,cpu,cpuacct")
_V2_MOUNTS = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
_V1_FILES = {
    "cpus": ("cpuset.effective_cpus", "cpuset.cpus"),
    "mems": ("cpuset.effective_mems", "cpuset.mems"),
}
_V2_FILES = {"cpus": ("cpuset.cpus.effective",), "mems": ("cpuset.mems.effective",)}


def probe(host: HostFs, facts: Facts) -> None:
    """Fill `allowed_cpus` and `allowed_nodes`."""
    facts.allowed_cpus = _both(_status(host, "Cpus", facts), _cpuset(host, "cpus", facts))
    facts.allowed_nodes = _both(_status(host, "Mems", facts), _cpuset(host, "mems", facts))


def _status(host: HostFs, what: str, facts: Facts) -> tuple[int, ...] | None:
    """The kernel's answer for this process: cpuset and affinity together."""
    name = f"{what}_allowed_list"
    text = host.status_field("self", name)
    return list_in(text, f"proc/self/status {name}", facts) or None if text else None


def _cpuset(host: HostFs, what: str, facts: Facts) -> tuple[int, ...] | None:
    for line in (host.read("proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "cpuset" in controllers.split(","):
            found = _nearest(host, _V1_MOUNTS, path, _V1_FILES[what], facts)
        elif not controllers:
            found = _nearest(host, _V2_MOUNTS, path, _V2_FILES[what], facts)
        else:
            continue
        if found:
            return found
    return None


def _nearest(
    host: HostFs, mounts: tuple[str, ...], path: str, names: tuple[str, ...], facts: Facts
) -> tuple[int, ...] | None:
    """Look in our group, then in those above: not each has the controller.

    In a container the path may be that of the host; then only the mount's root is there.
    """
    group = PurePosixPath("/", path)
    for mount in mounts:
        for level in (group, *group.parents):
            for name in names:
                found = read_list(host, f"{mount}{str(level).rstrip('/')}/{name}", facts)
                if found:
                    return found
    return None


def _both(first: tuple[int, ...] | None, second: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if first is None or second is None:
        return first if second is None else second
    common = tuple(sorted(set(first) & set(second)))
    return common or first
