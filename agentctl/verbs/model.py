"""agentctl model"""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from agentctl.boundary import verb
from agentctl.local.presets import MODELS_FILE
from agentctl.local.progress import fetch_model
from agentctl.output import data
from corefleet.config import cache_dir, load_models
from corefleet.errors import NotFound


@click.command("model")
@click.argument("name")
@click.option("--models", type=click.Path(path_type=Path), default=MODELS_FILE, show_default=True)
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="Where the file goes.")
@verb
async def command(name: str, models: Path, directory: Path | None) -> int:
    """Fetch the model NAME of models.toml unless it is there, and print its path."""
    known = load_models(models)
    if name not in known:
        raise NotFound(f"model {name!r} is not in {models}; it has: {', '.join(known)}")
    target = directory or cache_dir() / "models"
    data(str(await asyncio.to_thread(fetch_model, name, known[name], target)))
    return 0
