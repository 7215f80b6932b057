"""agentctl trace"""

from __future__ import annotations

import click

from agentctl.boundary import verb
from agentctl.history import COLUMNS, history, rows, summary
from agentctl.options import address_option, connect, json_option
from agentctl.output import as_json, say, table


@click.command("trace")
@click.argument("task")
@address_option
@json_option
@verb
async def command(task: str, addresses: tuple[str, ...], json_out: bool) -> int:
    """Show every attempt and step of TASK in time order, live or ended.

    Times are seconds since the submission. GAP is the time since all steps before had
    ended. Steps are timed by their node's clock, attempts by a controld's. Exits with 2 when
    the task is not known or its result has expired.

    \b
    Keys of --json; null is not known or not yet:
      task, pool, session, state, reason, failure {code, message}, created_ms,
      finished_ms, queue_wait_ms (to the first placement)
      attempts[]: attempt, node, domain, placed_ms, why, ended_ms, cause, reason
      steps[]: step, kind, name, attempt, node, started_ms, gap_ms, wall_ms, cpu_ms,
        tokens_in, tokens_out, summary
      total: ms, attempts, steps, wall_ms, cpu_ms, gap_ms, tokens_in, tokens_out
    """
    async with connect(addresses) as client:
        told = history(await client.trace(task))
    if json_out:
        as_json(told)
        return 0
    say(f"{told['pool']}/{told['session']}: {summary(told)}")
    if told["reason"] and not told["finished_ms"]:
        say(told["reason"])
    table(COLUMNS, rows(told))
    return 0
