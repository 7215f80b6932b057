"""The composition root of controld: names the adapters, starts and stops in order."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
import msgspec
import structlog
from nats.errors import Error as NatsError

from controld.api.server import PortInUse
from controld.background import Background
from controld.cluster import Cluster
from controld.parts import Parts
from controld.registry import Registry
from controld.settings import check_config, cluster_settings
from corefleet import config as configuration
from corefleet import event_loop, logs
from corefleet.adapters.etcd_store import EtcdStore
from corefleet.adapters.nats_bus import NatsBus
from corefleet.adapters.nats_log import NatsLog
from corefleet.clock import SystemClock
from corefleet.config import ControldConfig
from corefleet.errors import (
    ConfigError,
    CorefleetError,
    IllegalTransition,
    Incompatible,
    Unavailable,
)
from corefleet.store import Store
from corefleet.subjects import Layout

_log = structlog.get_logger(__name__)

T = TypeVar("T")

Over = asyncio.Future[None]
"""Done when the process is to end: well, or with what went wrong."""

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_INCOMPATIBLE = 3
EXIT_UNREACHABLE = 4
EXIT_ADDRESS = 5

_RETRY_S = 2.0
_DRAIN_S = 2.0


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
def main(path: Path, controld: str, listen: str, start_timeout: float) -> None:
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
    except ConfigError as error:
        _exit(EXIT_CONFIG, error)
    logs.configure(config.log, "controld", controld=config.id)
    with event_loop.runner() as runner:
        try:
            runner.run(run(config, start_timeout))
        except Incompatible as error:
            _exit(EXIT_INCOMPATIBLE, error)
        except PortInUse as error:
            _exit(EXIT_ADDRESS, error)
        except Unavailable as error:
            _exit(EXIT_UNREACHABLE, error)
        except CorefleetError as error:
            _exit(EXIT_FAILED, error)


async def run(config: ControldConfig, start_timeout_s: float) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

    Raises Incompatible, PortInUse, Unavailable (not reached in time), Conflict (the id is
    taken), or what a part of the process died of.
    """
    loop = asyncio.get_running_loop()
    over: Over = loop.create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _end, over, None)
    async with AsyncExitStack() as stack:
        starting = asyncio.create_task(_start(stack, config, start_timeout_s, over))
        first: list[asyncio.Future[Any]] = [starting, over]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        else:
            address = starting.result()
            ready = {"ready": "controld", "id": config.id, "listen": address}
            click.echo(msgspec.json.encode(ready).decode())
        await over
        _log.info("draining")
    _log.info("drained")


async def _start(
    stack: AsyncExitStack,
    config: ControldConfig,
    start_timeout_s: float,
    over: Over,
) -> str:
    """Start everything, in order; return the address that is served."""
    background = Background(lambda error: _end(over, error))
    stack.push_async_callback(background.close)
    store, bus, beats_bus = await _connect(stack, config, start_timeout_s, over)
    settings = await cluster_settings(store, config.cluster)
    log = NatsLog(bus)
    await log.ensure(settings)
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
    await registry.start()
    return await Parts(config, cluster, background, registry, beats_bus).start(stack)


async def _connect(
    stack: AsyncExitStack,
    config: ControldConfig,
    start_timeout_s: float,
    over: Over,
) -> tuple[Store, NatsBus, NatsBus]:
    give_up = asyncio.get_running_loop().time() + start_timeout_s

    def failed(error: Exception) -> None:
        _bus_error(over, error)

    store = await _reach("etcd", lambda: EtcdStore.connect(config.etcd), give_up)
    stack.push_async_callback(store.close)

    async def connect(name: str) -> NatsBus:
        bus = await _reach("NATS", lambda: NatsBus.connect(config.nats, name, failed), give_up)
        stack.push_async_callback(bus.close)
        return bus

    bus = await connect(f"controld {config.id}")
    return store, bus, await connect(f"controld {config.id} beats")


async def _reach(what: str, connect: Callable[[], Awaitable[T]], give_up: float) -> T:
    """Try until `give_up`, a time of the loop. Raises Unavailable then, Incompatible at once."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return await connect()
        except Unavailable as error:
            if loop.time() + _RETRY_S > give_up:
                raise
            _log.warning(f"{what} is not reached yet", error=str(error))
            await asyncio.sleep(_RETRY_S)


def _end(over: Over, error: BaseException | None) -> None:
    if over.done():
        return
    if error is None:
        over.set_result(None)
    else:
        over.set_exception(error)


def _bus_error(over: Over, error: Exception) -> None:
    """Errors of the connection pass; one of our own handlers is a defect, and ends us."""
    passing = isinstance(error, CorefleetError | NatsError | OSError | TimeoutError)
    if passing and not isinstance(error, IllegalTransition):
        _log.warning("trouble with NATS", error=str(error) or repr(error))
    else:
        _end(over, error)


def _exit(code: int, error: CorefleetError) -> NoReturn:
    sys.stderr.write(f"controld: {error}\n")
    raise SystemExit(code)
