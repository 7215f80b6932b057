"""Files of keys and certificates: never readable by others, written whole or not at all.

A pair of key and certificate cannot be replaced by two renames: a crash between them would
leave a key beside the other one's certificate. So each pair lies in a directory of its own, and
one symbolic link, `.agentd`, says which is the current one:

    agentd.pem -> .agentd/agentd.pem      .agentd -> .agentd-5f0c2d19a7b3
    agentd.key -> .agentd/agentd.key      .agentd-5f0c2d19a7b3/{agentd.pem,agentd.key}
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from corefleet.errors import InvalidInput

BUNDLE = "ca.pem"
"""The name of the file of trusted CAs, on every host and beside everything issued."""
SECRET = 0o600
SECRET_FOR_GROUP = 0o640
PUBLIC = 0o644
_PRIVATE_DIRECTORY = 0o700
_PUBLIC_DIRECTORY = 0o755


def group_id(name: str | None) -> int | None:
    """Return the id of the group that may read a key; raises InvalidInput when there is none."""
    if name is None:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise InvalidInput("group", name, "a group of this machine") from None


def read(field: str, path: Path) -> bytes:
    """Return what a file holds; raises InvalidInput naming field and path."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(field, str(path), f"a readable file ({error.strerror})") from None


def make_directory(path: Path, private: bool) -> None:
    """Make `path` and its parents, with its mode whatever the umask; a kept one stays as it is."""
    if path.is_dir():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = _PRIVATE_DIRECTORY if private else _PUBLIC_DIRECTORY
    os.mkdir(path, mode & _PRIVATE_DIRECTORY)
    os.chmod(path, mode)
    sync_directory(path.parent)


def write(path: Path, data: bytes, mode: int, gid: int | None = None) -> None:
    """Put a file in place as a whole: readers and a crash see the old content or the new."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        create(fresh, data, mode, gid)
        os.replace(fresh, path)
    except BaseException:  # whatever stops this, nothing half made may stay
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)
        raise
    sync_directory(path.parent)


def write_if_other(path: Path, data: bytes, mode: int) -> bool:
    """Write unless the file holds `data` already; returns whether it was written."""
    if path.exists() and path.read_bytes() == data:
        return False
    write(path, data, mode)
    return True


def create(path: Path, data: bytes, mode: int, gid: int | None = None) -> None:
    """Write a file that is not there yet, synced; only its owner can open it before it is whole."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, mode & SECRET), "wb") as file:
        file.write(data)
        file.flush()
        if gid is not None:
            os.fchown(file.fileno(), -1, gid)
        # After the group is set, and whatever the umask took away.
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make the names of a directory survive a loss of power."""
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; waits for whoever holds it."""
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, SECRET)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def write_pair(
    directory: Path, stem: str, cert_pem: bytes, key_pem: bytes, gid: int | None = None
) -> None:
    """Put `stem`.pem and `stem`.key in place as one: never a key beside another's certificate.

    The key is readable by its owner, and with `gid` by that group.
    """
    make_directory(directory, private=False)
    current = directory / f".{stem}"
    fresh = directory / f".{stem}-{secrets.token_hex(6)}"
    link = directory / f".{stem}-{secrets.token_hex(6)}"
    try:
        os.mkdir(fresh, _PRIVATE_DIRECTORY)
        mode = SECRET if gid is None else SECRET_FOR_GROUP
        create(fresh / f"{stem}.key", key_pem, mode, gid)
        create(fresh / f"{stem}.pem", cert_pem, PUBLIC)
        os.chmod(fresh, _PUBLIC_DIRECTORY)
        sync_directory(fresh)
        _drop_plain_pair(directory, stem)
        os.symlink(fresh.name, link)
        os.replace(link, current)
    except BaseException:  # whatever stops this, nothing half made may stay
        with contextlib.suppress(FileNotFoundError):
            os.unlink(link)
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    for name in (f"{stem}.pem", f"{stem}.key"):
        _point(directory / name, f"{current.name}/{name}")
    sync_directory(directory)
    _drop_leftovers(directory, stem, fresh)


def _drop_leftovers(directory: Path, stem: str, kept: Path) -> None:
    """Remove the pair before, and what crashes left."""
    for pattern in (f".{stem}-*", f".{stem}.pem.*", f".{stem}.key.*"):
        for left in directory.glob(pattern):
            if left.is_symlink():
                left.unlink()
            elif left != kept:
                shutil.rmtree(left, ignore_errors=True)


def _drop_plain_pair(directory: Path, stem: str) -> None:
    """Remove files that something else put there; the certificate first, so that none misfits."""
    for name in (f"{stem}.pem", f"{stem}.key"):
        path = directory / name
        if path.exists() and not path.is_symlink():
            path.unlink()


def _point(path: Path, target: str) -> None:
    if path.is_symlink() and os.readlink(path) == target:
        return
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    os.symlink(target, fresh)
    try:
        os.replace(fresh, path)
    except BaseException:  # whatever stops this, nothing half made may stay
        os.unlink(fresh)
        raise
