"""agentctl pools"""

from __future__ import annotations

from pathlib import Path

import click

from agentctl.boundary import verb
from agentctl.options import address_option, connect, json_option
from agentctl.output import as_json, say, table
from corefleet.config import load_pools, pool_text


@click.command("pools")
@click.option(
    "--apply", "file", type=click.Path(path_type=Path), help="Create or replace pools from TOML."
)
@address_option
@json_option
@verb
async def command(file: Path | None, addresses: tuple[str, ...], json_out: bool) -> int:
    """List pools, after applying a file of them when one is given."""
    wanted = load_pools(file) if file else []
    async with connect(addresses) as client:
        for pool in wanted:
            await client.apply_pool(pool.name, pool_text(pool))
            say(f"applied {pool.name}")
        pools = await client.pools()
    if json_out:
        for shown in pools:
            as_json(shown)
        return 0
    table(
        ("POOL", "CLASS", "AGENT", "MODEL", "TOOLS", "SLOTS"),
        [
            (p.name, p.pool_class, p.agent, p.model or "-", " ".join(p.tools), p.slots)
            for p in pools
        ],
    )
    return 0
