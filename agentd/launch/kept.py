"""Specs kept beside processes that outlive agentd: one JSON file for each unit."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec

from agentd.launch.protocol import LaunchSpec
from corefleet.errors import CorruptRecord

_SUFFIX = ".json"
_UNFINISHED = ".part"


class KeptSpecs:
    """The files of one agentd; its methods block for as long as the disk does."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def keep(self, unit: str, spec: LaunchSpec) -> None:
        """Write a spec whole or not at all; raises OSError."""
        self._directory.mkdir(parents=True, exist_ok=True)
        unfinished = self._directory / f"{unit}{_UNFINISHED}"
        unfinished.write_bytes(msgspec.json.encode(spec, enc_hook=_encode))
        os.replace(unfinished, self._path(unit))

    def read(self, unit: str) -> LaunchSpec:
        """Return what was kept; raises CorruptRecord when it cannot be read."""
        try:
            data = self._path(unit).read_bytes()
            return msgspec.json.decode(data, type=LaunchSpec, dec_hook=_decode)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptRecord(f"{self._path(unit)}: {error}") from error

    def forget(self, unit: str) -> None:
        """Remove what was kept, if anything was."""
        with contextlib.suppress(FileNotFoundError):
            self._path(unit).unlink()

    def units(self) -> tuple[str, ...]:
        """Return the units of which something is kept; what was never finished is removed."""
        try:
            files = sorted(self._directory.iterdir())
        except FileNotFoundError:
            return ()
        for file in files:
            if file.suffix == _UNFINISHED:
                file.unlink(missing_ok=True)
        return tuple(f.name.removesuffix(_SUFFIX) for f in files if f.suffix == _SUFFIX)

    def _path(self, unit: str) -> Path:
        return self._directory / f"{unit}{_SUFFIX}"


def _encode(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} in a LaunchSpec")


def _decode(kind: type, value: Any) -> Path:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} in a LaunchSpec")
