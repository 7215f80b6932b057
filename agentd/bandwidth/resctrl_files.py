"""The files of resctrl, and what a machine can do with them. Blocking; nothing is changed here."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Final

from agentd.bandwidth.resctrl_layout import covered_domains
from agentd.core.schemata import (
    BANDWIDTH_NAMES,
    BandwidthControl,
    Line,
    Schemata,
    bandwidth_control,
    parse_schemata,
)
from agentd.core.topology import Topology
from agentd.hostfs import HostFs
from corefleet.errors import Incompatible

ROOT: Final = "sys/fs/resctrl"
NOT_MOUNTED: Final = "not mounted; run: mount -t resctrl resctrl /sys/fs/resctrl"
PREFIX: Final = "corefleet-"
"""Begins the names of our groups; all others are somebody else's and are never touched."""

_NO_GROUPS = frozenset({"info", "mon_data", "mon_groups"})
_NOTHING_SAID = frozenset({"", "ok"})
# Refused before resctrl saw the command: its words are about an earlier one.
_NOT_RESCTRLS = frozenset({errno.EACCES, errno.EROFS, errno.ENOENT})


class ResctrlFiles:
    """The resctrl file system of a host. Groups are named, '' is the root group."""

    def __init__(self, host: HostFs) -> None:
        self.host = host

    @property
    def in_kernel(self) -> bool:
        """Whether the kernel offers resctrl; it makes the mount point itself."""
        return "resctrl" in self.host.names("sys/fs")

    @property
    def mounted(self) -> bool:
        return "schemata" in self.host.names(ROOT)

    def resources(self) -> tuple[str, ...]:
        """Return what can be controlled, e.g. `L3`, `MB`."""
        return tuple(
            name
            for name in self.host.names(f"{ROOT}/info")
            if name != "last_cmd_status" and not name.endswith("_MON")
        )

    def groups(self) -> tuple[str, ...]:
        """Return the names of all control groups but the root, ours and others'."""
        return tuple(
            name
            for name in self.host.names(ROOT)
            if name not in _NO_GROUPS and "tasks" in self.host.names(f"{ROOT}/{name}")
        )

    def info(self, resource: str) -> dict[str, str]:
        """Return the files of `info/<resource>`, name to text."""
        folder = f"{ROOT}/info/{resource}"
        texts = {name: self.host.read(f"{folder}/{name}") for name in self.host.names(folder)}
        return {name: text for name, text in texts.items() if text is not None}

    def schemata(self, group: str) -> Schemata | None:
        """Return a group's schemata, None if the group is gone."""
        text = self.host.read(self.path(group, "schemata"))
        return None if text is None else parse_schemata(text)

    def bandwidth_lines(self) -> list[Line]:
        """Return the MB lines of the root group and then of all others."""
        found = (self.schemata(group) for group in ("", *self.groups()))
        lines = (schemata.bandwidth() for schemata in found if schemata is not None)
        return [line for line in lines if line is not None]

    def mount_options(self) -> tuple[str, ...]:
        for row in (self.host.read("proc/mounts") or "").splitlines():
            parts = row.split()
            if len(parts) > 3 and parts[2] == "resctrl":
                return tuple(parts[3].split(","))
        return ()

    def path(self, group: str, name: str = "") -> str:
        """Return the relative path of a group, or of a file in it."""
        return "/".join(part for part in (ROOT, group, name) if part)

    def explain(self, error: OSError, action: str) -> str:
        """Return one line: what was tried, the errno, and the kernel's own words about it.

        The kernel keeps the words of the last command only, so ask at once. It says nothing
        of an unknown domain id.
        """
        name = errno.errorcode.get(error.errno or 0, str(error))
        if error.errno in _NOT_RESCTRLS:
            return f"resctrl: {action}: {name}"
        said = (self.host.read(f"{ROOT}/info/last_cmd_status") or "").strip()
        if said in _NOTHING_SAID:
            said = "the kernel gives no reason"
            if error.errno == errno.EINVAL:
                said += ", as for a domain id that it does not have"
        return f"resctrl: {action}: {name}: {said}"


@dataclass(slots=True, frozen=True)
class Ability:
    """What bandwidth control a machine has, and the domains below each of its ids."""

    control: BandwidthControl
    covers: dict[int, tuple[int, ...]]


def ability(files: ResctrlFiles, topology: Topology) -> Ability:
    """Return what the machine can do; raises Incompatible with one line that says why not."""
    if not files.in_kernel:
        hint = " (Arm: `arm64.mpam` on its command line)" if topology.arch == "aarch64" else ""
        raise Incompatible(f"resctrl: the kernel or the CPU has none{hint}")
    if not files.mounted:
        raise Incompatible(f"resctrl: {NOT_MOUNTED}")
    resources = files.resources()
    named = next((name for name in BANDWIDTH_NAMES if name in resources), None)
    lines = files.bandwidth_lines()
    if named is None and not lines:
        raise Incompatible(
            f"resctrl: controls {', '.join(resources) or 'nothing'}, no memory bandwidth (MB)"
        )
    control = bandwidth_control(
        files.info(named or "MB"),
        lines,
        arch=topology.arch,
        in_mbps="mba_MBps" in files.mount_options(),
    )
    by_node = "MB_MON" in files.host.names(f"{ROOT}/info")
    covers = covered_domains(topology, control.ids, by_node=by_node)
    if not any(covers.values()):
        raise Incompatible("resctrl: no MB domain lies on CPUs that may be used")
    return Ability(control, dict(covers))


def why_not(host: HostFs, topology: Topology) -> str | None:
    """Return one line that says why resctrl cannot limit bandwidth here, None if it can."""
    files = ResctrlFiles(host)
    try:
        ability(files, topology)
    except Incompatible as error:
        return str(error)
    groups = files.groups()
    limits = [_closids(files, resource) for resource in files.resources()]
    most = min((limit for limit in limits if limit is not None), default=None)
    others = [name for name in groups if not name.startswith(PREFIX)]
    if most is not None and len(others) == len(groups) >= most - 1:
        return f"resctrl: no free CLOSID: {len(others)} groups of others use all {most}"
    return None


def _closids(files: ResctrlFiles, resource: str) -> int | None:
    text = (files.host.read(f"{ROOT}/info/{resource}/num_closids") or "").strip()
    return int(text) if text.isascii() and text.isdigit() else None
