"""Fillers from agentd's side: started through the launcher, awaited, cleaned up after."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog

from agentd.core.cpulist import format_list
from agentd.core.replicas_io import FillFailed
from agentd.filler.app import Order
from agentd.filler.record import (
    Exit,
    Verified,
    clear,
    read_failure,
    read_verified,
    verified_path,
)
from agentd.launch.protocol import ExitStatus, Launcher, LaunchSpec
from corefleet.config import ModelConfig
from corefleet.errors import LaunchFailed

FILL_BASE_S = 60.0
FILL_LEAST_BYTES_PER_S = 20e6
"""A filler that is slower than that, a minute aside, hangs: it is killed."""
FILLER_KIND = "filler"

_DIGEST_BYTES = 6
_LONGEST_NAME = 64
_CAUSES: Mapping[int | None, Literal["corrupt", "unmounted"]] = {
    Exit.CORRUPT: "corrupt",
    Exit.UNMOUNTED: "unmounted",
}

_log = structlog.get_logger(__name__)


@dataclass(slots=True, frozen=True)
class Source:
    """A model's verified file, and what it must be."""

    path: Path
    size_bytes: int
    sha256: str


@dataclass(slots=True, frozen=True)
class Room:
    """Where replicas of one domain may go: the filler's CPUs, and most bytes in all."""

    cpus: tuple[int, ...]
    budget_bytes: int


def sources_of(paths: Mapping[str, Path], models: Mapping[str, ModelConfig]) -> dict[str, Source]:
    """Return the sources of the models whose files were found; `models` is models.toml."""
    return {
        name: Source(path, models[name].size_bytes, models[name].sha256)
        for name, path in paths.items()
    }


def replica_path(directory: Path, model: str, source: Source) -> Path:
    """Return where a replica lies below a domain's mount: another content has another name."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", model)[:_LONGEST_NAME]
    text = f"{model}\0{source.sha256}".encode()
    digest = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).hexdigest()
    return directory / f"{safe}-{digest}.gguf"


def sweep(directory: Path, domain: int, models: Mapping[str, Source]) -> list[str]:
    """Return the models with a right replica in a domain's mount; remove all else. Blocks."""
    kept: set[Path] = set()
    found = []
    for name, source in models.items():
        target = replica_path(directory, name, source)
        record = read_verified(target, source.sha256, source.size_bytes)
        if record is not None and _all_on(record, domain):
            kept |= {target, verified_path(target)}
            found.append(name)
    try:
        for path in directory.iterdir():
            if path not in kept:
                path.unlink()
    except OSError as error:
        _log.warning("Remains of models stay", at=str(directory), reason=str(error))
    return found


@dataclass(slots=True, frozen=True)
class Fillers:
    """Runs `python -m agentd.filler` bound to a domain, without a memory limit."""

    launcher: Launcher
    log_dir: Path

    async def fill(
        self, model: str, source: Source, target: Path, domain: int, cpus: tuple[int, ...]
    ) -> FillFailed | None:
        """Run one filler to its end; return how it failed, None when the replica is right.

        Nothing of a failed or cancelled one is left.
        """
        spec = self._spec(model, source, target, domain, cpus)
        limit_s = FILL_BASE_S + source.size_bytes / FILL_LEAST_BYTES_PER_S
        try:
            status = await self._run(spec, limit_s)
        except LaunchFailed as error:
            # A small model may be filled before anybody could see its filler run.
            right = await asyncio.to_thread(read_verified, target, source.sha256, source.size_bytes)
            why, code = "" if right else str(error), None
        except asyncio.CancelledError:
            await asyncio.to_thread(_clear, target)
            raise
        else:
            why, code = await asyncio.to_thread(_judge, status, source, target, limit_s)
        if not why:
            return None
        await asyncio.to_thread(_clear, target)
        return FillFailed(domain, model, why, _CAUSES.get(code, "passing"))

    async def _run(self, spec: LaunchSpec, limit_s: float) -> ExitStatus | None:
        """Return how it ended, None when it was killed because it took too long."""
        process = await self.launcher.start(spec)
        try:
            async with asyncio.timeout(limit_s):
                return await process.wait()
        except TimeoutError:
            return None
        finally:
            process.kill()
            await process.wait()

    def _spec(
        self, model: str, source: Source, target: Path, domain: int, cpus: tuple[int, ...]
    ) -> LaunchSpec:
        order = Order(
            model=model,
            source=source.path,
            target=target,
            size_bytes=source.size_bytes,
            sha256=source.sha256,
            domain=domain,
            cpus=format_list(cpus),
        )
        return LaunchSpec(
            name=f"filler {model} d{domain} {secrets.token_hex(4)}",
            command=(sys.executable, "-m", *order.command()),
            cpus=cpus,
            domain=domain,
            service_class="engine",
            kind=FILLER_KIND,
            unit=model,
            log=self.log_dir / f"filler-d{domain}.log",
        )


def _judge(
    status: ExitStatus | None, source: Source, target: Path, limit_s: float
) -> tuple[str, int | None]:
    """Return why there is no replica, '' if there is, and the filler's exit code. Blocks."""
    if status is None:
        return f"its filler took more than {limit_s:.0f} s", None
    if status.code is None or status.code not in set(Exit):
        return f"its filler ended with {status}", status.code
    if status.code != Exit.RIGHT:
        meaning = Exit(status.code).name.lower().replace("_", " ")
        return read_failure(target) or f"its filler says: {meaning}", status.code
    if read_verified(target, source.sha256, source.size_bytes) is None:
        return "its filler ended well, but there is no replica", status.code
    return "", status.code


def _all_on(record: Verified, domain: int) -> bool:
    return not set(record.pages) - {domain}


def _clear(target: Path) -> None:
    with contextlib.suppress(OSError):
        clear(target)
