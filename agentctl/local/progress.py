"""Progress of a model fetch on stderr."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from corefleet.config import ModelConfig
from corefleet.models import ensure


def fetch_model(name: str, config: ModelConfig, directory: Path) -> Path:
    """Return the verified model file, fetched when it is not there; blocks."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(f"model {name}", total=config.size_bytes)

        def progress(done: int, total: int) -> None:
            bars.update(bar, completed=done, total=total)

        return ensure(name, config, directory, progress)
