"""The composition root of controld: names the adapters, starts and stops in order."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import click
import msgspec

from controld.api.server import PortInUse
from controld.cluster import Cluster
from controld.parts import Parts
from controld.registry import Registry
from controld.settings import channels_of, check_config, cluster_settings
from controld.token_keys import read_keys
from corefleet import config as configuration
from corefleet import event_loop, logs, program
from corefleet.adapters.etcd_store import EtcdStore
from corefleet.adapters.nats_bus import NatsBus
from corefleet.adapters.nats_log import NatsLog
from corefleet.background import Background, stop
from corefleet.channels import warn_of_plain_text
from corefleet.clock import SystemClock
from corefleet.config import ControldConfig
from corefleet.errors import (
    ConfigError,
    CorefleetError,
    Incompatible,
    Unavailable,
)
from corefleet.notify import Notifier
from corefleet.program import Over
from corefleet.store import Store
from corefleet.subjects import Layout
from corefleet.tls import TlsFiles

_FEEDS_A_LIMIT = 4


@click.command()
@click.option(
    "--config", "path", required=True, type=click.Path(path_type=Path), help="controld.toml"
)
@click.option("--id", "controld", default="", help="Overrides `id` of the file.")
@click.option("--listen", default="", help="Overrides `listen` of the file; port 0: any.")
@click.option(
    "--start-timeout",
    default=30.0,
    show_default=True,
    help="Seconds to wait for etcd and NATS at the start.",
)
@click.option(
    "--check-config", "check_only", is_flag=True, help="Say whether the file can be used, and end."
)
def main(path: Path, controld: str, listen: str, start_timeout: float, check_only: bool) -> None:
    """Run one member of the control plane.

    Prints one JSON line on stdout when it serves. Exit codes: 0 drained after SIGTERM or
    SIGINT, 1 failed, 2 configuration, 3 incompatible server, 4 etcd or NATS not reached
    in time, 5 address in use.
    """
    try:
        config = configuration.load(path, ControldConfig)
        config = msgspec.structs.replace(
            config, id=controld or config.id, listen=listen or config.listen
        )
        check_config(config, str(path))
        if config.auth.tokens is not None:
            read_keys(Path(config.auth.tokens.keys))
    except ConfigError as error:
        program.leave("controld", program.EXIT_CONFIG, error)
    if check_only:
        return
    logs.configure(config.log, "controld", controld=config.id)
    warn_of_plain_text(channels_of(config))
    with event_loop.runner() as runner:
        try:
            runner.run(run(config, start_timeout))
        except ConfigError as error:
            program.leave("controld", program.EXIT_CONFIG, error)
        except Incompatible as error:
            program.leave("controld", program.EXIT_INCOMPATIBLE, error)
        except PortInUse as error:
            program.leave("controld", program.EXIT_ADDRESS, error)
        except Unavailable as error:
            program.leave("controld", program.EXIT_UNREACHABLE, error)
        except CorefleetError as error:
            program.leave("controld", program.EXIT_FAILED, error)


async def run(config: ControldConfig, start_timeout_s: float) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

    Raises Incompatible, PortInUse, Unavailable (not reached in time), Conflict (the id is
    taken), ConfigError (certificates), or what a part of the process died of.
    """

    async def start(stack: AsyncExitStack, over: Over) -> dict[str, object]:
        notifier = Notifier.from_environment()
        stack.callback(notifier.stopping, "draining")
        address = await _start(stack, config, start_timeout_s, over)
        stack.push_async_callback(stop, asyncio.create_task(_feed(notifier), name="watchdog"))
        notifier.ready(f"serving on {address}")
        return {"ready": "controld", "id": config.id, "listen": address}

    await program.serve(start)


async def _start(
    stack: AsyncExitStack,
    config: ControldConfig,
    start_timeout_s: float,
    over: Over,
) -> str:
    """Start everything, in order; return the address that is served."""
    background = Background(lambda error: program.end(over, error))
    stack.push_async_callback(background.close)
    tls = TlsFiles.of(config.tls)
    if tls is not None:
        background.spawn(tls.keep_looking(), "certificates")
    give_up = asyncio.get_running_loop().time() + start_timeout_s
    store, bus, beats_bus = await _connect(stack, config, give_up, over)
    # Servers that many start with at once answer late, and not always the first time.
    settings = await program.reach("etcd", lambda: cluster_settings(store, config.cluster), give_up)
    log = NatsLog(bus)
    await program.reach("NATS", lambda: log.ensure(settings), give_up)
    cluster = Cluster(
        controld=config.id,
        settings=settings,
        layout=Layout(settings.shards, settings.streams),
        bus=bus,
        log=log,
        store=store,
        clock=SystemClock(),
    )
    registry = Registry(store, background)
    stack.push_async_callback(registry.close)
    await program.reach("etcd", registry.start, give_up)
    return await Parts(config, cluster, background, registry, beats_bus, tls).start(stack)


async def _feed(notifier: Notifier) -> None:
    """Feed systemd's watchdog for as long as this loop turns."""
    while notifier.watchdog_s:
        notifier.alive()
        await asyncio.sleep(notifier.watchdog_s / _FEEDS_A_LIMIT)


async def _connect(
    stack: AsyncExitStack,
    config: ControldConfig,
    give_up: float,
    over: Over,
) -> tuple[Store, NatsBus, NatsBus]:
    def failed(error: Exception) -> None:
        program.bus_trouble(over, error)

    store = await program.reach("etcd", lambda: EtcdStore.connect(config.etcd), give_up)
    stack.push_async_callback(store.close)

    async def connect(name: str) -> NatsBus:
        bus = await program.reach(
            "NATS", lambda: NatsBus.connect(config.nats, name, failed), give_up
        )
        stack.push_async_callback(bus.close)
        return bus

    bus = await connect(f"controld {config.id}")
    return store, bus, await connect(f"controld {config.id} beats")
