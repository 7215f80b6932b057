"""Options that several verbs share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from agentctl.output import say
from corefleet.client import Client
from corefleet.config import client_tls, controld_address
from corefleet.errors import InvalidInput
from corefleet.tls import TlsFiles

F = TypeVar("F", bound=Callable[..., Any])

_TLS_PARTS = {
    "ca": "Who signed the certificates of controlds",
    "cert": "Your certificate",
    "key": "Its private key",
}

MAX_INPUT_READ = 8 * 1024 * 1024


def address_option(function: F) -> F:
    """--address, and --tls-ca, --tls-cert, --tls-key: controlds to talk to, and how."""
    for part, what in reversed(_TLS_PARTS.items()):
        function = click.option(
            f"--tls-{part}",
            metavar="FILE",
            expose_value=False,
            callback=_remember,
            help=f"{what} (PEM). Default: $COREFLEET_TLS_{part.upper()}; without: no TLS.",
        )(function)
    return click.option(
        "--address",
        "addresses",
        multiple=True,
        metavar="HOST:PORT",
        help="A controld; repeat for more. Default: $COREFLEET_ADDRESS or 127.0.0.1:7070.",
    )(function)


def json_option(function: F) -> F:
    """--json: data for programs."""
    option = click.option(
        "--json", "json_out", is_flag=True, help="Print JSON, one document a line."
    )
    return option(function)


def connect(addresses: tuple[str, ...]) -> Client:
    """Return a client of the controlds that the command line or the environment names."""
    return Client(addresses_of(addresses), tls=named_tls())


def addresses_of(addresses: tuple[str, ...]) -> list[str]:
    """Return the controlds that the command line names, else the environment."""
    return list(addresses) or controld_address().split(",")


def named_tls() -> TlsFiles | None:
    """Return the certificates that the command line names, else the environment.

    Raises InvalidInput for some without the others, ConfigError for what cannot be used.
    """
    context = click.get_current_context(silent=True)
    meta = context.meta if context is not None else {}
    named = {
        part: str(meta.get(f"{__name__}.tls_{part}", default))
        for part, default in zip(_TLS_PARTS, client_tls(), strict=True)
    }
    if not any(named.values()):
        return None
    for part, path in named.items():
        if not path:
            raise InvalidInput(
                f"--tls-{part}", path, "a file: the CA, a certificate and its key go together"
            )
    return TlsFiles(**named)


def _remember(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Keep what is no business of the verb for `connect`."""
    if value is not None:
        context.meta[f"{__name__}.{parameter.name}"] = value


def read_input(text: str | None, file: Path | None) -> bytes:
    """Return the task's input from the argument, a file, or stdin (`-`).

    Raises InvalidInput when there is none, it is not UTF-8 or is far too large.
    """
    if (text is None) == (file is None):
        raise InvalidInput("INPUT", text, "either a text or --file, and not both")
    if file is None:
        raw = (text or "").encode("utf-8", "surrogateescape")
    elif str(file) == "-":
        say("reading the input from stdin")
        raw = sys.stdin.buffer.read(MAX_INPUT_READ + 1)
    else:
        try:
            with file.open("rb") as source:
                raw = source.read(MAX_INPUT_READ + 1)
        except OSError as error:
            raise InvalidInput("--file", str(file), f"a readable file ({error.strerror})") from None
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput("input", raw[:20], f"UTF-8 text (byte {error.start} is not)") from None
    return raw
