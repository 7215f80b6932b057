"""agentctl node"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from agentctl.boundary import verb
from agentctl.options import address_option, connect, json_option
from agentctl.output import as_json, data, say, table
from corefleet.config import child_environment
from corefleet.errors import ConfigError, LaunchFailed, NotFound
from corefleet.rpc import fleet_pb2

_AGENTD = (sys.executable, "-m", "agentd")
_WRONG_INPUT = 2


@click.group("node")
def command() -> None:
    """Look at one node, or record this machine's topology."""


@command.command("show")
@click.argument("node")
@address_option
@json_option
@verb
async def show(node: str, addresses: tuple[str, ...], json_out: bool) -> int:
    """Show NODE: its domains, the slots of each pool there, and what is not isolated."""
    async with connect(addresses) as client:
        nodes = await client.nodes()
    found = next((one for one in nodes if one.node == node), None)
    if found is None:
        known = ", ".join(sorted(one.node for one in nodes)[:20]) or "none"
        raise NotFound(f"node {node!r} never registered; known are: {known}")
    if json_out:
        as_json(found)
        return 0
    for line in node_lines(found):
        data(line)
    table(
        ("DOMAIN", "CPUS", "MEMORY", "POOL", "SLOTS", "USED"),
        [row for domain in found.domains for row in domain_rows(domain)],
    )
    for line in found.isolation:
        data(f"isolation: {line}")
    for warning in found.warnings:
        data(f"warning: {warning}")
    return 0


def node_lines(node: fleet_pb2.Node) -> list[str]:
    """Return what is said of a node before its domains."""
    load = node.load
    who = f"{node.arch or 'unknown'}, corefleet {node.version or 'of unknown version'}"
    bandwidth = f"memory bandwidth {load.memory_bandwidth:.0%}"
    return [
        f"{node.node} in {node.rack}: {node.state}, epoch {node.epoch}, {who}",
        f"last heartbeat {node.beat_age_ms} ms ago; {node.running} running, {node.queued} queued",
        f"load: CPU {load.cpu:.0%}, memory {load.memory:.0%}, {bandwidth}",
    ]


def domain_rows(domain: fleet_pb2.Domain) -> list[tuple[object, ...]]:
    """Return a row for each pool of a domain; one without a pool where it has none."""
    place = (domain.domain, domain.cpus, f"{domain.memory_bytes / 2**30:.1f} GiB")
    rows: list[tuple[object, ...]] = [
        (*place, slots.pool, slots.total, slots.used) for slots in domain.slots
    ]
    return rows or [(*place, "-", 0, 0)]


@command.command("capture")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The archive, NAME.tar.gz. Default: named after the machine's kind, here.",
)
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Record the machine below this directory instead of this one.",
)
@json_option
@verb
async def capture(output: Path | None, root: Path | None, json_out: bool) -> int:
    """Record this machine's topology in a small archive for a bug report.

    Host names, addresses, serial numbers, process names and most of the kernel's command
    line are left out; the archive is refused if it still tells whose machine it is.
    """
    arguments = ["capture", "--json"]
    arguments += ["--output", str(output)] if output else []
    arguments += ["--root", str(root)] if root else []
    written = await ask_agentd(arguments)
    if json_out:
        as_json({key: written[key] for key in ("file", "files", "bytes")})
    else:
        data(str(written["file"]))
        say(f"{written['files']} files, {written['bytes']} bytes")
        say(f"correct {written['expected']} where it is wrong, and send both")
    for line in written["left_out"]:
        say(f"left out: {line}")
    return 0


async def ask_agentd(arguments: Sequence[str], program: Sequence[str] = _AGENTD) -> dict[str, Any]:
    """Run agentd to its end and return the JSON object that it printed.

    Raises ConfigError with agentd's message for what it calls wrong input, LaunchFailed
    for all else.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *program,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=child_environment({}),
        )
    except OSError as error:
        raise LaunchFailed(f"agentd: {program[0]}: {error}") from error
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        message = err.decode("utf-8", "replace").strip() or f"ended with {process.returncode}"
        raise (ConfigError if process.returncode == _WRONG_INPUT else LaunchFailed)(message)
    try:
        answer = json.loads(out)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise LaunchFailed(f"agentd: {out[:200]!r} instead of a JSON object")
    return answer
