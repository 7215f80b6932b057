"""agentctl support-bundle"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import click

from agentctl.boundary import verb
from agentctl.options import address_option, connect
from agentctl.output import data, plain, say
from agentctl.support.bundle import Bundle, collect, of_configuration, of_system
from agentctl.verbs.node import ask_agentd
from corefleet.errors import InvalidInput
from corefleet.program import version


@click.command("support-bundle")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The archive. Default: corefleet-support-<time>.tar.gz, here.",
)
@click.option(
    "--config-dir",
    default="/etc/corefleet",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Where the configuration lies.",
)
@address_option
@verb
async def command(output: Path | None, config_dir: Path, addresses: tuple[str, ...]) -> int:
    """Collect what a bug report needs in one archive, without secrets.

    Configuration, units, journals, topology and the state of the fleet; no inputs or answers
    of tasks, no keys. What cannot be had is named in manifest.json with the reason. Look
    through it before you send it: names of hosts, nodes and sessions are in it.
    """
    path = output or Path(
        f"corefleet-support-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.tar.gz"
    )
    if path.exists():
        raise InvalidInput("--output", str(path), "a file that is not there yet")
    bundle = Bundle()
    bundle.add("version.txt", f"corefleet {version()}\nPython {sys.version}\n")
    await of_configuration(bundle, config_dir)
    await of_system(bundle)
    await collect(bundle, "machine.json", _topology)
    async with connect(addresses) as client:
        asked: dict[str, Callable[[], Awaitable[Any]]] = {
            "controlds": client.controlds,
            "nodes": client.nodes,
            "pools": client.pools,
        }
        for name, ask in asked.items():
            await collect(bundle, f"fleet/{name}.json", lambda ask=ask: _listed(ask))  # type: ignore[misc]
    try:
        bundle.write(path, int(time.time()))
    except OSError as error:
        raise InvalidInput("--output", str(path), f"a writable place ({error.strerror})") from None
    data(str(path))
    say(f"{len(bundle.files)} files; look through them before you send them")
    for name, why in bundle.missing.items():
        say(f"missing: {name}: {why.splitlines()[0] if why else 'no reason given'}")
    return 0


async def _topology() -> str:
    return json.dumps(await ask_agentd(["discover", "--json"]), indent=1)


async def _listed(ask: Callable[[], Awaitable[Sequence[Any]]]) -> str:
    return "\n".join(json.dumps(plain(each), sort_keys=True) for each in await ask())
