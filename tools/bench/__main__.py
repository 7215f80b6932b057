"""python -m tools.bench NAME [--quick] [--peer PEER] [--profile]

Progress goes to stderr; the last line of stdout is one JSON object:
{"bench": ..., "results": {...}, "peer": {...} or null, "machine": {...}, "commit": ...}
"""

from __future__ import annotations

import json
from importlib import import_module

import click

from tools.bench.machine import commit, describe_machine

BENCHES = {
    "takeover": "kill -9 of worker, engine, node and controld in the middle of turns",
    "noop": "durable no-op tasks a second, end to end, and latency of single ones",
    "fleet": "4096 simulated nodes and a hundred controlds, then many of both killed",
    "metrics": "scrapes of one controld of a hundred with 4096 nodes, and what its loop feels",
    "regulator": "victim and batch under the bandwidth regulator, on a model of a memory system",
    "discover": "full discovery and refresh on machines of 512 CPUs and 128 nodes",
    "liveness": "false alarms and detection time of deadline and phi; CPU of watching nodes",
    "place": "placement decisions over 4096 nodes, against a full scan and an oracle",
    "step": "CPU of one journaled agent step outside model and tool",
}


@click.command(help=__doc__)
@click.argument("name", type=click.Choice(list(BENCHES)))
@click.option("--quick", is_flag=True, help="End within 50 s.")
@click.option("--peer", default="", help="noop: ray; step: langgraph; regulator: static.")
@click.option("--machines", default="", help="discover: a folder of recorded machines, too.")
@click.option("--profile", is_flag=True, help="noop: say which functions take the time.")
def main(name: str, quick: bool, peer: str, machines: str, profile: bool) -> None:
    """Run one benchmark."""
    if machines and name != "discover":
        raise click.UsageError("--machines is for discover")
    if profile and name != "noop":
        raise click.UsageError("--profile is for noop")
    more: dict[str, object] = {"machines": machines} if machines else {}
    if profile:
        more["profile"] = True
    measured = import_module(f"tools.bench.{name}").run(quick=quick, peer=peer, **more)
    print(
        json.dumps(
            {
                "bench": name,
                "results": measured.results,
                "peer": measured.peer,
                "machine": describe_machine(),
                "commit": commit(),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
