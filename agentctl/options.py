"""Options that several verbs share."""

from __future__ import annotations

import functools
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from agentctl.output import say
from corefleet.client import Client
from corefleet.config import client_tls, controld_address, token_file
from corefleet.errors import InvalidInput
from corefleet.tls import TlsFiles

F = TypeVar("F", bound=Callable[..., Any])

_TLS_PARTS = {
    "ca": "Who signed the certificates of controlds",
    "cert": "Your certificate",
    "key": "Its private key",
}

_TOKEN_FILE = f"{__name__}.token_file"
_MAX_TOKEN_BYTES = 16 * 1024
MAX_INPUT_READ = 8 * 1024 * 1024


def address_option(function: F) -> F:
    """--address, --tls-ca, --tls-cert, --tls-key, --token-file: whom to talk to, how, as whom."""
    function = _token_option(function)
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


def _token_option(function: F) -> F:
    # Not a parameter of each verb: `connect` asks for it.
    option = click.option(
        "--token-file",
        "token_file",
        type=click.Path(path_type=Path),
        metavar="PATH",
        expose_value=False,
        callback=_keep_token_file,
        help="A file with the token to show. Default: $COREFLEET_TOKEN_FILE, or none.",
    )
    return option(function)


def _keep_token_file(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    named = path or (Path(token_file()) if token_file() else None)
    context.meta[_TOKEN_FILE] = named


def json_option(function: F) -> F:
    """--json: data for programs."""
    option = click.option(
        "--json", "json_out", is_flag=True, help="Print JSON, one document a line."
    )
    return option(function)


def connect(addresses: tuple[str, ...]) -> Client:
    """Return a client of the controlds that the command line or the environment names."""
    context = click.get_current_context(silent=True)
    path = context.meta.get(_TOKEN_FILE) if context is not None else None
    token = functools.partial(read_token, path) if path is not None else None
    return Client(addresses_of(addresses), tls=named_tls(), token=token)


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


def read_token(path: Path) -> str:
    """Return the token in a file that only its owner and group can read; raises InvalidInput."""
    try:
        with path.open("rb") as source:
            mode = os.fstat(source.fileno()).st_mode
            raw = source.read(_MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise InvalidInput(
            "--token-file", str(path), f"a readable file ({error.strerror})"
        ) from None
    if mode & stat.S_IROTH:
        raise InvalidInput(
            "--token-file", str(path), "a file that not everybody can read (chmod o-r)"
        )
    token = raw.decode("ascii", "replace").strip()
    if not token or len(raw) > _MAX_TOKEN_BYTES or not token.isascii() or len(token.split()) > 1:
        raise InvalidInput("--token-file", str(path), "a file with one token and nothing else")
    return token


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
