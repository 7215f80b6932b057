"""Where agentd keeps its sockets and the logs of its processes."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from corefleet.errors import ConfigError

_LONGEST_RUN = 70
"""Room for a socket's name within the 107 bytes that a Unix socket's path may have."""


@dataclass(slots=True, frozen=True)
class Rooms:
    """`run` is short enough for sockets; `borrowed`: it is not under the data directory."""

    run: Path
    log: Path
    borrowed: bool = False

    @property
    def kept(self) -> Path:
        """What this boot's next agentd is told; no process of ours sees it."""
        return self.run / "kept"

    def close(self) -> None:
        """Remove what was borrowed."""
        if self.borrowed:
            shutil.rmtree(self.run, ignore_errors=True)


def make_rooms(data_dir: str, run_dir: str = "") -> Rooms:
    """Make the directories; `run_dir` '' is one below `data_dir`.

    Raises ConfigError when that is not possible.
    """
    base = Path(data_dir).absolute()
    run, log = Path(run_dir).absolute() if run_dir else base / "run", base / "log"
    try:
        run.mkdir(parents=True, exist_ok=True)
        log.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"`data_dir`: {error.filename}: {error.strerror}; expected a writable directory"
        ) from error
    if len(bytes(run)) <= _LONGEST_RUN:
        return Rooms(run, log)
    return Rooms(Path(tempfile.mkdtemp(prefix="corefleet-")), log, borrowed=True)
