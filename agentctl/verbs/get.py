"""agentctl get"""

from __future__ import annotations

import click

from agentctl.boundary import verb
from agentctl.options import address_option, connect, json_option
from agentctl.output import as_json, data, say, state_name, step_line


@click.command("get")
@click.argument("task")
@address_option
@json_option
@verb
async def command(task: str, addresses: tuple[str, ...], json_out: bool) -> int:
    """Show TASK as it stands: state, place, steps, and the answer if it has one."""
    async with connect(addresses) as client:
        found = await client.get(task)
    if json_out:
        as_json(found)
        return 0
    where = f" on {found.node}/{found.domain}" if found.node else ""
    say(f"{found.pool}/{found.session}: {state_name(found.state)}{where}, attempt {found.attempt}")
    if found.reason:
        say(found.reason)
    if found.submitted_by:
        say(f"submitted by {found.submitted_by}")
    for step in found.steps:
        say(step_line(step))
    if found.failure.code:
        say(f"{found.failure.code}: {found.failure.message}")
    if found.output:
        data(found.output)
    return 0
