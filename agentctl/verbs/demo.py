"""agentctl demo"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from agentctl.boundary import FAILED, verb
from agentctl.local.fleet import FleetPlan, LocalFleet
from agentctl.local.presets import MODELS_FILE, POOLS_FILE, prepare_pools
from agentctl.local.takeover import Takeover, run_takeover
from agentctl.output import as_json, data, event_line, say
from corefleet.client import Client
from corefleet.errors import ConfigError
from corefleet.messages.records import PoolSpec
from corefleet.rpc import tasks_pb2

POOL = "support"
SESSION = "demo"
QUESTION = "An order of 48 boxes costs 17.25 each. What is the total?"
FOLLOW_UP = "How often does the letter r occur in strawberry?"
MODELS = {"small": "qwen2.5-coder-0.5b", "large": "qwen2.5-coder-1.5b"}


@click.command("demo")
@click.option(
    "--model",
    type=click.Choice(list(MODELS)),
    default="small",
    show_default=True,
    help="Size of the language model.",
)
@click.option("--data", type=click.Path(path_type=Path), help="Keep state and logs here.")
@click.option("--json", "json_out", is_flag=True, help="Print the figures as JSON at the end.")
@verb
async def command(model: str, data: Path | None, json_out: bool) -> int:
    """Show one agent at work, then kill the node that holds its session.

    Starts a fleet of its own, ends it, and leaves nothing running. Exits with 1 when
    a turn fails or the second one does not finish on another node.
    """
    specs = await prepare_pools(POOLS_FILE, MODELS_FILE, {POOL: MODELS[model]})
    if not specs:
        raise ConfigError(f"{POOLS_FILE}: the demo needs a pool [{POOL}]")
    with tempfile.TemporaryDirectory(prefix="corefleet-demo-") as scratch:
        plan = FleetPlan(
            data=data or Path(scratch),
            port=0,
            pools=tuple(specs),
            models=MODELS_FILE,
            log_level="warning",
        )
        say("starting etcd, NATS, two controlds and two virtual nodes")
        async with (
            LocalFleet(plan, report=lambda line: say(f"  {line}")) as fleet,
            fleet.client() as client,
        ):
            return await _show(fleet, client, specs[0], json_out)


async def _show(fleet: LocalFleet, client: Client, pool: PoolSpec, json_out: bool) -> int:
    tools = ", ".join(tool.name for tool in pool.tools)
    say(f"\nFirst turn of session {POOL}/{SESSION} (model {pool.model}; tools {tools})")
    say(f"> {QUESTION}")
    first = None
    explained = False
    async for event in client.run(POOL, QUESTION.encode(), session=SESSION):
        if line := event_line(event):
            say(f"  {line}")
        if event.HasField("placed") and not explained:
            explained = True
            await _explain(client, event.task)
        elif event.HasField("finished"):
            first = event.finished
    if first is None or first.state != tasks_pb2.TASK_STATE_DONE:
        say("the first turn failed")
        return FAILED
    data(first.output)
    say("\nSecond turn of the same session; its node is killed (kill -9) while it runs")
    say(f"> {FOLLOW_UP}")
    seen = await run_takeover(
        fleet, client, POOL, SESSION, FOLLOW_UP, lambda line: say(f"  {line}")
    )
    return _report(seen, json_out)


async def _explain(client: Client, task: str) -> None:
    """Say why the task is where it is; with candidates only while it is live."""
    for candidate in (await client.explain(task)).candidates:
        say(f"    {candidate.node}, domain {candidate.domain}: {candidate.line}")


def _report(seen: Takeover, json_out: bool) -> int:
    if seen.finished is None or seen.finished.state != tasks_pb2.TASK_STATE_DONE:
        say("the second turn failed")
        return FAILED
    data(seen.finished.output)
    moved = bool(seen.killed) and seen.finished.node != seen.killed
    again = sorted({step for step in seen.steps if seen.steps.count(step) > 1})
    say(
        f"\n{seen.killed} was killed; the turn went on on {seen.finished.node} "
        f"{seen.placed_gap_s:.2f} s later, and its next step was done "
        f"{seen.step_gap_s:.2f} s after the kill."
    )
    say(f"steps done again: {again or 'none'}")
    if json_out:
        as_json(
            {
                "killed": seen.killed,
                "finished_on": seen.finished.node,
                "placed_gap_s": round(seen.placed_gap_s, 3),
                "step_gap_s": round(seen.step_gap_s, 3),
                "steps": seen.steps,
                "answer": seen.finished.output,
            }
        )
    return 0 if moved and not again else FAILED
