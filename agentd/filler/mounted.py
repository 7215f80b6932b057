"""What is mounted where replicas are to lie, and whether it is right for them."""

from __future__ import annotations

import re
from pathlib import Path

from agentd.hostfs import HostFs
from agentd.probes.mounts import Mount, mounts_of

MARGIN_BYTES = 16 << 20
"""Room in a domain's tmpfs beside the replicas, for what is known of them."""

_OCTAL = re.compile(r"\\([0-7]{3})")
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def mount_at(host: HostFs, at: Path) -> Mount | None:
    """Return what is mounted at a path, the last one that was; None if nothing is."""
    wanted = str(at).lstrip("/")
    found = [mount for mount in mounts_of(host) if _spelled(mount.at) == wanted]
    return found[-1] if found else None


def wrong_mount(mount: Mount | None, domain: int) -> str | None:
    """Return why replicas of `domain` cannot lie in a mount, None if they can."""
    if mount is None:
        return "nothing is mounted there"
    if mount.kind != "tmpfs":
        return f"a {mount.kind} is mounted there; expected a tmpfs"
    policies = [option for option in mount.options if option.startswith("mpol=")]
    if policies != [f"mpol=bind:{domain}"]:
        shown = policies[0] if policies else "no mpol="
        return f"it is mounted with {shown}; expected mpol=bind:{domain}"
    return None


def mount_size(mount: Mount) -> int:
    """Return the bytes that replicas may take of a tmpfs, 0 when it does not say its size."""
    for option in mount.options:
        match = re.fullmatch(r"size=(\d+)([kmg]?)", option)
        if match:
            size = int(match[1]) * _UNITS.get(match[2], 1)
            return max(0, size - MARGIN_BYTES)
    return 0


def _spelled(text: str) -> str:
    """Undo the octal escapes of proc_mounts(5)."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
