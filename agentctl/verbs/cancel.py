"""agentctl cancel"""

from __future__ import annotations

import click

from agentctl.boundary import verb
from agentctl.options import address_option, connect, json_option
from agentctl.output import as_json, say, state_name


@click.command("cancel")
@click.argument("task")
@click.option("--reason", default="cancelled by the operator", help="Kept with the task.")
@address_option
@json_option
@verb
async def command(task: str, reason: str, addresses: tuple[str, ...], json_out: bool) -> int:
    """End TASK; a task that has ended already is an error that says how."""
    async with connect(addresses) as client:
        ended = await client.cancel(task, reason)
    if json_out:
        as_json(ended)
    else:
        say(f"{ended.task}: {state_name(ended.state)}")
    return 0
