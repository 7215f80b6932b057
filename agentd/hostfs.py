"""The only reader of the kernel's files: /sys and /proc under one injectable root."""

from __future__ import annotations

import os
from pathlib import Path

_MOST_BYTES = 1 << 20


class HostFs:
    """A machine's files, as they are now or as they were recorded under `root`.

    Paths are relative: `sys/devices/system/node/online`. What is missing, unreadable or
    no text is absent, which is normal: kernels differ.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

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
