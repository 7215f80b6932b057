"""Finds or builds the portable wheel of llama-cpp-python and prints its directory.

    python -m tools.wheelhouse           # build if it is not cached (about 10 minutes)
    python -m tools.wheelhouse --find    # exit 1 if it is not cached

llama-cpp-python comes as source only, and its own default build runs on the building
machine's CPU and newer ones only. This one carries a variant for each CPU generation and
chooses at run time. Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
VERSION = "0.3.36"
CMAKE_ARGS = (
    "-DGGML_NATIVE=OFF",
    "-DGGML_BACKEND_DL=ON",
    "-DGGML_CPU_ALL_VARIANTS=ON",
    "-DLLAVA_BUILD=OFF",
    "-DCMAKE_INSTALL_BINDIR=llama_cpp/lib",
    "-DCMAKE_INSTALL_LIBDIR=llama_cpp/lib",
    "-DCMAKE_INSTALL_INCLUDEDIR=llama_cpp/include",
    "-DCMAKE_INSTALL_RPATH=$ORIGIN",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_TOOLS=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
)

_BEAT_S = 10.0
_NINJA_LINE = re.compile(r"(\[\d+/\d+\]) .*?([\w.-]+)$")

# Loads the libraries as the engine does and counts the CPU variants that this machine can use.
_VERIFY = """
import ctypes, sys
lib = sys.argv[1]
llama = ctypes.CDLL(lib + "/libllama.so")
ggml = ctypes.CDLL(lib + "/libggml.so")
ggml.ggml_backend_load_all_from_path(lib.encode())
ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
sys.exit(0 if ggml.ggml_backend_dev_count() >= 1 else "no CPU variant runs on this machine")
"""


class BuildFailed(Exception):
    """The wheel could not be built or does not work; names the log."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to build, and for whom."""

    version: str = VERSION
    cmake_args: tuple[str, ...] = CMAKE_ARGS
    python_tag: str = f"cp{sys.version_info.major}{sys.version_info.minor}"
    machine: str = platform.machine()

    @property
    def key(self) -> str:
        """Name of the wheel's directory: another recipe is another wheel."""
        digest = hashlib.sha256(" ".join(self.cmake_args).encode()).hexdigest()[:8]
        return f"llama-cpp-python-{self.version}-{self.python_tag}-{self.machine}-{digest}"

    def command(self, into: Path) -> list[str]:
        """Return the build's command line; pip's own wheel cache knows nothing of the recipe."""
        return [
            *(sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-cache-dir"),
            *("--disable-pip-version-check", "-w", str(into)),
            f"llama-cpp-python=={self.version}",
        ]


def wheels_dir() -> Path:
    """Return the directory of all wheels, in corefleet's cache."""
    cache_dir: Callable[[], Path] = runpy.run_path(str(ROOT / "corefleet" / "paths.py"))[
        "cache_dir"
    ]
    return cache_dir() / "wheels"


def find(recipe: Recipe, wheels: Path) -> Path | None:
    """Return the directory that holds the recipe's wheel, or None."""
    directory = wheels / recipe.key
    return directory if any(directory.glob("*.whl")) else None


def ensure(
    recipe: Recipe,
    wheels: Path,
    out: TextIO,
    *,
    command: Callable[[Path], Sequence[str]] | None = None,
    verify: Callable[[Path], None] | None = None,
) -> Path:
    """Return the directory that holds the recipe's wheel, building it if need be.

    Processes that ask at the same time build once. Progress goes to `out`. Raises
    BuildFailed; then nothing but the log is left behind.
    """
    wheels.mkdir(parents=True, exist_ok=True)
    with _locked(wheels / f".{recipe.key}.lock", out):
        found = find(recipe, wheels)
        if found is not None:
            return found
        for stale in wheels.glob(f".{recipe.key}.build-*"):
            shutil.rmtree(stale)
        scratch = Path(tempfile.mkdtemp(prefix=f".{recipe.key}.build-", dir=wheels))
        try:
            log = wheels / f"{recipe.key}.log"
            made = scratch / "wheel"
            made.mkdir()
            _build((command or recipe.command)(made), recipe, scratch, log, out)
            built = list(made.glob("*.whl"))
            if len(built) != 1:
                raise BuildFailed(f"the build made {len(built)} wheels, not one; see {log}")
            (verify or verify_wheel)(built[0])
            made.rename(wheels / recipe.key)
        finally:
            shutil.rmtree(scratch)
        return wheels / recipe.key


def verify_wheel(wheel: Path) -> None:
    """Load the wheel's libraries in another process; raises BuildFailed."""
    with tempfile.TemporaryDirectory() as scratch:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch)
        run = subprocess.run(
            [sys.executable, "-c", _VERIFY, f"{scratch}/llama_cpp/lib"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    if run.returncode != 0:
        said = (run.stderr or run.stdout).strip()
        raise BuildFailed(f"{wheel.name} does not load (status {run.returncode}): {said}")


def _build(command: Sequence[str], recipe: Recipe, scratch: Path, log: Path, out: TextIO) -> None:
    environment = {
        **os.environ,
        "CMAKE_ARGS": " ".join(recipe.cmake_args),
        "CMAKE_BUILD_PARALLEL_LEVEL": str(len(os.sched_getaffinity(0))),
        "TMPDIR": str(scratch),
    }
    print(
        f"building llama-cpp-python {recipe.version} once for this machine and caching it:",
        file=out,
    )
    print(f"about 10 minutes on two cores; full output in {log}", file=out, flush=True)
    started = time.monotonic()
    last = "fetching the source"
    done = threading.Event()

    def beat() -> None:
        while not done.wait(_BEAT_S):
            print(f"  {_elapsed(started)}  {last}", file=out, flush=True)

    beats = threading.Thread(target=beat, name="build-progress")
    with log.open("w", encoding="utf-8") as kept, _running(command, environment) as process:
        beats.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                kept.write(line)
                step = _NINJA_LINE.search(line.strip())
                if step is not None:
                    last = f"{step[1]} {step[2]}"
            status = process.wait()
        finally:
            done.set()
            beats.join()
    if status != 0:
        tail = "".join(log.read_text(encoding="utf-8").splitlines(keepends=True)[-25:])
        raise BuildFailed(
            f"the build ended with status {status}; its last lines:\n{tail}\nsee {log}"
        )
    print(f"built in {_elapsed(started)}", file=out, flush=True)


@contextlib.contextmanager
def _running(
    command: Sequence[str], environment: dict[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """Run the command in a process group of its own, which ends when the block does."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 15)


@contextlib.contextmanager
def _locked(path: Path, out: TextIO) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another build of the same wheel", file=out, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _elapsed(since: float) -> str:
    seconds = int(time.monotonic() - since)
    return f"{seconds // 60}m{seconds % 60:02d}s"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools.wheelhouse",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--find", action="store_true", help="never build; exit 1 if not cached")
    recipe = Recipe()
    wheels = wheels_dir()
    if parser.parse_args(arguments).find:
        found = find(recipe, wheels)
        if found is not None:
            print(found)
        return 0 if found is not None else 1
    try:
        print(ensure(recipe, wheels, sys.stderr))
    except BuildFailed as error:
        print(f"wheelhouse: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
