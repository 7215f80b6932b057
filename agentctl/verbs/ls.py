"""agentctl ls"""

from __future__ import annotations

import click

from agentctl.boundary import verb
from agentctl.options import address_option, connect, json_option
from agentctl.output import STATE_NUMBERS, as_json, state_name, table
from corefleet.rpc import tasks_pb2


@click.command("ls")
@click.option("--pool", default="", help="Only tasks of this pool.")
@click.option("--session", default="", help="Only tasks of this session; needs --pool.")
@click.option("--state", type=click.Choice(["queued", "placed", "running"]), help="Only these.")
@click.option("--limit", default=200, show_default=True, help="At most so many.")
@address_option
@json_option
@verb
async def command(
    pool: str,
    session: str,
    state: str | None,
    limit: int,
    addresses: tuple[str, ...],
    json_out: bool,
) -> int:
    """List tasks that have not ended."""
    number = STATE_NUMBERS[state or ""]
    async with connect(addresses) as client:
        tasks: list[tasks_pb2.Task] = []
        token = ""
        while len(tasks) < limit:
            page = await client.list(
                pool=pool,
                session=session,
                state=number,
                page_size=min(limit - len(tasks), 200),
                page_token=token,
            )
            tasks.extend(page.tasks)
            token = page.next_page_token
            if not token:
                break
    if json_out:
        for task in tasks:
            as_json(task)
        return 0
    table(
        ("TASK", "SESSION", "STATE", "ATTEMPT", "NODE", "REASON"),
        [
            (
                task.task, f"{task.pool}/{task.session}", state_name(task.state), task.attempt,
                task.node or "-", task.reason,
            )
            for task in tasks
        ],
    )  # fmt: skip
    return 0
