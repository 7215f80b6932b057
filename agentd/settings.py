"""What agentd.toml may say beyond its types."""

from __future__ import annotations

from agentd.core.cpulist import parse_list
from agentd.core.topology import Overrides
from corefleet.config import AgentdConfig
from corefleet.errors import ConfigError, InvalidInput
from corefleet.ids import check_name

REQUIREMENTS = ("numa-binding",)


def check_config(config: AgentdConfig, where: str) -> None:
    """Raise ConfigError for a value that cannot be; `where` names the file."""
    try:
        check_name("node_id", config.node_id)
        check_name("rack", config.rack)
    except InvalidInput as error:
        raise ConfigError(f"{where}: {error}") from error
    for name in config.require:
        if name not in REQUIREMENTS:
            known = ", ".join(REQUIREMENTS)
            raise ConfigError(f"{where}: `require`: {name!r}; expected some of: {known}")
    if config.launcher == "systemd":
        raise ConfigError(f"{where}: `launcher`: 'systemd' is not there yet; expected 'plain'")
    positive = {
        "beat_interval_s": config.beat_interval_s,
        "engine.max_sequences": config.engine.max_sequences,
        "engine.context_tokens": config.engine.context_tokens,
        "engine.batch_tokens": config.engine.batch_tokens,
        "engine.prefill_chunk_tokens": config.engine.prefill_chunk_tokens,
        "engine.stuck_after_s": config.engine.stuck_after_s,
    }
    for key, value in positive.items():
        if value <= 0:
            raise ConfigError(f"{where}: `{key}`: {value}; expected more than 0")
    if config.engine.batch_tokens <= config.engine.max_sequences:
        raise ConfigError(
            f"{where}: `engine.batch_tokens`: {config.engine.batch_tokens}; expected more than "
            f"`engine.max_sequences` ({config.engine.max_sequences})"
        )


def overrides_of(cpus: str, domains: tuple[int, ...]) -> Overrides:
    """Return the operator's choice; raises InvalidInput naming `cpus`."""
    return Overrides(cpus=parse_list(cpus, "cpus"), domains=domains)
