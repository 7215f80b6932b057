"""agentctl explain"""

from __future__ import annotations

import click

from agentctl.boundary import verb
from agentctl.options import address_option, connect, json_option
from agentctl.output import as_json, data, table


@click.command("explain")
@click.argument("task")
@address_option
@json_option
@verb
async def command(task: str, addresses: tuple[str, ...], json_out: bool) -> int:
    """Say why TASK was placed where it was, or what keeps it waiting."""
    async with connect(addresses) as client:
        answer = await client.explain(task)
    if json_out:
        as_json(answer)
        return 0
    data(f"{answer.chosen or 'not placed'}: {answer.why}")
    if answer.candidates:
        table(
            ("NODE", "DOMAIN", "ELIGIBLE", "SCORE", "WHY"),
            [
                (c.node, c.domain, "yes" if c.eligible else "no", f"{c.score:.3f}", c.line)
                for c in answer.candidates
            ],
        )
    return 0
