"""Arguments and options that the commands of `agentctl pki` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from agentctl.durations import Duration
from agentctl.options import json_option
from corefleet.identity import ROLES
from corefleet.pki.authority import CERTIFICATE_DAYS

F = TypeVar("F", bound=Callable[..., Any])

HOST_DIRECTORY = Path("/etc/corefleet/pki")
"""Where a host's programs find their certificates."""
PATH = click.Path(path_type=Path)


def ca_argument(function: F) -> F:
    """DIR: the directory of the CA."""
    return click.argument("directory", metavar="DIR", type=PATH)(function)


def identity_arguments(required: bool) -> Callable[[F], F]:
    """ROLE NAME and their hosts."""

    def add(function: F) -> F:
        function = click.option(
            "--host",
            "hosts",
            multiple=True,
            help="A name or address that it listens on; repeat for more.",
        )(function)
        function = click.argument("name", required=required)(function)
        return click.argument("role", type=click.Choice(ROLES), required=required)(function)

    return add


def batch_options(renew_before_s: int | None) -> Callable[[F], F]:
    """What `issue`, `renew` and `sign` share."""

    def add(function: F) -> F:
        for option in (
            click.option(
                "--from",
                "list_file",
                type=click.Path(path_type=Path, allow_dash=True),
                help="Instead of ROLE NAME a list: tab-separated or JSON lines; - is stdin.",
            ),
            click.option("--days", type=float, default=CERTIFICATE_DAYS, show_default=True),
            click.option(
                "--out",
                type=PATH,
                default=Path(),
                help="Where files go. From a list: below OUT/ROLE/NAME. Default: here.",
            ),
            click.option(
                "--renew-before",
                "renew_before_s",
                type=Duration(),
                default=renew_before_s,
                help="Make only what is missing, ends within this time (30d), has other names "
                "or is signed by another CA. Default: "
                + ("30d." if renew_before_s else "make all."),
            ),
            click.option("--dry-run", is_flag=True, help="Only say what would be made, and why."),
            json_option,
        ):
            function = option(function)
        return function

    return add


def group_option(function: F) -> F:
    """--group: who else may read the key."""
    return click.option(
        "--group", help="The group that may read the key (0640). Default: only its owner (0600)."
    )(function)


def host_directory_option(function: F) -> F:
    """--dir: where the files of this host are."""
    return click.option("--dir", "directory", type=PATH, default=HOST_DIRECTORY, show_default=True)(
        function
    )
