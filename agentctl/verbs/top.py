"""agentctl top"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from agentctl.boundary import verb
from agentctl.options import address_option, connect, json_option
from agentctl.output import as_json
from agentctl.overview import Rates
from agentctl.screen import screen
from corefleet.client import Client

_WIDTH_ON_A_PIPE = 240

Show = Callable[[dict[str, Any]], None]


@click.command("top")
@click.option("--once", is_flag=True, help="Look twice, --interval apart, show that and end.")
@click.option(
    "--interval",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0.1),
    help="Seconds between two looks.",
)
@address_option
@json_option
@verb
async def command(once: bool, interval: float, addresses: tuple[str, ...], json_out: bool) -> int:
    """Watch nodes, pools and controlds at work, until Ctrl-C.

    Any controld can be asked; it asks all others and waits half a second for them. Rates
    are those between two looks; HOME is the share of placements at the session's home node,
    of those whose session has one; LIMITED/S are submissions over a limit; REFUSED/S are
    attempts that nodes refused; BALANCE is the coefficient of variation of the nodes'
    shares of places in use.

    \b
    Keys of --json, one object a refresh; null is not known:
      at_ms, answered_by, interval_s
      nodes: total, states {STATE: N}, slots_used, slots_total, balance
      pools[]: pool, queued, in_flight, nodes, slots_used, slots_total, balance,
        placed_per_s, finished_per_s, not_admitted_per_s, refused_per_s,
        requeued_per_s {CAUSE: RATE}, home_share, wait_p50_s, wait_p99_s,
        since_start: placed, finished, not_admitted, home {hit, moved, missed, new},
          home_share, requeued {CAUSE: N}, wait_p50_s, wait_p99_s
      total: queued, in_flight, placed_per_s, finished_per_s, refused_per_s
      controlds: living, answered,
        list[]: controld, answered, shards, racks, loop_lag_ms, cpu (cores)
    """
    live = not json_out and not once and sys.stdout.isatty()
    async with connect(addresses) as client:
        try:
            with Live(auto_refresh=False) if live else nullcontext() as shown:
                await _watch(client, once, interval, _show(shown, json_out))
        except asyncio.CancelledError:
            # Ctrl-C is how a look ends that has no end of its own.
            if once:
                raise
    return 0


def _show(shown: Live | None, json_out: bool) -> Show:
    if json_out:
        return as_json
    if shown is not None:
        return lambda view: shown.update(screen(view), refresh=True)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_ON_A_PIPE)

    def print_it(view: dict[str, Any]) -> None:
        console.print(screen(view))
        sys.stdout.flush()

    return print_it


async def _watch(client: Client, once: bool, interval: float, show: Show) -> None:
    rates = Rates()
    first = rates.view(await client.overview())
    if not once:
        show(first)
    while True:
        await asyncio.sleep(interval)
        show(rates.view(await client.overview()))
        if once:
            return
