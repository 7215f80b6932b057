"""agentctl submit"""

from __future__ import annotations

from pathlib import Path

import click

from agentctl.boundary import verb
from agentctl.options import address_option, connect, json_option, read_input
from agentctl.output import as_json, data, say


@click.command("submit")
@click.argument("pool")
@click.argument("text", required=False)
@click.option(
    "--file", type=click.Path(path_type=Path), help="Read the input from a file; - is stdin."
)
@click.option("--session", default="", help="Session of the pool; a new one when left out.")
@click.option("--request-id", default="", help="Idempotency key: the same key is the same task.")
@click.option("--deadline", default=0.0, help="Seconds until the task is failed.")
@click.option("--tenant", default="", help="Whose task it is, for limits of each tenant.")
@address_option
@json_option
@verb
async def command(
    pool: str,
    text: str | None,
    file: Path | None,
    session: str,
    request_id: str,
    deadline: float,
    tenant: str,
    addresses: tuple[str, ...],
    json_out: bool,
) -> int:
    """Submit TEXT to POOL and print the task's id.

    When it is printed, the task is stored durably and will not be lost.
    """
    content = read_input(text, file)
    async with connect(addresses) as client:
        reply = await client.submit(
            pool, content, session=session, request_id=request_id, deadline_s=deadline,
            tenant=tenant,
        )  # fmt: skip
    if json_out:
        as_json(reply)
    else:
        data(reply.task)
        if reply.duplicate:
            say("this request id was accepted before; this is its task")
    return 0
