"""Copies a model into its domain's tmpfs, verifies bytes and pages, and only then names it.

A program of its own because pages go where the writer's cpuset lets them, and are charged to
the writer: it runs in a unit that is bound to the domain and has no memory limit.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from agentd.filler.mounted import mount_at, wrong_mount
from agentd.filler.record import (
    Exit,
    Failure,
    Verified,
    clear,
    failure_path,
    part_path,
    read_verified,
    verified_path,
)
from agentd.hostfs import HostFs

_CHUNK_BYTES = 4 << 20
_MAPS = "proc/self/numa_maps"
_MOST_MAPS_BYTES = 16 << 20
_FULL = (errno.ENOSPC, errno.ENOMEM)


class FillRefused(Exception):
    """The replica is not to be used; `code` says what kind of trouble it is."""

    def __init__(self, code: Exit, why: str) -> None:
        super().__init__(why)
        self.code = code


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to fill: `target` is made of `source`, if that is `size_bytes` with `sha256`."""

    model: str
    source: Path
    target: Path
    size_bytes: int
    sha256: str
    domain: int
    cpus: str = ""
    """Only shown in the list of processes."""

    def command(self) -> tuple[str, ...]:
        """Return the arguments after `python -m`."""
        return (
            *("agentd.filler", "--model", self.model),
            *("--source", str(self.source), "--target", str(self.target)),
            *("--size", str(self.size_bytes), "--sha256", self.sha256),
            *("--domain", str(self.domain), "--cpus", self.cpus),
        )


def main(arguments: list[str] | None = None) -> int:
    """Fill as the command line says; one line on stderr, and why in a file, when that fails."""
    order = _parse(arguments)
    try:
        fill(order, HostFs())
    except FillRefused as refused:
        _tell(order, refused.code, str(refused))
        return refused.code
    return Exit.RIGHT


def fill(order: Order, host: HostFs) -> Verified:
    """Make the replica, or find the one that is there right. Blocks. Raises FillRefused.

    Nothing of it is left when that fails.
    """
    target = order.target
    wrong = wrong_mount(mount_at(host, target.parent), order.domain)
    if wrong is not None:
        raise FillRefused(Exit.UNMOUNTED, f"{target.parent}: {wrong}")
    try:
        with _alone(target):
            known = read_verified(target, order.sha256, order.size_bytes)
            try:
                if known is None:
                    clear(target)
                    _copy(order)
                else:
                    target.replace(part_path(target))
                return _name(order, _placed(order, host))
            except BaseException:  # Whatever ended this: no half of a replica may stay.
                clear(target)
                raise
    except OSError as error:
        code = Exit.NO_ROOM if error.errno in _FULL else Exit.UNVERIFIABLE
        raise FillRefused(code, f"{target}: {error.strerror or error}") from error


def pages_by_node(numa_maps: str, path: Path) -> dict[int, int]:
    """Return how many pages of a file numa_maps(5) shows on each node, in smallest pages."""
    name = f"file={_escaped(str(path))}"
    found: dict[int, int] = {}
    for line in numa_maps.splitlines():
        fields = line.split(" ")
        if name not in fields:
            continue
        for field in fields:
            node, equals, count = field.partition("=")
            if equals and node[:1] == "N" and node[1:].isdecimal() and count.isdecimal():
                found[int(node[1:])] = found.get(int(node[1:]), 0) + int(count)
    return found


def _copy(order: Order) -> None:
    """Write the part file, hashing what is read; raises FillRefused for another content."""
    try:
        source = order.source.open("rb", buffering=0)
    except OSError as error:
        raise FillRefused(Exit.SOURCE, f"{order.source}: {error.strerror}") from error
    with source, part_path(order.target).open("wb", buffering=0) as sink:
        size = os.fstat(source.fileno()).st_size
        if size != order.size_bytes:
            raise FillRefused(
                Exit.CORRUPT, f"{order.source}: {size} bytes; expected {order.size_bytes}"
            )
        # Huge pages come only within a file's size, so that is set before the first byte.
        os.ftruncate(sink.fileno(), order.size_bytes)
        digest = hashlib.sha256()
        done = 0
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        while count := _read(order, source.fileno(), buffer):
            chunk = buffer[:count]
            digest.update(chunk)
            while chunk:
                chunk = chunk[os.write(sink.fileno(), chunk) :]
            done += count
        os.fchmod(sink.fileno(), 0o444)
    if (done, digest.hexdigest()) != (order.size_bytes, order.sha256):
        raise FillRefused(
            Exit.CORRUPT,
            f"{order.source}: {done} bytes with sha256 {digest.hexdigest()}; "
            f"expected {order.size_bytes} with {order.sha256}",
        )


def _read(order: Order, descriptor: int, buffer: memoryview) -> int:
    try:
        return os.readv(descriptor, [buffer])
    except OSError as error:
        raise FillRefused(Exit.SOURCE, f"{order.source}: {error.strerror}") from error


def _placed(order: Order, host: HostFs) -> dict[int, int]:
    """Return the part file's pages by node; raises FillRefused unless all are on the domain's."""
    part = part_path(order.target)
    pages = -(-order.size_bytes // mmap.PAGESIZE)
    if not pages:
        return {}
    with part.open("rb") as file:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        with mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ) as mapped:
            # Populating may stop half way and say nothing; a touched page is there.
            len(mapped[:: mmap.PAGESIZE])
            text = host.read(_MAPS, _MOST_MAPS_BYTES)
    found = pages_by_node(text or "", part)
    astray = {node: count for node, count in found.items() if node != order.domain}
    if astray:
        where = ", ".join(f"{count} pages on node {node}" for node, count in sorted(astray.items()))
        raise FillRefused(
            Exit.MISPLACED, f"misplaced: {where}; expected all {pages} on node {order.domain}"
        )
    if sum(found.values()) != pages:
        raise FillRefused(
            Exit.UNVERIFIABLE,
            f"numa_maps shows {sum(found.values())} of {pages} pages of {part.name}",
        )
    return found


def _name(order: Order, pages: dict[int, int]) -> Verified:
    """Give a verified part file its name, with its record beside it."""
    part, target = part_path(order.target), order.target
    status = part.stat()
    record = Verified(
        model=order.model,
        sha256=order.sha256,
        size_bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
        pages=pages,
    )
    _write(verified_path(target), msgspec.json.encode(record))
    failure_path(target).unlink(missing_ok=True)
    part.replace(target)
    return record


def _write(path: Path, data: bytes) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_bytes(data)
    fresh.replace(path)


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Raises FillRefused while another filler, e.g. one of an agentd before, makes `target`."""
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FillRefused(Exit.BUSY, f"{target}: another filler is at it") from None
        yield


def _tell(order: Order, code: Exit, why: str) -> None:
    sys.stderr.write(f"filler: {why}\n")
    if code is not Exit.UNMOUNTED:
        # The exit code tells the kind of trouble, if even this does not fit.
        with contextlib.suppress(OSError):
            _write(failure_path(order.target), msgspec.json.encode(Failure(why=why)))


def _escaped(path: str) -> str:
    """Return a path as the kernel's seq_file_path spells it: tab, newline, space and backslash."""
    special = {"\\": "\\134", "\n": "\\012", "\t": "\\011", " ": "\\040"}
    return "".join(special.get(char, char) for char in path)


def _parse(arguments: list[str] | None) -> Order:
    parser = argparse.ArgumentParser(prog="agentd.filler", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--size", type=int, required=True, help="expected bytes")
    parser.add_argument("--sha256", required=True, help="expected digest")
    parser.add_argument("--domain", type=int, required=True)
    parser.add_argument("--cpus", default="", help="shown in the list of processes")
    asked = parser.parse_args(arguments)
    return Order(
        model=asked.model,
        source=asked.source,
        target=asked.target,
        size_bytes=asked.size,
        sha256=asked.sha256,
        domain=asked.domain,
        cpus=asked.cpus,
    )
