"""agentctl controlds"""

from __future__ import annotations

import click

from agentctl.boundary import verb
from agentctl.options import address_option, connect, json_option
from agentctl.output import as_json, table


@click.command("controlds")
@address_option
@json_option
@verb
async def command(addresses: tuple[str, ...], json_out: bool) -> int:
    """List living controlds with the shards and racks they own."""
    async with connect(addresses) as client:
        controlds = await client.controlds()
    if json_out:
        for controld in controlds:
            as_json(controld)
        return 0
    table(
        ("CONTROLD", "ADDRESS", "SHARDS", "RACKS"),
        [(c.controld, c.address, len(c.shards), " ".join(c.racks)) for c in controlds],
    )
    return 0
