"""A fleet of simulated nodes that speaks the real protocol over a real NATS.

    python -m tools.fleet --nats nats://127.0.0.1:4222 --nodes 4096 --pool p=64

Prints a JSON line when all nodes are registered, and one for each command that it reads
on stdin: `kill NAME...`, `revive NAME...`, `drain NAME...`, `undrain NAME...` (nodes or
racks), `stats`, `quit`. A task's input `STEPS [SECONDS]` says what it does. Exit codes:
0 told to quit, 1 failed, 2 usage.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import click
import uvloop

from corefleet.background import stop
from corefleet.errors import CorefleetError, InvalidInput
from tools.fleet.fleet import SimFleet
from tools.fleet.plan import Durations, Shape


@click.command(help=__doc__)
@click.option("--nats", "url", required=True, help="URL of the NATS server.")
@click.option("--nodes", default=4096, show_default=True, type=click.IntRange(min=1))
@click.option("--first", default=0, help="Number of the first node.")
@click.option(
    "--pool", "pools", multiple=True, default=("p=64",), help="NAME=PLACES in each domain."
)
@click.option("--durations", default="fixed:0", help="fixed:S, exp:MEAN or lognormal:MEDIAN,SIGMA.")
@click.option("--beat-interval", default=0.2, show_default=True, help="Seconds.")
@click.option("--seed", default=0)
def main(
    url: str, nodes: int, first: int, pools: tuple[str, ...], durations: str,
    beat_interval: float, seed: int,
) -> None:  # fmt: skip
    """Simulate until told to quit."""
    try:
        fleet = SimFleet(
            url, Shape(nodes, first), dict(_pool(text) for text in pools),
            Durations.parse(durations), beat_interval, seed,
        )  # fmt: skip
        uvloop.run(_run(fleet))
    except InvalidInput as error:
        raise click.UsageError(str(error)) from error
    except CorefleetError as error:
        raise click.ClickException(str(error)) from error


async def _run(fleet: SimFleet) -> None:
    """Obey until told to quit, or until whoever tells has gone."""
    starting = asyncio.create_task(_start(fleet))
    told: asyncio.Queue[list[str]] = asyncio.Queue()
    reading = asyncio.create_task(_read(told))
    try:
        await asyncio.wait({starting, reading}, return_when=asyncio.FIRST_COMPLETED)
        while starting.done() and (line := await told.get()) != ["quit"]:
            starting.result()
            try:
                await _obey(fleet, line[0], line[1:])
            except InvalidInput as error:
                _say(did=line[0], error=str(error))
    finally:
        for task in (starting, reading):
            await stop(task)
        await fleet.close()


async def _start(fleet: SimFleet) -> None:
    began = time.monotonic()
    await fleet.start()
    _say(ready="fleet", nodes=len(fleet.nodes), took_s=round(time.monotonic() - began, 2))


async def _read(told: asyncio.Queue[list[str]]) -> None:
    """Queue the words of each line; the end of stdin is `quit`."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        if words := line.decode().split():
            told.put_nowait(words)
            if words == ["quit"]:
                return
    told.put_nowait(["quit"])


async def _obey(fleet: SimFleet, verb: str, names: list[str]) -> None:
    nodes = [node for name in names for node in fleet.named(name)]
    match verb:
        case "kill":
            await fleet.kill(nodes)
        case "revive":
            await fleet.revive(nodes)
        case "drain" | "undrain":
            await fleet.set_draining(nodes, verb == "drain")
        case "stats":
            pass
        case _:
            raise InvalidInput("command", verb, "kill, revive, drain, undrain, stats or quit")
    _say(
        did=verb, nodes=len(nodes), at_ms=time.time_ns() // 1_000_000, held=fleet.held(),
        beats_late_s=round(fleet.tally.beats_late_s, 3), counts=dict(fleet.tally.counts),
    )  # fmt: skip


def _pool(text: str) -> tuple[str, int]:
    name, _, places = text.partition("=")
    if not name or not places.isdecimal():
        raise InvalidInput("pool", text, "NAME=PLACES")
    return name, int(places)


def _say(**told: object) -> None:
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
