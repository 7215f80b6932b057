"""What is mounted where."""

from __future__ import annotations

from dataclasses import dataclass

from agentd.hostfs import HostFs


@dataclass(slots=True, frozen=True)
class Mount:
    """`at` is relative to the machine's root."""

    at: str
    kind: str
    options: frozenset[str]


def mounts_of(host: HostFs) -> list[Mount]:
    """Return the mounts that we see, or those of the whole recorded machine."""
    text = host.read("proc/self/mounts") or host.read("proc/mounts") or ""
    found = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 4:
            found.append(Mount(fields[1].lstrip("/"), fields[2], frozenset(fields[3].split(","))))
    return found
