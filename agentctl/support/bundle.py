"""An archive of what somebody who cannot log in here needs to see."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import tarfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentctl.doctor.host import ask
from agentctl.support.redaction import redact
from corefleet.errors import CorefleetError

UNITS = ("agentd", "corefleet-heartbeat", "controld", "corefleet-etcd", "corefleet-nats")
CONFIGS = ("agentd.toml", "controld.toml", "models.toml", "nats.conf", "etcd.yaml")
_JOURNAL_LINES = "2000"
_MOST_BYTES = 4 << 20
"""Of one file; of longer ones the end is kept."""


@dataclass(slots=True)
class Bundle:
    """Files by name, redacted as they are added, and why others are missing."""

    files: dict[str, bytes] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, text: str) -> None:
        raw = redact(text).encode("utf-8", "replace")
        self.files[name] = raw[-_MOST_BYTES:]

    def lacks(self, name: str, why: str) -> None:
        self.missing[name] = redact(why)

    def write(self, path: Path, now_s: int) -> None:
        """Write the archive; only its owner may read it. Raises OSError."""
        manifest = {"files": sorted(self.files), "missing": self.missing}
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w") as archive:
            for name, data in [
                *sorted(self.files.items()),
                ("manifest.json", json.dumps(manifest, indent=2, sort_keys=True).encode()),
            ]:
                entry = tarfile.TarInfo(f"{path.name.partition('.')[0]}/{name}")
                entry.size, entry.mtime, entry.mode = len(data), now_s, 0o600
                archive.addfile(entry, io.BytesIO(data))
        path.touch(mode=0o600, exist_ok=False)
        path.write_bytes(gzip.compress(raw.getvalue(), mtime=now_s))


Collect = Callable[[], Awaitable[str]]


async def collect(bundle: Bundle, name: str, source: Collect) -> None:
    """Add what `source` returns as `name`, or why it could not."""
    try:
        bundle.add(name, await source())
    except (CorefleetError, OSError) as error:
        bundle.lacks(name, str(error))


async def of_system(bundle: Bundle) -> None:
    """Add what the system says of our units and of this machine."""
    commands: dict[str, Sequence[str]] = {
        "system/uname.txt": ("uname", "-a"),
        "system/units.txt": ("systemctl", "status", "--no-pager", "--full", *UNITS),
        "system/slices.txt": ("systemd-cgls", "--no-pager", "/corefleet.slice"),
        "system/clock.txt": ("timedatectl", "show"),
        "system/memory.txt": ("numactl", "--hardware"),
    }
    for unit in UNITS:
        commands[f"journal/{unit}.txt"] = (
            *("journalctl", "--no-pager", "--output", "short-iso-precise"),
            *("--lines", _JOURNAL_LINES, "--unit", unit),
        )
    said = await asyncio.gather(*(ask(*command) for command in commands.values()))
    for name, (code, text) in zip(commands, said, strict=True):
        if code == 127:
            bundle.lacks(name, text)
        else:
            bundle.add(name, text)


async def of_configuration(bundle: Bundle, directory: Path) -> None:
    """Add the configuration files; keys and certificates are never read."""
    for name in CONFIGS:
        await collect(
            bundle,
            f"config/{name}",
            lambda path=directory / name: asyncio.to_thread(path.read_text),  # type: ignore[misc]
        )
