"""The composition root of agentd: names the adapters, starts and stops in order."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import click
import msgspec
import structlog

from agentd.core.topology import Topology
from agentd.daemon import Daemon
from agentd.discovery_report import as_json, as_text
from agentd.gauges import NodeCollector
from agentd.hostfs import HostFs
from agentd.launch import PlainLauncher
from agentd.models import find_models
from agentd.probe_port import PortInUse
from agentd.probes import discover
from agentd.rooms import make_rooms
from agentd.settings import check_config, overrides_of
from corefleet import config as configuration
from corefleet import event_loop, logs, metrics, program
from corefleet.adapters.nats_bus import NatsBus
from corefleet.adapters.nats_log import NatsLog
from corefleet.background import Background
from corefleet.clock import SystemClock
from corefleet.config import AgentdConfig
from corefleet.errors import (
    ConfigError,
    CorefleetError,
    Incompatible,
    InvalidInput,
    Unavailable,
)
from corefleet.program import Over

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
@click.pass_context
def main(
    context: click.Context,
    path: Path | None,
    node_id: str,
    cpus: str,
    domains: tuple[int, ...],
    start_timeout: float,
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
    logs.configure(config.log, "agentd", node=config.node_id)
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


@main.command("discover")
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("/"),
    show_default=True,
    help="Read a recorded machine below this directory.",
)
@click.option("--json", "machine_readable", is_flag=True, help="One JSON object.")
def discover_command(root: Path, machine_readable: bool) -> None:
    """Print what agentd finds on a machine."""
    topology = discover(HostFs(root), overrides_of("", ()))
    click.echo(as_json(topology) if machine_readable else as_text(topology))


async def run(config: AgentdConfig, topology: Topology, start_timeout_s: float) -> None:
    """Be a node until SIGTERM or SIGINT, then finish or give back what runs.

    Raises Incompatible, PortInUse, Unavailable (NATS not reached in time), Conflict (the
    data directory is in use), ConfigError, or what a part of the process died of.
    """

    async def start(stack: AsyncExitStack, over: Over) -> dict[str, object]:
        daemon = await _start(stack, config, topology, start_timeout_s, over)
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
    over: Over,
) -> Daemon:
    """Start everything, in order; `stack` stops it in the reverse order."""
    rooms = make_rooms(config.data_dir)
    stack.callback(rooms.close)
    models = await asyncio.to_thread(find_models, config)
    for line in (*topology.warnings, *models.warnings):
        _log.warning("Discovery", warning=line)
    first = next(iter(topology.domains.values()))
    launcher = await PlainLauncher.find(
        HostFs(), first.cpus, first.domain, require_numa="numa-binding" in config.require
    )
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
    daemon = Daemon(
        config=config,
        topology=topology,
        models=models,
        launcher=launcher,
        rooms=rooms,
        bus=bus,
        log=NatsLog(bus),
        clock=SystemClock(),
        background=background,
        version=program.version(),
    )
    if config.metrics:
        measured = metrics.Metrics()
        measured.registry.register(NodeCollector(daemon.node, daemon.troubles))
        scraped = metrics.serve(measured, config.metrics)
        stack.push_async_callback(asyncio.to_thread, scraped.close)
    stack.push_async_callback(daemon.close)
    await daemon.start()
    return daemon


def _discover(config: AgentdConfig, where: str) -> Topology:
    """Return the machine as configured; raises ConfigError."""
    check_config(config, where)
    try:
        overrides = overrides_of(config.cpus, config.domains)
    except InvalidInput as error:
        raise ConfigError(f"{where}: {error}") from error
    topology = discover(HostFs(), overrides)
    if not topology.domains:
        known = ", ".join(map(str, discover(HostFs(), overrides_of("", ())).domains))
        raise ConfigError(
            f"{where}: `domains`: {list(config.domains)}; expected some of this machine's: {known}"
        )
    return topology
