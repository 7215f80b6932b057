"""What agentd.toml may say beyond its types."""

from __future__ import annotations

from agentd.bandwidth_control import regulator_settings
from agentd.core.cpulist import parse_list
from agentd.core.plan import PlanSettings
from agentd.core.topology import Overrides
from agentd.requirements import REQUIREMENTS
from corefleet.channels import Channel, check_channels
from corefleet.config import AgentdConfig, PlanConfig
from corefleet.errors import ConfigError, InvalidInput
from corefleet.ids import check_name


def check_config(config: AgentdConfig, where: str) -> None:
    """Raise ConfigError for a value that cannot be; `where` names the file."""
    try:
        check_name("node_id", config.node_id)
        check_name("rack", config.rack)
        _check_probe(config)
    except InvalidInput as error:
        raise ConfigError(f"{where}: {error}") from error
    for name in config.require:
        if name not in REQUIREMENTS:
            known = ", ".join(REQUIREMENTS)
            raise ConfigError(f"{where}: `require`: {name!r}; expected some of: {known}")
    for key, text in (("cpus", config.cpus), ("plan.system_cpus", config.plan.system_cpus)):
        try:
            parse_list(text, key)
        except InvalidInput as error:
            raise ConfigError(f"{where}: {error}") from error
    try:
        regulator_settings(config.bandwidth)
    except InvalidInput as error:
        raise ConfigError(f"{where}: {error}") from error
    _check_shares(config, where)
    positive = {
        "beat_interval_s": config.beat_interval_s,
        "bandwidth.interval_s": config.bandwidth.interval_s,
        "bandwidth.canary_every_s": config.bandwidth.canary_every_s,
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
    try:
        check_channels(config.insecure, channels_of(config))
    except InvalidInput as error:
        raise ConfigError(f"{where}: {error}") from error


def channels_of(config: AgentdConfig) -> tuple[Channel, ...]:
    """Return what an agentd serves and connects to; probes carry no secret and have no TLS."""
    metrics = (config.metrics,) if config.metrics else ()
    return (
        Channel("metrics", metrics, "tls", config.tls),
        Channel("nats.servers", config.nats.servers, "nats.tls", config.nats.tls),
    )


def _check_probe(config: AgentdConfig) -> None:
    """A controld that is told a wildcard would probe itself."""
    host, _, port = (config.probe_advertise or config.probe_listen).rpartition(":")
    if host in ("", "0.0.0.0", "[::]", "::") or not port.isdecimal():
        raise InvalidInput(
            "probe_advertise" if config.probe_advertise else "probe_listen",
            config.probe_advertise or config.probe_listen,
            "host:port where controlds reach this node; what listens on every address "
            "needs it in probe_advertise",
        )


def _check_shares(config: AgentdConfig, where: str) -> None:
    for key, value in (
        ("plan.sandbox_share", config.plan.sandbox_share),
        ("plan.system_memory_share", config.plan.system_memory_share),
    ):
        if not 0 <= value < 1:
            raise ConfigError(f"{where}: `{key}`: {value}; expected 0 or more, less than 1")
    for domain, peak in config.bandwidth.peak_bytes_per_s.items():
        if not domain.isdecimal() or peak <= 0:
            raise ConfigError(
                f"{where}: `bandwidth.peak_bytes_per_s`: {domain} = {peak}; expected the number of "
                'a domain and bytes per second, such as "0" = 85e9'
            )


def overrides_of(config: AgentdConfig) -> Overrides:
    """Return the operator's choice; raises InvalidInput naming `cpus`."""
    return Overrides(
        cpus=parse_list(config.cpus, "cpus"), domains=config.domains, isolated=config.isolated
    )


def plan_settings(config: PlanConfig, model_replicas: bool = False) -> PlanSettings:
    """Return how the machine is divided; raises InvalidInput naming `plan.system_cpus`."""
    return PlanSettings(
        system_cpus=parse_list(config.system_cpus, "plan.system_cpus"),
        system_cores_per_node=config.system_cores_per_node,
        system_cores_per_domain=config.system_cores_per_domain,
        sandbox_share=config.sandbox_share,
        system_memory_share=config.system_memory_share,
        engine_memory_bytes=config.engine_memory_bytes,
        model_replicas=model_replicas,
        worker_memory_bytes=config.worker_memory_bytes,
        worker_memory_floor_bytes=config.worker_memory_floor_bytes,
    )
