"""The composition root of agentd: names the adapters, starts and stops in order."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import click
import msgspec
import structlog

from agentd.commands import capture_command, discover_command, release_command
from agentd.core.plan import make_plan
from agentd.core.topology import Overrides, Topology
from agentd.daemon import Daemon, Surroundings
from agentd.engine_isa import engine_refusal
from agentd.gauges import NodeCollector
from agentd.hostfs import HostFs
from agentd.launch import Launcher, PlainLauncher, SystemdLauncher, SystemdSettings
from agentd.models import FoundModels, find_models
from agentd.probe_port import PortInUse
from agentd.probes import discover
from agentd.replica_setup import make_replicas
from agentd.requirements import wants_numa
from agentd.rooms import Rooms, make_rooms
from agentd.settings import channels_of, check_config, overrides_of, plan_settings
from corefleet import config as configuration
from corefleet import event_loop, logs, metrics, program
from corefleet.adapters.nats_bus import NatsBus
from corefleet.adapters.nats_log import NatsLog
from corefleet.background import Background
from corefleet.channels import warn_of_plain_text
from corefleet.clock import SystemClock
from corefleet.config import AgentdConfig
from corefleet.errors import (
    ConfigError,
    CorefleetError,
    Incompatible,
    InvalidInput,
    Unavailable,
)
from corefleet.notify import Notifier
from corefleet.program import Over
from corefleet.tls import TlsFiles

_log = structlog.get_logger(__name__)


@click.group(invoke_without_command=True)
@click.option("--config", "path", type=click.Path(path_type=Path), help="agentd.toml")
@click.option("--node-id", default="", help="Overrides `node_id` of the file.")
@click.option("--cpus", default="", help="Overrides `cpus` of the file, e.g. 0-3.")
@click.option(
    "--domain", "domains", type=int, multiple=True, help="Overrides `domains` of the file."
)
@click.option(
    "--start-timeout",
    default=30.0,
    show_default=True,
    help="Seconds to wait for NATS at the start.",
)
@click.option(
    "--check-config", "check_only", is_flag=True, help="Say whether the file can be used, and end."
)
@click.pass_context
def main(
    context: click.Context,
    path: Path | None,
    node_id: str,
    cpus: str,
    domains: tuple[int, ...],
    start_timeout: float,
    check_only: bool,
) -> None:
    """Run this node: `agentd --config agentd.toml`.

    Prints one JSON line on stdout when it is registered and its workers are ready. Exit
    codes: 0 stopped by SIGTERM or SIGINT, 1 failed, 2 configuration, 3 incompatible server
    or machine, 4 NATS not reached in time, 5 address in use.
    """
    if context.invoked_subcommand is not None:
        return
    if path is None:
        raise click.UsageError("missing option --config")
    try:
        config = configuration.load(path, AgentdConfig)
        config = msgspec.structs.replace(
            config,
            node_id=node_id or config.node_id,
            cpus=cpus or config.cpus,
            domains=domains or config.domains,
        )
        topology = _discover(config, str(path))
    except ConfigError as error:
        program.leave("agentd", program.EXIT_CONFIG, error)
    if check_only:
        return
    logs.configure(config.log, "agentd", node=config.node_id)
    warn_of_plain_text(channels_of(config))
    with event_loop.runner() as runner:
        try:
            runner.run(run(config, topology, start_timeout))
        except ConfigError as error:
            program.leave("agentd", program.EXIT_CONFIG, error)
        except Incompatible as error:
            program.leave("agentd", program.EXIT_INCOMPATIBLE, error)
        except PortInUse as error:
            program.leave("agentd", program.EXIT_ADDRESS, error)
        except Unavailable as error:
            program.leave("agentd", program.EXIT_UNREACHABLE, error)
        except CorefleetError as error:
            program.leave("agentd", program.EXIT_FAILED, error)


main.add_command(discover_command)
main.add_command(capture_command)
main.add_command(release_command)

FindLauncher = Callable[[AgentdConfig, Topology, Rooms], Awaitable[Launcher]]


async def find_launcher(config: AgentdConfig, topology: Topology, rooms: Rooms) -> Launcher:
    """Return the configured launcher. Raises Incompatible.

    `auto` is systemd's where agentd is itself a service of it, and plain elsewhere.
    """
    if config.launcher == "systemd" or (config.launcher == "auto" and _is_service(topology)):
        try:
            return await _systemd_launcher(config, topology, rooms)
        except Incompatible as error:
            if config.launcher == "systemd":
                raise
            _log.warning("Not started as units of systemd", reason=str(error))
    first = next(iter(topology.domains.values()))
    numa = wants_numa(config.require)
    return await PlainLauncher.find(HostFs(), first.cpus, first.domain, require_numa=numa)


def _is_service(topology: Topology) -> bool:
    return topology.systemd and os.geteuid() == 0 and topology.cgroups.own.endswith(".service")


async def _systemd_launcher(
    config: AgentdConfig, topology: Topology, rooms: Rooms
) -> SystemdLauncher:
    # How memory and the system's CPUs are divided does not depend on pools.
    empty = make_plan(topology, (), (), {}, False, plan_settings(config.plan))
    settings = SystemdSettings(
        node=config.node_id,
        cpus={domain: found.cpus for domain, found in topology.domains.items()},
        batch_cpus={},
        memory_nodes={domain: found.memory_nodes for domain, found in empty.domains.items()},
        numa=topology.numa,
        writable=(rooms.log.parent, rooms.run),
        models=rooms.run / "models",
        hidden=(rooms.kept,),
        working_directory=Path("/"),
        dynamic_user=config.dynamic_user,
    )
    launcher = await SystemdLauncher.find(HostFs(), rooms.kept / "units", settings)
    if config.confine_system:
        cpus = {cpu for domain in empty.domains.values() for cpu in domain.system_cpus}
        await launcher.confine_system(sorted(cpus))
    return launcher


async def run(
    config: AgentdConfig,
    topology: Topology,
    start_timeout_s: float,
    find: FindLauncher = find_launcher,
) -> None:
    """Be a node until SIGTERM or SIGINT, then finish or give back what runs.

    Raises Incompatible, PortInUse, Unavailable (NATS not reached in time), Conflict (the
    data directory is in use), ConfigError, or what a part of the process died of.
    """

    async def start(stack: AsyncExitStack, over: Over) -> dict[str, object]:
        daemon = await _start(stack, config, topology, start_timeout_s, find, over)
        return {
            "ready": "agentd",
            "node": config.node_id,
            "epoch": daemon.node.epoch,
            "probe": daemon.probe_address,
        }

    await program.serve(start)


async def _start(
    stack: AsyncExitStack,
    config: AgentdConfig,
    topology: Topology,
    start_timeout_s: float,
    find: FindLauncher,
    over: Over,
) -> Daemon:
    """Start everything, in order; `stack` stops it in the reverse order."""
    rooms = make_rooms(config.data_dir, config.run_dir)
    stack.callback(rooms.close)
    models = await _usable_models(config, topology, rooms)
    for line in (*topology.warnings, *models.warnings):
        _log.warning("Discovery", warning=line)
    launcher = await find(config, topology, rooms)
    stack.push_async_callback(launcher.close)
    for line in launcher.unisolated:
        _log.warning("Not isolated", warning=line)
    background = Background(lambda error: program.end(over, error))
    stack.push_async_callback(background.close)

    def failed(error: Exception) -> None:
        program.bus_trouble(over, error)

    bus = await program.reach(
        "NATS",
        lambda: NatsBus.connect(config.nats, f"agentd {config.node_id}", failed),
        asyncio.get_running_loop().time() + start_timeout_s,
    )
    stack.push_async_callback(bus.close)
    host, clock = HostFs(), SystemClock()
    replicas = make_replicas(config, topology, models, launcher, rooms, host, clock, background)
    stack.push_async_callback(replicas.close)
    here = Surroundings(
        config=config,
        topology=topology,
        models=models,
        files=replicas,
        launcher=launcher,
        rooms=rooms,
        host=host,
        notifier=Notifier.from_environment(),
        version=program.version(),
    )
    daemon = Daemon(here, bus, NatsLog(bus, replicas=False), clock, background)
    tls = TlsFiles.of(config.tls)
    if tls is not None:
        background.spawn(tls.keep_looking(), "certificates")
    if config.metrics:
        measured = metrics.Metrics(program.version())
        measured.registry.register(NodeCollector(daemon, replicas.states))
        scraped = metrics.serve(measured, config.metrics, tls)
        stack.push_async_callback(asyncio.to_thread, scraped.close)
    stack.push_async_callback(daemon.close)
    await daemon.start()
    return daemon


def _discover(config: AgentdConfig, where: str) -> Topology:
    """Return the machine as configured; raises ConfigError."""
    check_config(config, where)
    try:
        overrides = overrides_of(config)
    except InvalidInput as error:
        raise ConfigError(f"{where}: {error}") from error
    topology = discover(HostFs(), overrides)
    if not topology.domains:
        known = ", ".join(map(str, discover(HostFs(), Overrides()).domains))
        raise ConfigError(
            f"{where}: `domains`: {list(config.domains)}; expected some of this machine's: {known}"
        )
    return topology


async def _usable_models(config: AgentdConfig, topology: Topology, rooms: Rooms) -> FoundModels:
    """Return the models whose files are right, none if no engine can run on this CPU."""
    models = await asyncio.to_thread(find_models, config)
    if not models.paths:
        return models
    build = importlib.util.find_spec("llama_cpp")
    library = Path(build.origin).parent / "lib" if build is not None and build.origin else None
    refusal = await engine_refusal(topology, library, rooms.run)
    if refusal is None:
        return models
    why = f"no model is served, pools that need one are not offered: {refusal}"
    return FoundModels({}, (*models.warnings, why))
