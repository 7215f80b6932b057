"""Files that `up` and `demo` use when none are named, and what their pools need."""

from __future__ import annotations

import asyncio
from pathlib import Path

from msgspec import structs

from agentctl.local.progress import fetch_model
from agentctl.output import say
from corefleet.config import cache_dir, load_models, load_pools
from corefleet.errors import ConfigError
from corefleet.messages.records import PoolSpec

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
POOLS_FILE = CONFIGS / "pools.toml"
MODELS_FILE = CONFIGS / "models.toml"


async def prepare_pools(
    pools: Path, models: Path, use: dict[str, str] | None = None
) -> list[PoolSpec]:
    """Return the pools of a file, once the models that they name are fetched.

    `use` names another model for some pools; then only those are returned. Raises
    ConfigError for a pool whose model no file describes, ModelUnusable for a model
    that cannot be had.
    """
    specs = load_pools(pools)
    if use is not None:
        specs = [structs.replace(s, model=use[s.name]) for s in specs if s.name in use]
    known = load_models(models)
    for spec in specs:
        if spec.model and spec.model not in known:
            raise ConfigError(
                f"{pools}: `{spec.name}.model`: {spec.model!r} is not in {models}; "
                f"it has: {', '.join(known)}"
            )
    for name in sorted({spec.model for spec in specs if spec.model}):
        path = await asyncio.to_thread(fetch_model, name, known[name], cache_dir() / "models")
        say(f"model {name}: {path}")
    return specs
