"""The only reader of the kernel's files: /sys and /proc under one injectable root."""

from __future__ import annotations

import os
from pathlib import Path

_MOST_BYTES = 1 << 20
_ATTRIBUTE_BYTES = 1 << 12
_DELEGATION_MARKS = ("user.delegate", "trusted.delegate")
"""Set by systemd on groups with Delegate=yes: docs/CGROUP_DELEGATION.md of its sources."""


class HostFs:
    """A machine's files, as they are now or as they were recorded under `root`.

    Paths are relative: `sys/devices/system/node/online`. What is missing, unreadable or
    no text is absent, which is normal: kernels differ.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self._prefix = f"{root}".rstrip("/") + "/"

    @property
    def live(self) -> bool:
        """Whether this is the running machine and not a recorded one."""
        return self.root == Path("/")

    @property
    def machine(self) -> str:
        """The kernel's name of the architecture, '' for a recorded machine."""
        return os.uname().machine if self.live else ""

    def read(self, path: str, most_bytes: int = _MOST_BYTES) -> str | None:
        """Return the text of a file, at most `most_bytes` of it, or None if it is absent."""
        try:
            with (self.root / path).open("rb") as file:
                return file.read(most_bytes).decode("utf-8", "replace")
        except OSError:
            return None

    def attribute(self, path: str) -> str | None:
        """Return the text of a small file, or None if it is absent or refuses to be read.

        sysfs hands out a whole attribute in one read, so one that fills less than a page
        is not asked again; this is several times faster than `read`, and discovery opens
        thousands. A NUL at the end, which some kernels write, is dropped. For files of
        /proc that are longer than a page use `read`.
        """
        try:
            descriptor = os.open(self._prefix + path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            text = part = os.read(descriptor, _ATTRIBUTE_BYTES)
            while len(part) == _ATTRIBUTE_BYTES:
                part = os.read(descriptor, _ATTRIBUTE_BYTES)
                text += part
        except OSError:
            return None
        finally:
            os.close(descriptor)
        return text.decode("utf-8", "replace").rstrip("\0")

    def exists(self, path: str) -> bool:
        """Whether there is a file or directory of that name."""
        return os.path.exists(self._prefix + path)

    def directories(self, path: str) -> list[str]:
        """Return the sorted names of the directories in a directory, links left out."""
        try:
            with os.scandir(self._prefix + path) as entries:
                return sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
        except OSError:
            return []

    def writable(self, path: str) -> bool:
        """Whether we may write the file, or make entries in the directory."""
        return os.access(self._prefix + path, os.W_OK)

    def delegated(self, path: str) -> bool:
        """Whether systemd has marked a control group as its owner's to divide."""
        for mark in _DELEGATION_MARKS:
            try:
                if os.getxattr(self._prefix + path, mark) == b"1":
                    return True
            except OSError:
                continue
        return False

    @property
    def page_bytes(self) -> int | None:
        """The running kernel's page size, None for a recorded machine."""
        return os.sysconf("SC_PAGE_SIZE") if self.live else None

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a directory, none if it is absent."""
        try:
            return sorted(os.listdir(self.root / path))
        except OSError:
            return []

    def write(self, path: str, text: str) -> None:
        """Write `text` into a kernel file in one call; raises OSError with the kernel's errno."""
        descriptor = os.open(self.root / path, os.O_WRONLY)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def make_directory(self, path: str) -> None:
        """Make a directory, e.g. a resctrl group; raises OSError."""
        os.mkdir(self.root / path)

    def remove_directory(self, path: str) -> None:
        """Remove a directory that the kernel populates; raises OSError."""
        os.rmdir(self.root / path)

    def command_line(self, pid: int) -> tuple[str, ...] | None:
        """Return the arguments of a process; None once it has ended, () for a zombie."""
        text = self.read(f"proc/{pid}/cmdline")
        if text is None:
            return None
        return tuple(text.removesuffix("\0").split("\0")) if text else ()

    def status_field(self, pid: int | str, field: str) -> str | None:
        """Return a field of `/proc/<pid>/status`, e.g. `Cpus_allowed_list`; None if absent."""
        text = self.read(f"proc/{pid}/status")
        for line in (text or "").splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return value.strip()
        return None

    def memory_policies(self, pid: int) -> tuple[str, ...] | None:
        """Return the memory policy of each mapping of a process, e.g. `bind:0`.

        None if the kernel does not say, or not to us.
        """
        text = self.read(f"proc/{pid}/numa_maps")
        if not text:
            return None
        return tuple(line.split(" ", 2)[1] for line in text.splitlines() if line.count(" ") >= 1)
