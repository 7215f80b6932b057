"""What is written beside a replica once it is verified, and how the filler ends."""

from __future__ import annotations

import contextlib
import enum
from pathlib import Path

import msgspec


class Exit(enum.IntEnum):
    """Exit codes of the filler; 1 is a defect, 2 a wrong command line."""

    RIGHT = 0
    SOURCE = 10
    """The source cannot be read."""
    CORRUPT = 11
    """The source is not the model: other size or digest."""
    MISPLACED = 12
    """Pages lie on another node."""
    NO_ROOM = 13
    """The tmpfs or the node is full."""
    UNVERIFIABLE = 14
    """The kernel does not say where the pages lie."""
    BUSY = 15
    """Another filler is at it."""
    UNMOUNTED = 16
    """The target is not on a tmpfs that is bound to the domain."""


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that was found to be right: its bytes, and where its pages lie."""

    model: str
    sha256: str
    size_bytes: int
    modified_ns: int
    pages: dict[int, int]
    """By NUMA node, in pages of the kernel's smallest size."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why the last fill of a replica failed."""

    why: str


def verified_path(target: Path) -> Path:
    """Return where the Verified of a replica lies."""
    return target.with_name(f".{target.name}.verified")


def failure_path(target: Path) -> Path:
    """Return where the Failure of a replica lies."""
    return target.with_name(f".{target.name}.failed")


def part_path(target: Path) -> Path:
    """Return what a replica is called while it is filled."""
    return target.with_name(f".{target.name}.part")


def read_verified(target: Path, sha256: str, size_bytes: int) -> Verified | None:
    """Return the record of a replica that is there and still as it was verified.

    None for one that is missing, was changed since, or is another model's.
    """
    with contextlib.suppress(OSError, msgspec.DecodeError):
        record = msgspec.json.decode(verified_path(target).read_bytes(), type=Verified)
        status = target.stat()
        now = (status.st_size, status.st_mtime_ns)
        if (record.sha256, record.size_bytes) == (sha256, size_bytes) and now == (
            record.size_bytes,
            record.modified_ns,
        ):
            return record
    return None


def read_failure(target: Path) -> str:
    """Return why the last fill failed, '' if it does not say."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(failure_path(target).read_bytes(), type=Failure).why
    return ""


def clear(target: Path, keep_failure: bool = False) -> None:
    """Remove a replica and all that belongs to it; no matter what is there. Raises OSError."""
    doomed = [target, part_path(target), verified_path(target)]
    if not keep_failure:
        doomed.append(failure_path(target))
    for path in doomed:
        path.unlink(missing_ok=True)
