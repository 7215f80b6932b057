"""Which of the configured models this node can serve."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from corefleet.config import AgentdConfig, ModelConfig, cache_dir, load_models
from corefleet.models import verify


@dataclass(slots=True, frozen=True)
class FoundModels:
    """Verified files by model name, and one line for each model that is not usable."""

    paths: dict[str, Path]
    warnings: tuple[str, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes, by name."""
    configs: dict[str, ModelConfig] = field(default_factory=dict)


def find_models(config: AgentdConfig) -> FoundModels:
    """Look for the files of models.toml and verify them; blocks while it reads them.

    Raises ConfigError when models.toml cannot be used.
    """
    if not config.models:
        return FoundModels({})
    directory = Path(config.model_dir) if config.model_dir else cache_dir() / "models"
    paths: dict[str, Path] = {}
    warnings = []
    configs = load_models(Path(config.models))
    for name, model in configs.items():
        path = directory / model.file
        wrong = verify(path, model)
        if wrong is None:
            paths[name] = path
        else:
            warnings.append(
                f"model {name} is not usable, pools that need it are not offered: {wrong}"
            )
    sizes = {name: configs[name].size_bytes for name in paths}
    return FoundModels(paths, tuple(warnings), sizes, configs)
