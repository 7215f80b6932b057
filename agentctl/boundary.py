"""The one place where errors of a verb become messages and exit codes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

import click
import uvloop

from corefleet.errors import (
    ConfigError,
    Conflict,
    CorefleetError,
    Exhausted,
    InvalidInput,
    NotFound,
    Unavailable,
)

P = ParamSpec("P")

FAILED = 1
"""The task or operation failed."""
WRONG_INPUT = 2
"""The command line, a file or a value is wrong; nothing was done."""
UNAVAILABLE = 3
"""The fleet cannot be reached or has no room now; the same command may work later."""
INTERRUPTED = 130


def verb(run: Callable[P, Coroutine[Any, Any, int]]) -> Callable[P, None]:
    """Turn a coroutine that returns an exit code into a click callback."""

    @wraps(run)
    def callback(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = uvloop.run(run(*args, **kwargs))
        except CorefleetError as error:
            click.echo(f"agentctl: {error}", err=True)
            code = exit_code(error)
            if code == UNAVAILABLE and not isinstance(error, Exhausted):
                click.echo("is a fleet up? `agentctl up` starts one; --address names it", err=True)
        except (KeyboardInterrupt, asyncio.CancelledError):
            code = INTERRUPTED
        raise SystemExit(code)

    return callback


def exit_code(error: CorefleetError) -> int:
    """Return the documented exit code of an error."""
    if isinstance(error, InvalidInput | ConfigError | NotFound | Conflict):
        return WRONG_INPUT
    if isinstance(error, Unavailable | Exhausted):
        return UNAVAILABLE
    return FAILED
