"""agentctl run"""

from __future__ import annotations

from pathlib import Path

import click

from agentctl.boundary import verb
from agentctl.follow import follow
from agentctl.options import address_option, connect, json_option, read_input


@click.command("run")
@click.argument("pool")
@click.argument("text", required=False)
@click.option(
    "--file", type=click.Path(path_type=Path), help="Read the input from a file; - is stdin."
)
@click.option("--session", default="", help="Session of the pool; a new one when left out.")
@click.option("--request-id", default="", help="Idempotency key: the same key is the same task.")
@click.option("--deadline", default=0.0, help="Seconds until the task is failed.")
@click.option("--tenant", default="", help="Whose task it is, for limits of each tenant.")
@click.option("--tokens/--no-tokens", default=True, help="Show tokens as they come.")
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
    tokens: bool,
    addresses: tuple[str, ...],
    json_out: bool,
) -> int:
    """Submit TEXT to POOL and follow the task to its end.

    The answer goes to stdout, the steps to stderr. Exits with 1 when the task fails.
    Interrupting does not cancel the task.
    """
    content = read_input(text, file)
    async with connect(addresses) as client:
        events = client.run(
            pool, content, session=session, request_id=request_id, deadline_s=deadline,
            tenant=tenant,
        )  # fmt: skip
        return await follow(events, json_out=json_out, tokens=tokens)
