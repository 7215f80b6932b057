"""python -m tools.bench NAME [--quick] [--peer PEER]

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
    "step": "CPU of one journaled agent step outside model and tool",
}


@click.command(help=__doc__)
@click.argument("name", type=click.Choice(list(BENCHES)))
@click.option("--quick", is_flag=True, help="End within 50 s.")
@click.option("--peer", default="", help="noop: ray; step: langgraph. Run in the same run.")
def main(name: str, quick: bool, peer: str) -> None:
    """Run one benchmark."""
    measured = import_module(f"tools.bench.{name}").run(quick=quick, peer=peer)
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
