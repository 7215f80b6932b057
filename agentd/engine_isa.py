"""Whether the installed build of llama.cpp runs on this CPU, known before an engine starts."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from agentd.core.engine_isa import refusal_by_names, variants_of
from agentd.core.topology import Topology
from agentd.engine_probe import EXIT_NO_VARIANT, EXIT_UNLOADABLE

PROBE_TIMEOUT_S = 30.0
CACHE_FILE = "engine-isa.json"

_log = structlog.get_logger(__name__)


class _Kept(msgspec.Struct, frozen=True):
    """The answer of an earlier probe; `key` is the digest of build and CPU."""

    key: str
    refusal: str | None


def engine_libraries() -> Path | None:
    """Return the directory of the installed build's libraries, None if none is installed.

    Imports nothing of it: that alone could be too much for the CPU.
    """
    spec = importlib.util.find_spec("llama_cpp")
    places = spec.submodule_search_locations if spec is not None else None
    return next((Path(place) / "lib" for place in places or ()), None)


async def engine_refusal(
    topology: Topology,
    lib_dir: Path | None,
    run_dir: Path,
    *,
    probe: Sequence[str] | None = None,
    timeout_s: float = PROBE_TIMEOUT_S,
) -> str | None:
    """Return why no engine can run with the build in `lib_dir` here, None if nothing is known.

    First by the names of its variants, then by a trial in a child process, whose answer is
    kept in `run_dir` until the build or the CPU changes. `probe` is the child's command; the
    directory is added to it.
    """
    if lib_dir is None:
        return "no engine can run: llama-cpp-python is not installed"
    files = await asyncio.to_thread(_names, lib_dir)
    if not files:
        return f"no engine can run: {lib_dir} has no libraries of llama.cpp"
    refusal = refusal_by_names(variants_of(files), topology.arch, topology.features)
    if refusal is not None:
        return refusal
    command = tuple(probe or (sys.executable, "-m", "agentd.engine_probe"))
    cache = run_dir / CACHE_FILE
    key = await asyncio.to_thread(_key, lib_dir, files, topology)
    kept = await asyncio.to_thread(_recall, cache)
    if kept is not None and kept.key == key:
        return kept.refusal
    answer = await _try((*command, f"{lib_dir}"), timeout_s)
    if isinstance(answer, _Unclear):
        _log.warning("The engine's build could not be tried on this CPU", reason=answer.reason)
        return None
    await asyncio.to_thread(_keep, cache, _Kept(key, answer))
    return answer


class _Unclear(msgspec.Struct, frozen=True):
    """The probe did not tell anything about the CPU."""

    reason: str


async def _try(command: tuple[str, ...], timeout_s: float) -> str | _Unclear | None:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(timeout_s):
            _, words = await process.communicate()
    except TimeoutError:
        return _Unclear(f"no answer within {timeout_s:g} s")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = words.decode(errors="replace").strip().splitlines()
    return _meaning(process.returncode or 0, lines[-1] if lines else "")


def _meaning(code: int, last: str) -> str | _Unclear | None:
    if code == 0:
        return None
    if code == -signal.SIGILL:
        return (
            "the engine's build uses instructions that this CPU lacks (a trial died of SIGILL): "
            "it was made on another CPU; install a build of llama-cpp-python with "
            "GGML_NATIVE=OFF and GGML_CPU_ALL_VARIANTS=ON"
        )
    if code == EXIT_NO_VARIANT:
        return "the engine's build has no variant that llama.cpp would use on this CPU"
    if code == EXIT_UNLOADABLE:
        return f"the engine's libraries cannot be loaded: {last}"
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    return _Unclear(f"{ended}: {last}" if last else ended)


def _names(directory: Path) -> tuple[str, ...]:
    """Return the names of the libraries; versioned copies of them are left out."""
    try:
        return tuple(sorted(path.name for path in directory.glob("*.so")))
    except OSError:
        return ()


def _key(directory: Path, files: Sequence[str], topology: Topology) -> str:
    digest = hashlib.sha256(repr((topology.arch, topology.features, files)).encode())
    for name in files:
        try:
            with (directory / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            digest.update(f"{error.errno}".encode())
    return digest.hexdigest()


def _recall(path: Path) -> _Kept | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError):
        return None  # never asked, or nonsense: asked again


def _keep(path: Path, kept: _Kept) -> None:
    scratch = path.with_suffix(f".{os.getpid()}")
    try:
        scratch.write_bytes(msgspec.json.encode(kept))
        scratch.replace(path)
    except OSError as error:
        # The next start asks again.
        _log.warning("The trial's answer is not kept", path=str(path), reason=str(error))
