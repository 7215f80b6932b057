"""agentctl up"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import click

from agentctl.boundary import FAILED, verb
from agentctl.local.fleet import FleetPlan, LocalFleet
from agentctl.local.presets import MODELS_FILE, POOLS_FILE, prepare_pools
from agentctl.output import say


@click.command("up")
@click.option("--nodes", default=2, show_default=True, help="Virtual nodes.")
@click.option("--controlds", default=2, show_default=True, help="Instances of the control plane.")
@click.option("--port", default=7070, show_default=True, help="gRPC port of the first controld.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    default=Path("corefleet-data"),
    show_default=True,
    help="Directory of all state and logs; kept, so that a next `up` goes on with it.",
)
@click.option("--pools", type=click.Path(path_type=Path), default=POOLS_FILE, show_default=True)
@click.option("--models", type=click.Path(path_type=Path), default=MODELS_FILE, show_default=True)
@verb
async def command(
    nodes: int, controlds: int, port: int, data: Path, pools: Path, models: Path
) -> int:
    """Run a whole fleet on this machine, in the foreground.

    etcd, NATS, controlds and virtual nodes, each a process of its own. Ctrl-C ends
    all of them.
    """
    specs = await prepare_pools(pools, models)
    plan = FleetPlan(
        data=data, nodes=nodes, controlds=controlds, port=port, pools=tuple(specs), models=models
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop.set)
    starting = asyncio.ensure_future(_run(plan))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        say("stopping")
    stopping.cancel()
    try:
        return await starting
    except asyncio.CancelledError:
        return 0


async def _run(plan: FleetPlan) -> int:
    async with LocalFleet(plan, report=say) as fleet:
        say(f"export COREFLEET_ADDRESS={','.join(fleet.addresses)}")
        pool = plan.pools[0].name if plan.pools else "POOL"
        say(f"ready; try: agentctl run {pool} 'Hello'")
        await fleet.supervise()
    return FAILED
