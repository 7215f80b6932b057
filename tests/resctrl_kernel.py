"""A kernel's resctrl in memory: refuses, rounds and moves as Linux does.

Rules: fs/resctrl/ctrlmondata.c and rdtgroup.c of Linux 6.16 (its texts of last_cmd_status),
and openEuler's MPAM manual. Paths outside of `sys/fs/resctrl` are those of the tree at root.
"""

from __future__ import annotations

import errno
import os
import tarfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from agentd.core.topology import CacheGroup, Domain, Topology
from agentd.hostfs import HostFs

ROOT = "sys/fs/resctrl"
U32 = 4294967295

_CONTROL_FILES = ("cpus", "cpus_list", "mode", "schemata", "size", "tasks")
_RESERVED = ("info", "mon_data", "mon_groups")


@dataclass(frozen=True)
class Resource:
    """A line of schemata. `kind` bandwidth, mask, or number (MPAM's others)."""

    name: str
    kind: Literal["bandwidth", "mask", "number"]
    ids: tuple[int, ...]
    closids: int = 16
    default: int = 100
    least: int = 0
    most: int = 100
    step: int = 1
    linear: int | None = 1
    """None: there is no delay_linear file."""
    hardware: Callable[[int], int] = lambda value: value
    """What the hardware keeps of a value."""
    unsettable: bool = False


@dataclass(frozen=True)
class Profile:
    """A machine. `meters`: monitoring directories, with `/` for one inside another."""

    resources: tuple[Resource, ...]
    meters: tuple[str, ...] = ()
    events: tuple[str, ...] = ("llc_occupancy", "mbm_local_bytes", "mbm_total_bytes")
    aligned: bool = True
    """Right-aligned names and values; else MPAM's zeros."""
    mbps: bool = False
    rmids: int = 64
    old_texts: bool = False


def _mb(ids: tuple[int, ...], **more: object) -> Resource:
    values = {"least": 10, "step": 10, "closids": 8, **more}
    return Resource("MB", "bandwidth", ids, **values)  # type: ignore[arg-type]


def _meters(kind: str, ids: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"mon_{kind}_{key:02d}" for key in ids)


def _mask(name: str, ids: tuple[int, ...], mask: int = 0xFFFFF, closids: int = 16) -> Resource:
    return Resource(name, "mask", ids, closids=closids, default=mask, least=1, most=mask)


_EIGHT = (0, 2, 4, 6, 8, 10, 12, 14)
_AMD: Mapping[str, int] = {"default": 2048, "most": 2048, "least": 0, "step": 1, "linear": 0}

INTEL = Profile((_mb((0, 1)), _mask("L3", (0, 1))), _meters("L3", (0, 1)))
INTEL_CDP = Profile(
    (_mb((0, 1)), _mask("L3CODE", (0, 1), closids=8), _mask("L3DATA", (0, 1), closids=8)),
    _meters("L3", (0, 1)),
)
INTEL_MBPS = Profile((_mb((0, 1), default=U32),), _meters("L3", (0, 1)), mbps=True)
INTEL_L2 = Profile((_mask("L2", (0, 1), 0xFF, closids=4),))
INTEL_CLUSTERS = Profile(
    (_mb((0,)),), ("mon_L3_00", "mon_L3_00/mon_sub_L3_00", "mon_L3_00/mon_sub_L3_01")
)
AMD = Profile(
    (
        Resource("SMBA", "bandwidth", _EIGHT, **_AMD),  # type: ignore[arg-type]
        Resource("MB", "bandwidth", _EIGHT, **_AMD),  # type: ignore[arg-type]
        _mask("L3", _EIGHT, 0xFFFF),
    ),
    _meters("L3", _EIGHT),
)
MPAM = Profile(
    (
        _mask("L3", (1, 122), 0xFFFFFFF, closids=32),
        Resource("L3PRI", "number", (1, 122), 32, default=0, most=3),
        Resource("MB", "bandwidth", (0, 1), 32, least=1, linear=None),
        Resource("MBPRI", "number", (0, 1), 32, default=3, most=7),
        Resource("MBHDL", "number", (0, 1), 32, default=1, most=1),
        Resource("MBMIN", "number", (0, 1), 32, default=0),
    ),
    (*_meters("L3", (1, 122)), *_meters("MB", (0, 1))),
    aligned=False,
)


def machine(
    domains: Mapping[int, Iterable[int]],
    caches: Mapping[int, Iterable[int]],
    arch: str = "x86_64",
) -> Topology:
    """Return a machine of `domains` (id to CPUs) and L3 caches (id to CPUs)."""
    cpus = tuple(sorted(cpu for mine in domains.values() for cpu in mine))
    return Topology(
        domains=MappingProxyType(
            {key: Domain(key, tuple(mine), 1 << 30, {}) for key, mine in domains.items()}
        ),
        siblings=MappingProxyType({cpu: (cpu,) for cpu in cpus}),
        possible=cpus,
        online=cpus,
        arch=arch,
        features=(),
        numa=True,
        warnings=(),
        caches=tuple(CacheGroup(tuple(mine), 1024, key) for key, mine in caches.items()),
    )


TWO_NODES = machine({0: range(4), 1: range(4, 8)}, {0: range(4), 1: range(4, 8)})
_AMD_ORDER = (0, 4, 6, 2, 8, 12, 14, 10)
"""Ids of L3 caches in the order of their CPUs, as on a recorded machine."""
AMD_NODES = machine(
    {0: range(16), 1: range(16, 32)},
    {key: range(4 * place, 4 * place + 4) for place, key in enumerate(_AMD_ORDER)},
)
CLUSTER_NODES = machine({0: range(4), 1: range(4, 8)}, {0: range(8)})
MPAM_NODES = machine({0: range(4), 1: range(4, 8)}, {1: range(4), 122: range(4, 8)}, arch="aarch64")


def recorded_resctrl(archive: Path, variant: str, where: Path) -> HostFs:
    """Unpack only the resctrl files of a recorded machine, which has thousands of others."""
    with tarfile.open(archive) as tar:
        wanted = [member for member in tar if f"/{ROOT}/" in f"{member.name}/"]
        tar.extractall(where, wanted, filter="data")
    return HostFs(where / archive.name.removesuffix(".tar.gz") / variant)


@dataclass
class _Group:
    values: dict[str, dict[int, int]]
    """By resource and domain id."""
    monitors: dict[str, str] = field(default_factory=dict)
    """Text by `<meter>/<event>`."""
    parts: list[str] = field(default_factory=list)
    """Its monitoring groups."""


class ResctrlKernel(HostFs):
    """A host whose resctrl obeys the kernel's rules."""

    def __init__(self, root: Path, profile: Profile = INTEL, *, mounted: bool = True) -> None:
        super().__init__(root)
        self.profile = profile
        self.mounted = mounted
        self.status = ""
        self.writes: list[tuple[str, str]] = []
        """Every write that reached the kernel, path below resctrl and text."""
        self.group_of: dict[int, str] = {}
        """The control group of each live thread."""
        self.iommu: list[str] = []
        self.read_only = False
        self.modes: dict[str, str] = {}
        self.groups: dict[str, _Group] = {"": self._fresh()}

    # What tests do to the machine.

    def spawn(self, *tids: int, parent: int | None = None) -> None:
        """Start threads, in the group of their parent."""
        for tid in tids:
            self.group_of[tid] = self.group_of[parent] if parent is not None else ""

    def end(self, tid: int) -> None:
        del self.group_of[tid]

    def foreign(self, *names: str) -> None:
        """Make groups as another program would."""
        for name in names:
            self.make_directory(f"{ROOT}/{name}")

    def set_monitor(self, group: str, meter: str, event: str, text: str | int) -> None:
        self.groups[group].monitors[f"{meter}/{event}"] = str(text)

    # What a program does.

    def read(self, path: str, most_bytes: int = 1 << 20) -> str | None:
        if path == "proc/mounts" and self.mounted:
            options = "rw,relatime" + (",mba_MBps" if self.profile.mbps else "")
            return f"proc /proc proc rw 0 0\nresctrl /sys/fs/resctrl resctrl {options} 0 0\n"
        below = self._below(path)
        if below is None:
            return super().read(path, most_bytes)
        return self._near(below).get(below)

    def attribute(self, path: str) -> str | None:
        return super().attribute(path) if self._below(path) is None else self.read(path)

    def exists(self, path: str) -> bool:
        below = self._below(path)
        if below is None:
            return super().exists(path)
        return not below or below in self._near(below) or bool(self.names(path))

    def directories(self, path: str) -> list[str]:
        below = self._below(path)
        if below is None:
            return super().directories(path)
        return [name for name in self.names(path) if self.names(f"{path}/{name}")]

    def names(self, path: str) -> list[str]:
        if path == "sys/fs":
            return sorted({*super().names(path), "resctrl"})
        below = self._below(path)
        if below is None:
            return super().names(path)
        prefix = f"{below}/" if below else ""
        found = {
            key[len(prefix) :].split("/")[0] for key in self._near(below) if key.startswith(prefix)
        }
        return sorted(found)

    def write(self, path: str, text: str) -> None:
        group, name = self._group_and_rest(path)
        if name not in ("schemata", "tasks"):
            raise _error(errno.EACCES, path)
        if self.read_only:
            raise _error(errno.EROFS, path)
        self.writes.append((f"{group}/{name}".lstrip("/"), text))
        if name == "schemata":
            self._write_schemata(group, text)
        else:
            self._write_tasks(group, text)

    def make_directory(self, path: str) -> None:
        below = self._below(path)
        if below is None:
            super().make_directory(path)
            return
        self._must_be_mounted(path)
        if self.read_only:
            raise _error(errno.EROFS, path)
        if below in self.groups or below in _RESERVED or below in _CONTROL_FILES:
            raise _error(errno.EEXIST, path)
        parent, _, name = below.rpartition("/")
        if parent in ("mon_groups", *(f"{one}/mon_groups" for one in self.groups if one)):
            self._take_rmid()
            self.groups[parent.removesuffix("mon_groups").rstrip("/")].parts.append(name)
            return
        if parent or "\n" in name:
            raise _error(errno.EPERM if parent else errno.EINVAL, path)
        self.status = ""
        if len(self.groups) >= min(r.closids for r in self.profile.resources):
            self.status = "out of CLOSIDs" if self.profile.old_texts else "Out of CLOSIDs"
            raise _error(errno.ENOSPC, path)
        self._take_rmid()
        self.groups[name] = self._fresh()

    def remove_directory(self, path: str) -> None:
        below = self._below(path)
        if below is None:
            super().remove_directory(path)
            return
        self._must_be_mounted(path)
        if not below or below in _RESERVED:
            raise _error(errno.EPERM, path)
        if below not in self.groups:
            raise _error(errno.ENOENT, path)
        del self.groups[below]
        for tid, group in self.group_of.items():
            if group == below:
                self.group_of[tid] = ""

    def _fresh(self) -> _Group:
        values = {r.name: dict.fromkeys(r.ids, r.default) for r in self.profile.resources}
        return _Group(values)

    def _take_rmid(self) -> None:
        used = sum(1 + len(group.parts) for group in self.groups.values())
        if used >= self.profile.rmids:
            self.status = "Out of RMIDs"
            raise _error(errno.ENOSPC, "rmid")

    def _below(self, path: str) -> str | None:
        if path != ROOT and not path.startswith(f"{ROOT}/"):
            return None
        return path[len(ROOT) + 1 :]

    def _must_be_mounted(self, path: str) -> None:
        if not self.mounted:
            raise _error(errno.EPERM, path)

    def _group_and_rest(self, path: str) -> tuple[str, str]:
        below = self._below(path)
        if below is None or not self.mounted:
            raise _error(errno.ENOENT, path)
        group, _, name = below.rpartition("/")
        if group not in self.groups or below not in self._near(below):
            raise _error(errno.ENOENT if group not in self.groups else errno.EACCES, path)
        return group, name

    def _files(self) -> dict[str, str]:
        """Return every file below the mount point and its text."""
        if not self.mounted:
            return {}
        files = self._info_files()
        for name in self.groups:
            prefix = f"{name}/" if name else ""
            files.update({prefix + key: text for key, text in self._group_files(name).items()})
        return files

    def _near(self, below: str) -> dict[str, str]:
        """Return the files among which `below` is: all of them take long to write."""
        first = below.partition("/")[0]
        if not self.mounted or not below:
            return self._files()
        if first == "info":
            return self._info_files()
        if first not in self.groups:
            return self._group_files("")
        return {f"{first}/{key}": text for key, text in self._group_files(first).items()}

    def _info_files(self) -> dict[str, str]:
        files = {"info/last_cmd_status": f"{self.status or 'ok'}\n"}
        for resource in self.profile.resources:
            for name, number in _info(resource).items():
                files[f"info/{resource.name}/{name}"] = f"{number}\n"
        for kind in ("L3", "MB"):
            if any(meter.startswith(f"mon_{kind}") for meter in self.profile.meters):
                files[f"info/{kind}_MON/num_rmids"] = f"{self.profile.rmids}\n"
        return files

    def _group_files(self, name: str) -> dict[str, str]:
        group = self.groups[name]
        files = dict.fromkeys(_CONTROL_FILES, "\n")
        files["mode"] = f"{self.modes.get(name, 'shareable')}\n"
        files["schemata"] = self._schemata(name)
        files["tasks"] = self._tasks(name)
        for part in group.parts:
            files[f"mon_groups/{part}/tasks"] = ""
        for meter in self.profile.meters:
            for event in self._events(meter):
                text = group.monitors.get(f"{meter}/{event}", "0")
                files[f"mon_data/{meter}/{event}"] = f"{text}\n"
        return files

    def _events(self, meter: str) -> tuple[str, ...]:
        if self.profile.aligned:
            return self.profile.events
        return ("mbm_total_bytes",) if meter.startswith("mon_MB") else ("llc_occupancy",)

    def _tasks(self, name: str) -> str:
        rows = [str(tid) for tid, group in sorted(self.group_of.items()) if group == name]
        return "".join(f"{row}\n" for row in [*rows, *(self.iommu if name == "" else ())])

    def _schemata(self, name: str) -> str:
        resources = self.profile.resources
        if self.modes.get(name) == "pseudo-locksetup":
            return "".join(f"{r.name}:uninitialized\n" for r in resources)
        widest = max(len(r.name) for r in resources)
        digits = 7 if any(r.kind == "mask" and r.most > 0xFFFFF for r in resources) else 5
        rows = []
        for resource in resources:
            hexadecimal = resource.kind == "mask"
            if self.profile.aligned:
                style = f"0{digits}x" if hexadecimal else f"{digits}d"
            else:
                style = "07x" if hexadecimal else "07d"
            values = self.groups[name].values[resource.name]
            cells = ";".join(f"{key}={format(value, style)}" for key, value in values.items())
            label = f"{resource.name:>{widest}}" if self.profile.aligned else resource.name
            rows.append(f"{label}:{cells}\n")
        return "".join(rows)

    def _write_schemata(self, group: str, text: str) -> None:
        if not text.endswith("\n"):
            # Refused before the words of the command before are cleared.
            raise _error(errno.EINVAL, text)
        self.status = ""
        if self.modes.get(group) == "pseudo-locked":
            raise self._refused("Resource group is pseudo-locked")
        staged: dict[tuple[str, int], int] = {}
        for row in text[:-1].split("\n"):
            label, colon, rest = row.partition(":")
            name = label.strip()
            if not colon:
                raise self._refused("Missing ':'")
            if not rest:
                raise self._refused(f"Missing '{name}' value")
            self._parse_row(group, name, rest, staged)
        for (name, key), value in staged.items():
            self.groups[group].values[name][key] = value

    def _parse_row(
        self, group: str, name: str, rest: str, staged: dict[tuple[str, int], int]
    ) -> None:
        found = [r for r in self.profile.resources if r.name == name]
        if not found:
            raise self._refused(f"Unknown or unsupported resource name '{name}'")
        resource = found[0]
        for part in rest.split(";"):
            if not part:
                return
            key, equals, value = part.partition("=")
            if not equals or not key.isdigit():
                raise self._refused("Missing '=' or non-numeric domain")
            if int(key) not in resource.ids:
                raise _error(errno.EINVAL, part)
            if (name, int(key)) in staged:
                raise self._refused(f"Duplicate domain {key}")
            number = self._parse_value(resource, value.strip())
            if self.profile.mbps and resource.kind == "bandwidth":
                self.groups[group].values[name][int(key)] = number
            else:
                staged[name, int(key)] = number

    def _parse_value(self, resource: Resource, text: str) -> int:
        if resource.kind == "mask":
            return self._parse_mask(resource, text)
        if resource.unsettable:
            raise self._refused("No support for non-linear MB domains")
        if not text.isdigit() or int(text) > U32:
            raise self._refused(f"Invalid MB value {text}")
        number = int(text)
        if self.profile.mbps and resource.kind == "bandwidth":
            return number
        if not resource.least <= number <= resource.most:
            limits = f"[{resource.least},{resource.most}]"
            raise self._refused(f"MB value {number} out of range {limits}")
        steps = number // resource.step + bool(number % resource.step)
        return resource.hardware(steps * resource.step)

    def _parse_mask(self, resource: Resource, text: str) -> int:
        try:
            mask = int(text, 16)
        except ValueError:
            raise self._refused(f"Non-hex character in the mask {text}") from None
        if not resource.least <= mask <= resource.most:
            raise self._refused("Mask out of range")
        if "0" in bin(mask)[2:].rstrip("0"):
            raise self._refused(f"The mask {mask:x} has non-consecutive 1-bits")
        return mask

    def _write_tasks(self, group: str, text: str) -> None:
        # Linux before 6.7: one TID a write, and a list is no number.
        try:
            tid = int(text.strip())
        except ValueError:
            raise _error(errno.EINVAL, text) from None
        self.status = ""
        if tid < 0:
            raise _error(errno.EINVAL, text)
        if tid not in self.group_of:
            self.status = f"No task {tid}"
            raise _error(errno.ESRCH, text)
        self.group_of[tid] = group

    def _refused(self, status: str) -> OSError:
        self.status = status
        return _error(errno.EINVAL, status)


def _info(resource: Resource) -> dict[str, int | str]:
    if resource.kind == "number":
        return {"num_closids": resource.closids}
    if resource.kind == "mask":
        return {
            "num_closids": resource.closids,
            "cbm_mask": f"{resource.most:x}",
            "min_cbm_bits": resource.least,
        }
    info: dict[str, int | str] = {
        "num_closids": resource.closids,
        "min_bandwidth": resource.least,
        "bandwidth_gran": resource.step,
    }
    if resource.linear is not None:
        info["delay_linear"] = resource.linear
    return info


def _error(number: int, what: str) -> OSError:
    return OSError(number, os.strerror(number), what)
