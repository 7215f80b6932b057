"""Guests by hand.

python -m tools.guest build            # make or find everything that a guest needs
python -m tools.guest boot             # a fresh guest with the checkout; until Ctrl-C
python -m tools.guest boot --cold      # the same from the image, nothing installed
python -m tools.guest ssh [COMMAND]    # a shell or a command in a guest of its own
python -m tools.guest smoke-arm64      # boot an emulated aarch64 and look at it
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from tools.guest.errors import GuestError
from tools.guest.guest import Guest
from tools.guest.image import ensure_image
from tools.guest.layout import Layout
from tools.guest.prepare import booted, prepared, restored
from tools.guest.steps import Steps


@click.group(help=__doc__)
def main() -> None:
    """Guests by hand."""


_nodes = click.option("--nodes", default=4, show_default=True, help="NUMA nodes.")
_cpus = click.option("--cpus", default=1, show_default=True, help="CPUs of each node.")
_cold = click.option("--cold", is_flag=True, help="Boot the image; nothing is installed.")


@main.command()
@_nodes
@_cpus
def build(nodes: int, cpus: int) -> None:
    """Make or find the image, the wheels and the saved states."""
    with _said_well(), prepared(Layout(nodes, cpus), _steps()) as ready:
        print(ready.state)


@main.command()
@_nodes
@_cpus
@_cold
def boot(nodes: int, cpus: int, cold: bool) -> None:
    """Start a guest, print how to reach it, end it at Ctrl-C."""
    with _said_well(), _started(Layout(nodes, cpus), cold) as guest:
        print(shlex.join(guest.ssh_command()), flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


@main.command(context_settings={"ignore_unknown_options": True})
@_nodes
@_cpus
@_cold
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def ssh(nodes: int, cpus: int, cold: bool, command: tuple[str, ...]) -> None:
    """Start a guest, open a shell or run COMMAND in it, end it then."""
    with _said_well(), _started(Layout(nodes, cpus), cold) as guest:
        code = subprocess.call([*guest.ssh_command(), *command])
    sys.exit(code)


@main.command("smoke-arm64")
def smoke_arm64() -> None:
    """Build and boot an aarch64 guest, and check discovery and binding in it."""
    from tools.guest import arm64

    with _said_well():
        for line in arm64.smoke(_steps()):
            print(line)


@contextmanager
def _started(layout: Layout, cold: bool) -> Iterator[Guest]:
    steps = _steps()
    if cold:
        with booted(layout, ensure_image(layout.arch), steps=steps) as guest:
            yield guest
    else:
        with prepared(layout, steps) as ready, restored(ready, steps=steps) as guest:
            yield guest


@contextmanager
def _said_well() -> Iterator[None]:
    try:
        yield
    except GuestError as error:
        print(f"guest: {error}", file=sys.stderr)
        sys.exit(1)


def _steps() -> Steps:
    return Steps(lambda line: print(line, file=sys.stderr, flush=True))


if __name__ == "__main__":
    main(prog_name="python -m tools.guest")
