"""Where files of the user's lie. Standard library only: the set-up runs it by itself."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Directory for what can be fetched or built again: $COREFLEET_CACHE or XDG's."""
    named = os.environ.get("COREFLEET_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "corefleet"
