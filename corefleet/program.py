"""What the daemons do alike: start, say that they are ready, end when they are told to."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from importlib import metadata
from typing import Any, NoReturn, TypeVar

import msgspec
import structlog
from nats.errors import Error as NatsError

from corefleet.errors import CorefleetError, IllegalTransition, Unavailable

T = TypeVar("T")

Over = asyncio.Future[None]
"""Done when the process is to end: well, or with what went wrong."""

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_INCOMPATIBLE = 3
EXIT_UNREACHABLE = 4
EXIT_ADDRESS = 5

_RETRY_S = 1.0

_log = structlog.get_logger(__name__)


async def serve(
    start: Callable[[AsyncExitStack, Over], Awaitable[dict[str, object]]],
) -> None:
    """Start, then serve until SIGTERM, SIGINT or a failure; then unwind what `start` pushed.

    What `start` returns is printed as one JSON line on stdout: the process is ready.
    Raises what `start` raises, or what a part of the process died of.
    """
    loop = asyncio.get_running_loop()
    over: Over = loop.create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, over, None)
    async with AsyncExitStack() as stack:
        starting = asyncio.ensure_future(start(stack, over))
        first: tuple[asyncio.Future[Any], ...] = (starting, over)
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            ready = msgspec.json.encode(starting.result()).decode()
            # What is there now stays: no collection need walk through it again.
            gc.collect()
            gc.freeze()
            sys.stdout.write(f"{ready}\n")
            sys.stdout.flush()
        else:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        await over
        _log.info("stopping")
    _log.info("stopped")


def end(over: Over, error: BaseException | None) -> None:
    """Let the process end, with `error` if something went wrong. The first call counts."""
    if over.done():
        return
    if error is None:
        over.set_result(None)
    else:
        over.set_exception(error)


def bus_trouble(over: Over, error: Exception) -> None:
    """Errors of the connection pass; one of our own handlers is a defect, and ends us."""
    passing = isinstance(error, CorefleetError | NatsError | OSError | TimeoutError)
    if passing and not isinstance(error, IllegalTransition):
        _log.warning("trouble with NATS", reason=str(error) or repr(error))
    else:
        end(over, error)


async def reach(what: str, connect: Callable[[], Awaitable[T]], give_up: float) -> T:
    """Try to connect until `give_up`, a time of the loop.

    Raises Unavailable then, and Incompatible at once.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            return await connect()
        except Unavailable as error:
            if loop.time() + _RETRY_S > give_up:
                raise
            _log.warning("not reached yet", server=what, reason=str(error))
            await asyncio.sleep(_RETRY_S)


def leave(program: str, code: int, error: CorefleetError) -> NoReturn:
    """End the process with one line on stderr."""
    sys.stderr.write(f"{program}: {error}\n")
    raise SystemExit(code)


def version() -> str:
    """Return the installed version of corefleet, `source` when it is not installed."""
    try:
        return metadata.version("corefleet")
    except metadata.PackageNotFoundError:
        return "source"
