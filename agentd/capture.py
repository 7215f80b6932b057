"""Writes a machine's topology files as a small archive that discovery reads back.

The archive and the `.expected.json` beside it are a test case as `tests/machines` holds
them. What may be in it is a closed list (capture_allowed); what could tell whose machine
it is is taken out (capture_strip), and the result is searched for it (capture_scan).
"""

from __future__ import annotations

import gzip
import io
import os
import re
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from agentd.capture_allowed import CGROUP_FILES, CGROUP_MOUNTS, Listed, listing
from agentd.capture_scan import Identity, telltales
from agentd.capture_strip import LONGEST_CPUINFO_BYTES, GroupNames, stripped
from agentd.core.topology import Topology
from agentd.hostfs import HostFs
from corefleet.errors import CorefleetError, InvalidInput

FILE_BYTES = 256 * 1024
TOTAL_BYTES = 64 * 1024 * 1024
SUFFIX = ".tar.gz"

_RAW_BYTES = 16 * 1024 * 1024
"""Read of a file that is made smaller before it is stored."""
_GZIP_LEVEL = 6
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,79}\Z")
_RESCTRL = "sys/fs/resctrl"
_OUR_RESCTRL_GROUP = re.compile(r"corefleet[a-z0-9-]*\Z")
_RESCTRL_OWN = frozenset({"info", "mon_data", "mon_groups"})
_HOST_NAME_FILES = ("proc/sys/kernel/hostname", "etc/hostname")
_SERIAL_FILES = ("etc/machine-id", "var/lib/dbus/machine-id", "proc/sys/kernel/random/boot_id")
_DMI = "sys/class/dmi/id"
_DMI_FILES = (
    "product_serial", "product_uuid", "board_serial", "chassis_serial", "board_asset_tag",
    "chassis_asset_tag",
)  # fmt: skip
_NETWORK = "sys/class/net"


class CaptureRefused(CorefleetError):
    """The capture would tell whose machine it is, or is too large; nothing was written."""


@dataclass(slots=True, frozen=True)
class CaptureReport:
    """What was written; `bytes` is the size of the archive."""

    file: Path
    expected: Path
    files: int
    bytes: int
    left_out: tuple[str, ...]
    """Files of the list that were not taken, with the reason."""


class CapturedFs(HostFs):
    """A capture in memory, read as the machine it was taken from: writing it out is slow.

    `files` maps path to text, `directories` are those of which only the name is kept.
    """

    def __init__(self, files: dict[str, str], directories: set[str]) -> None:
        super().__init__(Path("captured"))
        self.files = files
        self._below: dict[str, set[str]] = {"": set()}
        for directory in directories:
            self._below[directory] = set()
        for path in (*files, *directories):
            above, _, name = path.rpartition("/")
            while name and name not in self._below.setdefault(above, set()):
                self._below[above].add(name)
                above, _, name = above.rpartition("/")

    def read(self, path: str, most_bytes: int = FILE_BYTES * 4) -> str | None:
        """Return the text of a captured file, None if it was not captured."""
        text = self.files.get(_plain(path))
        return None if text is None else text.encode()[:most_bytes].decode("utf-8", "replace")

    def attribute(self, path: str) -> str | None:
        """Return the text of a captured file, None if it was not captured."""
        text = self.files.get(_plain(path))
        return None if text is None else text.rstrip("\0")

    def exists(self, path: str) -> bool:
        """Whether the file or directory was captured."""
        return _plain(path) in self.files or _plain(path) in self._below

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a captured directory."""
        return sorted(self._below.get(_plain(path), ()))

    def directories(self, path: str) -> list[str]:
        """Return the sorted names of the captured directories in a directory."""
        return [name for name in self.names(path) if _plain(f"{path}/{name}") in self._below]

    def writable(self, path: str) -> bool:
        """Nothing of a capture is to be written."""
        return False

    def delegated(self, path: str) -> bool:
        """Marks of files are not captured."""
        return False


def _plain(path: str) -> str:
    return os.path.normpath(f"/{path}").lstrip("/")


@dataclass(slots=True)
class _Collected:
    files: dict[str, str] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)
    left_out: list[str] = field(default_factory=list)
    bytes: int = 0


def default_name(topology: Topology) -> str:
    """Return a file name that tells of the machine and not of its owner."""
    arch = re.sub(r"[^a-z0-9_]+", "", topology.arch.lower()) or "machine"
    nodes = len(topology.nodes) or len(topology.domains)
    return f"{arch}-{len(topology.online)}c-{nodes}n{SUFFIX}"


def capture(host_root: Path, out: Path, describe: Callable[[HostFs], str]) -> CaptureReport:
    """Write the machine below `host_root` to `out` (`<id>.tar.gz`), and `<id>.expected.json`.

    `describe` returns what discovery makes of a machine, as JSON; it is given the capture
    itself, so that the two files agree. Two captures of the same tree are the same bytes.
    Raises InvalidInput for `out`, CaptureRefused. Reads thousands of files: not for an
    event loop.
    """
    name, expected = _checked(out)
    host = HostFs(host_root)
    collected = _Collector(host).collect()
    if not collected.files:
        raise InvalidInput("--root", str(host_root), "the root of a machine, with sys and proc")
    described = describe(CapturedFs(collected.files, collected.directories))
    shown = {**collected.files, f"{name}.expected.json": described}
    found = telltales(shown, _identity(host))
    if found:
        raise CaptureRefused(
            "the capture would tell whose machine it is; nothing was written:\n"
            + "\n".join(f"  {line}" for line in found[:20])
        )
    try:
        _write(out, _archive(name, collected))
        _write(expected, described.rstrip("\n").encode() + b"\n")
    except OSError as error:
        raise InvalidInput(
            "--output", str(out), f"a file that can be written ({error.strerror})"
        ) from None
    return CaptureReport(
        file=out,
        expected=expected,
        files=len(collected.files),
        bytes=out.stat().st_size,
        left_out=tuple(collected.left_out),
    )


class _Collector:
    """Reads the listed files of one machine."""

    def __init__(self, host: HostFs) -> None:
        self._host = host
        self._root = os.path.realpath(host.root)
        self._inside: dict[str, bool] = {}
        self._names = GroupNames()
        self._found = _Collected()

    def collect(self) -> _Collected:
        """Return the stripped files by path, in a stable order."""
        self._groups()
        self._walk(listing(), "")
        self._found.files = dict(sorted(self._found.files.items()))
        return self._found

    def _walk(self, listed: Listed, path: str) -> None:
        if not self._is_inside(path):
            return
        start = f"{path}/" if path else ""
        for name in self._host.names(path):
            if listed.files.match(name):
                self._take(start + name, start + name)
            if listed.directories.match(name):
                self._found.directories.add(self._stored(start + name))
            for pattern, below in listed.below:
                if pattern.match(name):
                    self._walk(below, start + name)

    def _groups(self) -> None:
        """Our own control groups and those above them, under neutral names."""
        ways = set()
        for line in (self._host.read("proc/self/cgroup") or "").splitlines():
            ways.add(line.split(":", 2)[-1].strip("/"))
        ways.add((self._host.read("proc/self/cpuset") or "").strip().strip("/"))
        for way in sorted(way for way in ways if ".." not in way.split("/")):
            pure = PurePosixPath(way)
            for level in sorted({str(pure), *map(str, pure.parents)} | {"corefleet.slice"}):
                for mount in CGROUP_MOUNTS:
                    self._group(mount, "" if level == "." else level)

    def _group(self, mount: str, level: str) -> None:
        source = f"{mount}/{level}".rstrip("/")
        if self._is_inside(source):
            stored = f"{mount}/{self._names.path(level)}".rstrip("/")
            present = set(self._host.names(source))
            for name in CGROUP_FILES:
                if name in present:
                    self._take(f"{source}/{name}", f"{stored}/{name}")

    def _take(self, source: str, stored: str) -> None:
        stored = self._stored(stored)
        if stored in self._found.files or not self._is_regular(source):
            return
        text = self._host.read(source, _RAW_BYTES)
        if text is None:
            self._found.left_out.append(f"{stored}: not readable")
            return
        text = stripped(stored, text, self._names)
        size = len(text.encode())
        if size > (LONGEST_CPUINFO_BYTES if stored == "proc/cpuinfo" else FILE_BYTES):
            self._found.left_out.append(f"{stored}: {size} bytes; at most {FILE_BYTES}")
            return
        self._found.bytes += size
        if self._found.bytes > TOTAL_BYTES:
            raise CaptureRefused(f"more than {TOTAL_BYTES} bytes of files; nothing was written")
        self._found.files[stored] = text

    def _stored(self, path: str) -> str:
        """Return the path in the archive: others' resctrl groups get neutral names."""
        parts = path.split("/")
        if not path.startswith(f"{_RESCTRL}/"):
            return path
        if parts[3] == "mon_groups" and len(parts) > 4:
            group = 4
        elif parts[3] not in _RESCTRL_OWN and len(parts) > 4:
            group = 3
        else:
            return path
        if not _OUR_RESCTRL_GROUP.match(parts[group]):
            parts[group] = self._names.name(parts[group])
        return "/".join(parts)

    def _is_inside(self, directory: str) -> bool:
        """Whether a directory, its links followed, is in this machine's tree."""
        known = self._inside.get(directory)
        if known is None:
            full = os.path.join(self._root, directory)
            above = directory.rpartition("/")[0]
            if directory and self._is_inside(above) and not os.path.islink(full):
                # Links above it were followed and lead inside: so does this.
                known = True
            else:
                known = self._holds(os.path.realpath(full))
            self._inside[directory] = known
        return known

    def _holds(self, real: str) -> bool:
        return self._root == "/" or real == self._root or real.startswith(f"{self._root}/")

    def _is_regular(self, path: str) -> bool:
        """Whether a file is regular and in the tree: a pipe would block, a link may lead out."""
        full = os.path.join(self._root, path)
        try:
            mode = os.lstat(full).st_mode
            if stat.S_ISLNK(mode):
                real = os.path.realpath(full)
                return self._holds(real) and stat.S_ISREG(os.stat(real).st_mode)
        except OSError:
            return False
        return stat.S_ISREG(mode)


def _identity(host: HostFs) -> Identity:
    """Return what this machine is called by; what cannot be read cannot be in the capture."""

    def texts(paths: tuple[str, ...]) -> Iterator[str]:
        return (text for path in paths if (text := host.read(path)))

    cards = tuple(f"{_NETWORK}/{card}/address" for card in host.names(_NETWORK))
    serials = (*_SERIAL_FILES, *(f"{_DMI}/{name}" for name in _DMI_FILES))
    return Identity.of(texts(_HOST_NAME_FILES), texts(serials), texts(cards))


def _checked(out: Path) -> tuple[str, Path]:
    """Return the case's id and the path of its expected values."""
    name = out.name.removesuffix(SUFFIX)
    if not out.name.endswith(SUFFIX) or not _NAME.match(name):
        raise InvalidInput("--output", str(out), f"a name such as x86-2p-4n{SUFFIX}")
    expected = out.with_name(f"{name}.expected.json")
    for path in (out, expected):
        if path.exists():
            raise InvalidInput("--output", str(path), "a file that is not there yet")
    return name, expected


def _archive(name: str, collected: _Collected) -> bytes:
    """Return the archive: regular files and directories only, in order of path, mtime 0."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted({*collected.files, *collected.directories}):
            member = tarfile.TarInfo(f"{name}/{path}")
            text = collected.files.get(path)
            if text is None:
                member.type, member.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(member)
                continue
            content = text.encode()
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
    return gzip.compress(raw.getvalue(), _GZIP_LEVEL, mtime=0)


def _write(path: Path, content: bytes) -> None:
    """Write a whole file or none."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
