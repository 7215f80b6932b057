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
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)

P = ParamSpec("P")

FAILED = 1
"""The task or operation failed."""
WRONG_INPUT = 2
"""The command line, a file or a value is wrong; nothing was done."""
UNAVAILABLE = 3
"""The fleet cannot be reached or has no room now; the same command may work later."""
DENIED = 5
"""The fleet does not know who asks, or does not let them; `agentctl whoami` says more."""
INTERRUPTED = 130


def verb(run: Callable[P, Coroutine[Any, Any, int]]) -> Callable[P, None]:
    """Turn a coroutine that returns an exit code into a click callback."""

    @wraps(run)
    def callback(*args: P.args, **kwargs: P.kwargs) -> None:
        raise SystemExit(_ended(lambda: uvloop.run(run(*args, **kwargs))))

    return callback


def local_verb(run: Callable[P, int]) -> Callable[P, None]:
    """Turn a function that works on files and talks to nobody into a click callback."""

    @wraps(run)
    def callback(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = _ended(lambda: run(*args, **kwargs))
        except OSError as error:
            click.echo(f"agentctl: {error.filename or 'file'}: {error.strerror}", err=True)
            code = FAILED
        raise SystemExit(code)

    return callback


def _ended(run: Callable[[], int]) -> int:
    try:
        return run()
    except CorefleetError as error:
        click.echo(f"agentctl: {error}", err=True)
        code = exit_code(error)
        if code == UNAVAILABLE and not isinstance(error, Exhausted):
            click.echo("is a fleet up? `agentctl up` starts one; --address names it", err=True)
        return code
    except (KeyboardInterrupt, asyncio.CancelledError):
        return INTERRUPTED


def exit_code(error: CorefleetError) -> int:
    """Return the documented exit code of an error."""
    if isinstance(error, InvalidInput | ConfigError | NotFound | Conflict):
        return WRONG_INPUT
    if isinstance(error, Unavailable | Exhausted):
        return UNAVAILABLE
    if isinstance(error, Unauthenticated | PermissionDenied):
        return DENIED
    return FAILED
