"""What the agentd program does beside being a node: it tells and records machines."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click
import msgspec

from agentd.capture import capture, default_name
from agentd.core.topology import Overrides
from agentd.discovery_json import as_report
from agentd.drawing import as_text
from agentd.hostfs import HostFs
from agentd.probes import discover
from agentd.probes.readings import read_readings
from agentd.release import release
from corefleet import program
from corefleet.errors import CorefleetError, InvalidInput

_root = click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("/"),
    show_default=True,
    help="Read a recorded machine below this directory.",
)
_json = click.option("--json", "machine_readable", is_flag=True, help="One JSON object.")


@click.command("discover")
@_root
@_json
def discover_command(root: Path, machine_readable: bool) -> None:
    """Print what agentd finds on a machine."""
    host = HostFs(root)
    if machine_readable:
        click.echo(_report(host))
    else:
        encoding = (sys.stdout.encoding or "").lower().replace("-", "")
        click.echo(as_text(discover(host, Overrides()), ascii=encoding != "utf8"))


@click.command("capture")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="NAME.tar.gz")
@_root
@_json
def capture_command(output: Path | None, root: Path, machine_readable: bool) -> None:
    """Record a machine's topology files for a bug report, without telling whose it is."""
    try:
        out = output or Path(default_name(discover(HostFs(root), Overrides())))
        report = capture(root, out, _report)
    except InvalidInput as error:
        program.leave("agentd", program.EXIT_CONFIG, error)
    except CorefleetError as error:
        program.leave("agentd", program.EXIT_FAILED, error)
    if machine_readable:
        told = {
            "file": str(report.file),
            "expected": str(report.expected),
            "files": report.files,
            "bytes": report.bytes,
            "left_out": report.left_out,
        }
        click.echo(msgspec.json.encode(told).decode())
        return
    click.echo(str(report.file))
    for line in report.left_out:
        click.echo(f"left out: {line}", err=True)


@click.command("release")
def release_command() -> None:
    """Undo what outlives agentd: for uninstalling, after agentd was stopped.

    Ends all workers, engines and mounts of models, removes the groups of resctrl and lets
    the system run on every CPU again. Exit code 1 when something is left.
    """
    left = asyncio.run(release(HostFs()))
    for line in left:
        click.echo(f"left: {line}", err=True)
    sys.exit(program.EXIT_FAILED if left else 0)


def _report(host: HostFs) -> str:
    found = as_report(discover(host, Overrides()), read_readings(host))
    return msgspec.json.format(msgspec.json.encode(found)).decode()
