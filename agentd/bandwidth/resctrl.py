"""Memory bandwidth limits by resctrl: a group for each shared class. Blocking calls.

Use it through asyncio.to_thread. Any thread may call.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from agentd.bandwidth.resctrl_files import PREFIX, Ability, ResctrlFiles, ability
from agentd.core.schemata import BandwidthControl, format_line, wanted
from agentd.core.topology import Topology
from agentd.hostfs import HostFs
from corefleet.errors import Incompatible, InvalidInput, Unavailable

MOST_PASSES = 32
"""Passes over the threads of a cgroup that goes on making new ones."""

ListTids = Callable[[], Iterable[int]]
"""Returns the TIDs of a process or cgroup as they are now; called again on each pass."""


@dataclass(slots=True, frozen=True)
class ShareSet:
    """What was set. `values` is read back, by domain id of resctrl, in the machine's unit."""

    values: Mapping[int, int]
    notes: tuple[str, ...] = ()
    """One line for each thing that is not as it was asked."""


@dataclass(slots=True, frozen=True)
class Attached:
    """`settled`: two passes saw the same threads, and all of them are in the group."""

    moved: int
    passes: int
    settled: bool


@dataclass(slots=True)
class _Group:
    name: str
    shares: dict[int, float | None] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)
    """What the kernel showed after our last write, by domain id."""


class ResctrlDriver:
    """Our groups in resctrl. `notes` says which classes have none and why."""

    def __init__(self, files: ResctrlFiles, topology: Topology, able: Ability) -> None:
        """Use `open`, which makes the groups."""
        self._files = files
        self._topology = topology
        self._able = able
        self._groups: dict[str, _Group] = {}
        self._peaks: dict[int, float] = {}
        self._lock = threading.Lock()
        self.notes: list[str] = []

    @classmethod
    def open(cls, host: HostFs, topology: Topology, classes: Iterable[str]) -> ResctrlDriver | str:
        """Return a driver whose groups are there and unlimited, or one line that says why not.

        Groups that an earlier agentd left are adopted with their tasks; those of classes that
        are no more are removed. `batch` gets its group first, the others in the order given,
        until the CLOSIDs run out.
        """
        files = ResctrlFiles(host)
        try:
            driver = cls(files, topology, ability(files, topology))
            driver._claim(sorted(dict.fromkeys(classes), key=lambda name: name != "batch"))
        except (Incompatible, Unavailable) as error:
            return str(error)
        return driver

    @property
    def control(self) -> BandwidthControl:
        """The machine's unit, steps and domain ids."""
        return self._able.control

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes that have a group; all others stay in the root group."""
        return tuple(self._groups)

    def group(self, service_class: str) -> str | None:
        """Return the name of the group of a class, None if it has none."""
        group = self._groups.get(service_class)
        return group.name if group else None

    def set_peaks(self, peaks: Mapping[int, float]) -> None:
        """Tell the peak bandwidth of domains in bytes/s; absolute units need it.

        It holds from the next `set_share` on.
        """
        with self._lock:
            self._peaks = dict(peaks)

    def set_share(self, service_class: str, domain: int, share: float | None) -> ShareSet:
        """Limit a class to `share` of the peak bandwidth of `domain`; None takes the limit off.

        A class without a group has no limit, which is a note. Raises InvalidInput for a domain
        that is not ours or a share that is not above 0 and at most 1, and Unavailable with the
        kernel's words if it refuses: the old limit stays, but for a part in mba_MBps mode.
        """
        if domain not in self._topology.domains:
            known = ", ".join(map(str, sorted(self._topology.domains)))
            raise InvalidInput("domain", domain, f"one of {known}")
        with self._lock:
            group = self._groups.get(service_class)
            if group is None:
                return ShareSet({}, (f"{service_class}: has no resctrl group, so no limit",))
            ids = [key for key, below in self._able.covers.items() if domain in below]
            if not ids:
                return ShareSet({}, (f"domain {domain}: no MB domain of resctrl lies above it",))
            shares = {**group.shares, domain: share}
            plan = wanted(
                self.control, self._able.covers, {service_class: shares}, self._peaks, ids
            )
            values = plan.values[service_class]
            notes = [*plan.notes, *self._write(group, values)]
            group.shares = shares
            return ShareSet({key: group.written[key] for key in values}, tuple(notes))

    def read_back(self, service_class: str) -> dict[int, int]:
        """Return the limits of a class as the kernel shows them, by domain id of resctrl.

        Empty for a class without a group. Raises Unavailable if its group is gone.
        """
        group = self._groups.get(service_class)
        return self._shown(group) if group else {}

    def verify(self) -> list[str]:
        """Return one line for each group that is gone or whose limits others changed."""
        lines = []
        for service_class, group in self._groups.items():
            try:
                shown = self._shown(group)
            except Unavailable as error:
                lines.append(str(error))
                continue
            with self._lock:
                written = dict(group.written)
            lines.extend(
                f"resctrl: {service_class}: MB {key} is {shown.get(key)}, we wrote {value}"
                for key, value in written.items()
                if shown.get(key) != value
            )
        return lines

    def attach(self, service_class: str, list_tids: ListTids) -> Attached:
        """Move threads into the group of a class, until two passes see the same threads.

        The kernel takes one TID at a time and only later forks inherit, so a process should
        wait single-threaded. Threads that end meanwhile are skipped. Raises Unavailable if
        the kernel refuses, and whatever `list_tids` raises. A class without a group is left
        where it is: in the group of whoever started it.
        """
        group = self._groups.get(service_class)
        if group is None:
            return Attached(0, 0, settled=True)
        moved: set[int] = set()
        before: frozenset[int] | None = None
        for number in range(1, MOST_PASSES + 1):
            listed = frozenset(list_tids())
            moved.update(tid for tid in sorted(listed - moved) if self._move(group, tid))
            if listed == before:
                return Attached(len(moved), number, settled=True)
            before = listed
        return Attached(len(moved), MOST_PASSES, settled=False)

    def recheck(self, service_class: str, list_tids: ListTids) -> tuple[int, ...]:
        """Return the threads that were not in the group of their class; they are moved back.

        Raises as `attach`.
        """
        group = self._groups.get(service_class)
        if group is None:
            return ()
        listed = frozenset(list_tids())
        strays = sorted(listed - self.members(service_class))
        return tuple(tid for tid in strays if self._move(group, tid))

    def members(self, service_class: str) -> frozenset[int]:
        """Return the TIDs in the group of a class, without its `iommu_group:` lines.

        Raises Unavailable if the group is gone.
        """
        group = self._groups.get(service_class)
        if group is None:
            return frozenset()
        text = self._files.host.read(self._files.path(group.name, "tasks"))
        if text is None:
            raise Unavailable(f"resctrl: the group {group.name} is gone")
        return frozenset(int(row) for row in text.split() if row.isascii() and row.isdigit())

    def close(self) -> list[str]:
        """Remove our groups, whose tasks fall back to the root group.

        Returns one line for each that could not be removed. For a node that is given up: an
        agentd that restarts leaves its groups, as its workers live on in them.
        """
        with self._lock:
            groups, self._groups = self._groups, {}
        return [line for group in groups.values() for line in self._remove(group.name)]

    def _claim(self, classes: list[str]) -> None:
        """Make or adopt the groups; raises Unavailable if there is none or none works."""
        there = {name for name in self._files.groups() if name.startswith(PREFIX)}
        for name in sorted(there - {PREFIX + one for one in classes}):
            self.notes.extend(self._remove(name))
        made: list[str] = []
        failures: list[str] = []
        for service_class in classes:
            name = PREFIX + service_class
            failure = None if name in there else self._make(name)
            if failure is None:
                self._groups[service_class] = _Group(name)
                if name not in there:
                    made.append(name)
            else:
                failures.append(f"{failure}; {service_class} has no limit")
        try:
            if not self._groups:
                raise Unavailable(failures[0] if failures else "resctrl: no class wants a group")
            # A fresh group shows what this machine calls unlimited.
            self._able = ability(self._files, self._topology)
            for group in self._groups.values():
                ids = [key for key, domains in self._able.covers.items() if domains]
                self.notes.extend(self._write(group, dict.fromkeys(ids, self.control.full)))
        except (Incompatible, Unavailable):
            for name in made:
                self._remove(name)
            raise
        self.notes.extend(failures)

    def _make(self, name: str) -> str | None:
        """Make a group; return one line if the kernel refuses."""
        try:
            self._files.host.make_directory(self._files.path(name))
        except FileExistsError:
            return None
        except OSError as error:
            line = self._files.explain(error, f"mkdir {name}")
            if error.errno == errno.ENOSPC:
                others = [one for one in self._files.groups() if not one.startswith(PREFIX)]
                line += f" ({len(others)} groups of others)"
            return line
        return None

    def _remove(self, name: str) -> list[str]:
        try:
            self._files.host.remove_directory(self._files.path(name))
        except FileNotFoundError:
            return []
        except OSError as error:
            return [self._files.explain(error, f"rmdir {name}")]
        return []

    def _write(self, group: _Group, values: Mapping[int, int]) -> list[str]:
        """Write limits and note what the kernel made of them; raises Unavailable."""
        text = format_line(self.control.resource, values)
        try:
            self._files.host.write(self._files.path(group.name, "schemata"), text)
        except OSError as error:
            action = f"write {text.strip()} to {group.name}/schemata"
            line = self._files.explain(error, action)
            if self.control.unit == "MBps":
                # This mode alone keeps the values in front of the one that was refused.
                kept = self._shown(group)
                group.written.update({key: kept[key] for key in values if key in kept})
            raise Unavailable(line) from error
        shown = self._shown(group)
        notes = []
        for key, value in values.items():
            group.written[key] = shown.get(key, value)
            if shown.get(key) != self.control.read_back(value):
                notes.append(f"resctrl: {group.name}: MB {key}={value} is kept as {shown.get(key)}")
        return notes

    def _shown(self, group: _Group) -> dict[int, int]:
        schemata = self._files.schemata(group.name)
        if schemata is None:
            raise Unavailable(f"resctrl: the group {group.name} is gone")
        line = schemata.lines.get(self.control.resource)
        return line.numbers() if line else {}

    def _move(self, group: _Group, tid: int) -> bool:
        """Move one thread; False if it has ended."""
        try:
            self._files.host.write(self._files.path(group.name, "tasks"), f"{tid}\n")
        except ProcessLookupError:
            return False
        except OSError as error:
            action = f"move thread {tid} into {group.name}"
            raise Unavailable(self._files.explain(error, action)) from error
        return True
