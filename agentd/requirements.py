"""What `require` of agentd.toml asks for, and whether this machine and launcher give it."""

from __future__ import annotations

from collections.abc import Iterable

from agentd.core.topology import Topology

NUMA_BINDING = "numa-binding"
"""The older name of `numa`."""
REQUIREMENTS = ("numa", "cgroup", "bandwidth", "systemd", NUMA_BINDING)

_UNBOUND = "memory is not bound"
"""How the lines of all launchers begin that cannot bind memory."""
_CONTROLS = ("resctrl", "software")
_BOOT_CGROUPS = "boot with systemd.unified_cgroup_hierarchy=1"


def wants_numa(requirements: Iterable[str]) -> bool:
    """Whether memory must be bound, by either of the requirement's names."""
    return not {"numa", NUMA_BINDING}.isdisjoint(requirements)


def unmet(
    requirements: Iterable[str],
    topology: Topology,
    launcher_outlives: bool,
    unisolated: tuple[str, ...],
    bandwidth_control: str,
) -> tuple[str, ...]:
    """Return one line for each requirement that is not met, saying what would meet it.

    `unisolated` are the launcher's lines. `bandwidth_control`: `resctrl` or `software` (the
    regulator acts on a sensor), anything else is no control, e.g. `static`.
    """
    lines = []
    for name in dict.fromkeys(requirements):
        missing = ""
        match name:
            case "numa" | "numa-binding":
                missing = _numa(topology, unisolated)
            case "cgroup":
                missing = _cgroup(topology, launcher_outlives, unisolated)
            case "bandwidth":
                missing = _bandwidth(launcher_outlives, bandwidth_control)
            case "systemd":
                missing = _systemd(topology, launcher_outlives)
            case _:
                missing = f"not known; expected some of: {', '.join(REQUIREMENTS)}"
        if missing:
            lines.append(f"`require` has {name}, but {missing}")
    return tuple(lines)


def _numa(topology: Topology, unisolated: tuple[str, ...]) -> str:
    if not topology.numa:
        return (
            "the kernel shows no NUMA nodes: boot one with CONFIG_NUMA and without `numa=off`, "
            "and where this is a container, show it /sys"
        )
    unbound = next((line for line in unisolated if line.startswith(_UNBOUND)), "")
    return (
        f"{unbound}: allow mbind and set_mempolicy (CAP_SYS_NICE in containers)" if unbound else ""
    )


def _cgroup(topology: Topology, launcher_outlives: bool, unisolated: tuple[str, ...]) -> str:
    groups = topology.cgroups
    if groups.version != 2:
        found = "cgroup v1 and v2 mixed" if groups.hybrid else f"cgroup v{groups.version}"
        return f"this machine has {found if groups.version else 'no cgroups'}: {_BOOT_CGROUPS}"
    if not launcher_outlives:
        return "the plain launcher sets no limits: set `launcher` to 'systemd'"
    lost = [line for line in unisolated if not line.startswith(_UNBOUND)]
    return (
        f"systemd does not set all of them: {'; '.join(lost)}: use a newer systemd" if lost else ""
    )


def _bandwidth(launcher_outlives: bool, bandwidth_control: str) -> str:
    if bandwidth_control in _CONTROLS:
        return ""
    found = f"memory bandwidth is {bandwidth_control or 'not controlled'}"
    if not launcher_outlives:
        return (
            f"{found}: the plain launcher cannot slow a class down; set `launcher` to 'systemd', "
            "or mount resctrl on a CPU with MBA or MPAM"
        )
    return (
        f"{found}: mount resctrl (`mount -t resctrl resctrl` on its directory in sysfs), or "
        "give agentd CAP_PERFMON so that it can read the memory controllers' counters"
    )


def _systemd(topology: Topology, launcher_outlives: bool) -> str:
    if launcher_outlives:
        return ""
    if not topology.systemd:
        return "systemd does not run this machine: boot with it, version 249 or newer"
    return "processes are not started by it: set `launcher` to 'systemd' and run as root"
