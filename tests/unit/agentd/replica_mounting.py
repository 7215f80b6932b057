"""Real tmpfs mounts that are bound to a node, for tests that may make them; and a small model."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentd.core.topology import Overrides
from agentd.filler.mounted import mount_at
from agentd.filler.run import Source
from agentd.hostfs import HostFs
from agentd.probes import discover
from agentd.replica_mounts import options_for

TOPOLOGY = discover(HostFs(), Overrides())
DOMAIN = next(iter(TOPOLOGY.domains.values()))
MIB = 1 << 20


@functools.cache
def why_no_mounts() -> str:
    """Return why bound tmpfs cannot be mounted here, '' if they can."""
    if os.geteuid() != 0:
        return "mounting needs root"
    if not TOPOLOGY.numa:
        return "the kernel has no NUMA nodes"
    with tempfile.TemporaryDirectory() as directory:
        options = options_for(DOMAIN.domain, MIB, huge=False)
        command = ("mount", "-t", "tmpfs", "-o", options, "tmpfs", directory)
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            return f"a bound tmpfs cannot be mounted: {ran.stderr.strip()}"
        subprocess.run(("umount", directory), check=True)
    return ""


def mounted(at: Path, size: int = 64 * MIB) -> Iterator[Path]:
    """Yield `at` with a bound tmpfs on it; unmount all that is there then."""
    if why_no_mounts():
        pytest.skip(why_no_mounts())
    at.mkdir(parents=True, exist_ok=True)
    options = options_for(DOMAIN.domain, size, huge=False)
    subprocess.run(("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at)), check=True)
    try:
        yield at
    finally:
        unmount_all(at)


def unmount_all(at: Path) -> None:
    while mount_at(HostFs(), at) is not None:
        subprocess.run(("umount", "--lazy", str(at)), check=True)


def model_at(path: Path, size: int = 3 * MIB + 123, seed: int = 1) -> Source:
    """Write a file that is a model as far as replicas care."""
    data = random.Random(seed).randbytes(size)
    path.write_bytes(data)
    return Source(path, size, hashlib.sha256(data).hexdigest())
