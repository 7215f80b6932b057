"""agentctl undrain"""

from __future__ import annotations

import click

from agentctl.boundary import verb
from agentctl.options import address_option, connect, json_option
from agentctl.output import as_json, say


@click.command("undrain")
@click.argument("node")
@address_option
@json_option
@verb
async def command(node: str, addresses: tuple[str, ...], json_out: bool) -> int:
    """End the drain of NODE: it is used again, and what has not moved yet stays."""
    async with connect(addresses) as client:
        reply = await client.undrain_node(node)
    if json_out:
        as_json(reply)
        return 0
    if reply.HasField("ended"):
        say(f"{node}: drained no more")
    else:
        say(f"{node}: was not drained by anybody")
    if reply.HasField("stands"):
        say(f"{node} still gets nothing new, its own health asks for that: {reply.stands.reason}")
    return 0
