"""Model files: fetched from the sources that models.toml names, and verified.

    python -m corefleet.models fetch NAME [--models configs/models.toml] [--dir DIR]

Everything here blocks; call it from a thread or a command line.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from corefleet import model_sources
from corefleet.config import ModelConfig, cache_dir, load_models
from corefleet.errors import CorefleetError, ModelUnusable, NotFound
from corefleet.model_sources import SourceFailed, fetch, hub_scratch, spell, write_whole

_LINE_EVERY_S = 10.0


class _Seen(msgspec.Struct, frozen=True):
    """A file that was found to be right, so that it is not read whole at every start."""

    sha256: str
    size_bytes: int
    modified_ns: int


def ensure(
    name: str, config: ModelConfig, directory: Path, progress: model_sources.Progress
) -> Path:
    """Return the path of the model's verified file in `directory`, fetching it if need be.

    A fetch that was interrupted goes on where it was. Raises ModelUnusable naming every
    source that was tried and why it did not serve. `progress` is called from any thread.
    """
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / config.file
    with _locked(directory / f".{config.file}.lock"):
        if verify(target, config) is None:
            return target
        reasons = []
        for source in config.sources:
            try:
                fetched = fetch(source, config, directory, progress)
                wrong = _mismatch(fetched, config)
                if wrong is not None:
                    if directory in fetched.parents:
                        fetched.unlink()
                    raise SourceFailed(wrong)
            except (SourceFailed, OSError) as failure:
                reasons.append(f"{spell(source)}: {failure}")
                continue
            _place(fetched, target, directory)
            shutil.rmtree(hub_scratch(directory, config), ignore_errors=True)
            _remember(target, config)
            progress(config.size_bytes, config.size_bytes)
            return target
    tried = "".join(f"\n  {reason}" for reason in reasons) or " none is configured"
    raise ModelUnusable(f"model {name}: no source has {config.file}:{tried}")


def verify(path: Path, config: ModelConfig) -> str | None:
    """Return what is wrong with the file at `path`, or None if it is the one named.

    A file is read whole once, and again when its size or time of change is another.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return f"{path}: no such file"
    seen = _Seen(config.sha256, status.st_size, status.st_mtime_ns)
    marker = _marker(path)
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        if msgspec.json.decode(marker.read_bytes(), type=_Seen) == seen:
            return None
    wrong = _mismatch(path, config)
    if wrong is None:
        with contextlib.suppress(OSError):  # A read-only directory only costs the next check.
            _remember(path, config)
    return wrong


def _mismatch(path: Path, config: ModelConfig) -> str | None:
    size = path.stat().st_size
    if size != config.size_bytes:
        return f"{path}: {size} bytes; expected {config.size_bytes}"
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != config.sha256:
        return f"{path}: sha256 {digest}; expected {config.sha256}"
    return None


def _place(fetched: Path, target: Path, directory: Path) -> None:
    """Put the verified file at `target` by rename: a mapped file is never written to."""
    if directory in fetched.parents:
        fetched.replace(target)
        return
    with tempfile.TemporaryDirectory(prefix=".copy-", dir=directory) as scratch:
        copy = Path(scratch) / target.name
        shutil.copyfile(fetched, copy)
        copy.replace(target)


def _marker(path: Path) -> Path:
    return path.with_name(f".{path.name}.verified")


def _remember(path: Path, config: ModelConfig) -> None:
    status = path.stat()
    seen = _Seen(config.sha256, status.st_size, status.st_mtime_ns)
    write_whole(_marker(path), msgspec.json.encode(seen))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _shown(name: str, total: int) -> Iterator[model_sources.Progress]:
    """Yield a progress callback: a bar on a terminal, else a line every ten seconds."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
        )
        with Progress(*columns, console=console) as bars:
            bar = bars.add_task(f"model {name}", total=total)
            yield lambda done, _: bars.update(bar, completed=done)
        return
    last = time.monotonic()

    def line(done: int, _: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _LINE_EVERY_S:
            last = time.monotonic()
            console.print(f"model {name}: {done >> 20} of {total >> 20} MiB", highlight=False)

    yield line


def main(arguments: list[str] | None = None) -> int:
    """Fetch a model and print its path; 1 and a message on stderr when that fails."""
    parser = argparse.ArgumentParser(prog="corefleet.models")
    verbs = parser.add_subparsers(dest="verb", required=True)
    fetching = verbs.add_parser("fetch", help="fetch a model unless it is there; print its path")
    fetching.add_argument("name")
    fetching.add_argument("--models", type=Path, default=Path("configs/models.toml"))
    fetching.add_argument("--dir", type=Path, default=cache_dir() / "models")
    asked = parser.parse_args(arguments)
    try:
        known = load_models(asked.models)
        if asked.name not in known:
            raise NotFound(
                f"model {asked.name!r} is not in {asked.models}; it has: {', '.join(known)}"
            )
        with _shown(asked.name, known[asked.name].size_bytes) as progress:
            path = ensure(asked.name, known[asked.name], asked.dir, progress)
    except CorefleetError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
