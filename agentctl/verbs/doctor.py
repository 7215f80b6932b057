"""agentctl doctor"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import click
import msgspec

from agentctl.boundary import FAILED, verb
from agentctl.doctor import fleet, host, servers
from agentctl.doctor.finding import Finding, error, ok, warning, worst
from agentctl.options import address_option, addresses_of, connect, json_option
from agentctl.output import as_json, data, table
from agentctl.verbs.node import ask_agentd
from corefleet import config as configuration
from corefleet.clock import SystemClock
from corefleet.config import AgentdConfig, ControldConfig
from corefleet.errors import ConfigError, CorefleetError

T = TypeVar("T")

_STATE = Path("/var/lib/corefleet")
_FIX_CONFIG = "correct the file; the message says what would be right"


@click.group("doctor")
def command() -> None:
    """Check a client, a control node or a node, and say what to do.

    Exit codes: 0 nothing is wrong (warnings may be), 1 something is, 2 wrong input.
    """


@command.command("client")
@address_option
@json_option
@verb
async def client(addresses: tuple[str, ...], json_out: bool) -> int:
    """Check the fleet as this client reaches it."""
    findings = list(await asyncio.gather(*map(_at, addresses_of(addresses))))
    if any(each.level == "ok" for each in findings):
        findings += await _of_fleet(addresses)
    return _tell(findings, json_out)


@command.command("control")
@click.option(
    "--config",
    "path",
    default="/etc/corefleet/controld.toml",
    show_default=True,
    type=click.Path(path_type=Path),
    help="The controld.toml of this control node.",
)
@json_option
@verb
async def control(path: Path, json_out: bool) -> int:
    """Check this control node: configuration, etcd, NATS, units, clock, disk."""
    config, finding = _configuration(path, ControldConfig)
    findings = [finding]
    if config is not None:
        findings += await servers.etcd(config.etcd)
        findings += await servers.nats(config.nats)
    findings.append(await host.unit("controld"))
    findings += [await host.clock(), await host.disk("disk", _STATE)]
    return _tell(findings, json_out)


@command.command("node")
@click.option(
    "--config",
    "path",
    default="/etc/corefleet/agentd.toml",
    show_default=True,
    type=click.Path(path_type=Path),
    help="The agentd.toml of this node.",
)
@json_option
@verb
async def node(path: Path, json_out: bool) -> int:
    """Check this node: configuration, topology, NATS, systemd, control groups, clock, disk."""
    config, finding = _configuration(path, AgentdConfig)
    findings = [finding]
    data_dir = _STATE
    if config is not None:
        data_dir = Path(config.data_dir)
        findings += await servers.nats(config.nats)
    findings += await _machine()
    findings.append(host.program("numactl", "numactl"))
    findings.append(await host.systemd())
    findings += [await host.unit(name) for name in ("corefleet-heartbeat", "agentd")]
    findings += [await host.clock(), await host.disk("disk", data_dir)]
    return _tell(findings, json_out)


def _configuration(path: Path, kind: type[T]) -> tuple[T | None, Finding]:
    """Return what a file configures, None when it is wrong, and what there is to say of it."""
    try:
        return configuration.load(path, kind), ok("configuration", str(path))
    except ConfigError as failure:
        return None, error("configuration", str(failure), _FIX_CONFIG)


async def _at(address: str) -> Finding:
    async with connect((address,)) as client:
        return await fleet.address(address, client)


async def _of_fleet(addresses: tuple[str, ...]) -> list[Finding]:
    clock = SystemClock()
    async with connect(addresses) as client:
        living, known, pools = await client.controlds(), await client.nodes(), await client.pools()
        before_ms = clock.wall_ms()
        overview = await client.overview()
        after_ms = clock.wall_ms()
    return [
        *fleet.controlds(living),
        *fleet.nodes(known),
        *fleet.places(overview, [each.name for each in pools]),
        fleet.clocks(overview.at_ms, before_ms, after_ms),
    ]


async def _machine() -> list[Finding]:
    """What discovery makes of this machine."""
    try:
        found = await ask_agentd(["discover", "--json"])
    except CorefleetError as failure:
        return [
            error(
                "topology",
                str(failure),
                "send what `agentctl node capture` records with a bug report",
            )
        ]
    domains = [each["id"] for each in found["nodes"] if "cpu" in str(each.get("kind"))]
    what = f"{found['arch']}, domains {domains}, CPUs {found['cpus']['online']}"
    topology = ok("topology", what)
    if found["warnings"]:
        said = "; ".join(map(str, found["warnings"]))
        topology = warning("topology", f"{what}; {said}", "see docs/machines.md")
    cgroup = found["cgroup"]
    return [topology, host.cgroups(int(cgroup["version"]), bool(cgroup.get("hybrid")))]


def _tell(findings: Sequence[Finding], json_out: bool) -> int:
    if json_out:
        for each in findings:
            as_json(msgspec.to_builtins(each))
    else:
        table(("CHECK", "", "FOUND"), [(each.check, each.level, each.what) for each in findings])
        for each in findings:
            if each.do:
                data(f"{each.check}: {each.do}")
    return FAILED if worst(findings) == "error" else 0
