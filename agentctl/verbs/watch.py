"""agentctl watch"""

from __future__ import annotations

import click

from agentctl.boundary import verb
from agentctl.follow import follow
from agentctl.options import address_option, connect, json_option


@click.command("watch")
@click.argument("task")
@click.option("--tokens/--no-tokens", default=True, help="Show tokens as they come.")
@address_option
@json_option
@verb
async def command(task: str, tokens: bool, addresses: tuple[str, ...], json_out: bool) -> int:
    """Follow TASK to its end; exits with 1 when it fails."""
    async with connect(addresses) as client:
        return await follow(client.watch(task, tokens=tokens), json_out=json_out, tokens=tokens)
