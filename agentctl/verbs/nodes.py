"""agentctl nodes"""

from __future__ import annotations

import click

from agentctl.boundary import verb
from agentctl.options import address_option, connect, json_option
from agentctl.output import as_json, say, table
from agentctl.verbs.drain import begun_line


@click.command("nodes")
@address_option
@json_option
@verb
async def command(addresses: tuple[str, ...], json_out: bool) -> int:
    """List nodes with their state, domains and load."""
    async with connect(addresses) as client:
        nodes = await client.nodes()
    if json_out:
        for node in nodes:
            as_json(node)
        return 0
    rows = []
    for node in nodes:
        domains = " ".join(f"{d.domain}:[{d.cpus}]" for d in node.domains)
        used = sum(slots.used for domain in node.domains for slots in domain.slots)
        total = sum(slots.total for domain in node.domains for slots in domain.slots)
        rows.append(
            (
                node.node, node.rack, node.state, node.epoch, node.arch, domains,
                f"{node.load.cpu:.0%}", f"{node.load.memory:.0%}", f"{used}/{total}",
                f"{node.beat_age_ms} ms",
            )
        )  # fmt: skip
    table(
        ("NODE", "RACK", "STATE", "EPOCH", "ARCH", "DOMAINS", "CPU", "MEMORY", "SLOTS", "BEAT"),
        rows,
    )
    for node in nodes:
        if node.HasField("drain"):
            at_work = node.running + node.queued
            say(f"{begun_line(node.drain)}; {at_work or 'nothing'} left")
        for warning in node.warnings:
            say(f"{node.node}: {warning}")
    return 0
