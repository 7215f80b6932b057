"""Things that are made once and kept: each in a directory named by what it was made from."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from corefleet.paths import cache_dir

LOG = "make.log"
"""Where a maker writes what its programs said; kept beside the directory if it fails."""

_KEY_DIGITS = 16


def guest_cache() -> Path:
    """Return the directory of everything that guests are made of."""
    return cache_dir() / "guest"


def key_of(*parts: str | bytes) -> str:
    """Return a short digest of all parts, in order."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:_KEY_DIGITS]


def made_once(name: str, make: Callable[[Path], None], cache: Path | None = None) -> Path:
    """Return the directory `name` of the cache, filled by `make(scratch)` if it is not there.

    Processes that ask at the same time make it once. A directory with its final name is
    always whole: what an interrupted run left has another name and is thrown away here.
    """
    cache = cache or guest_cache()
    final = cache / name
    cache.mkdir(parents=True, exist_ok=True)
    if not final.is_dir():
        with _locked(_lock_of(final), fcntl.LOCK_EX):
            if not final.is_dir():
                _make(final, make)
    os.utime(final)
    return final


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Keep a directory of the cache from being removed by `keep_newest`."""
    with _locked(_lock_of(directory), fcntl.LOCK_SH):
        yield


def keep_newest(cache: Path, prefix: str, count: int) -> None:
    """Remove all but the `count` last used directories `prefix*`; those held stay too."""
    made = sorted(cache.glob(f"{prefix}*/"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in made[count:]:
        with suppress(BlockingIOError), _locked(_lock_of(old), fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(old)


def _make(final: Path, make: Callable[[Path], None]) -> None:
    for stale in final.parent.glob(f".{final.name}.making-*"):
        shutil.rmtree(stale)
    scratch = Path(tempfile.mkdtemp(prefix=f".{final.name}.making-", dir=final.parent))
    try:
        scratch.chmod(0o755)
        make(scratch)
        scratch.rename(final)
    except BaseException:  # interrupted, too: half of it must not stay
        with suppress(FileNotFoundError):
            (scratch / LOG).replace(final.parent / f"{final.name}.failed.log")
        shutil.rmtree(scratch)
        raise


def _lock_of(directory: Path) -> Path:
    return directory.parent / f".{directory.name}.lock"


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    """Hold a file lock; the kernel drops it when the process dies."""
    with path.open("a") as lock:
        fcntl.flock(lock, how)
        yield
