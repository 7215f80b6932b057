"""Agents that the tests of a real agentd run."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from corefleet.agent import Agent, Turn
from corefleet.tool import tool


class Echo(Agent):
    """Answers with what it was asked."""

    async def run(self, turn: Turn) -> str:
        return turn.input


class Patient(Agent):
    """Says that it began, then waits until the file that its input names is there.

    Beside that file it leaves the process id of each worker that ran it.
    """

    async def run(self, turn: Turn) -> str:
        gate = Path(turn.input)
        with gate.with_suffix(".pids").open("a") as file:
            file.write(f"{os.getpid()}\n")
        await turn.publish("began", turn.input)
        while not gate.exists():  # noqa: ASYNC110, ASYNC240 - the test is another process
            await asyncio.sleep(0.01)
        await turn.remember("done", True)
        return "opened"


class Diligent(Agent):
    """Works a step for each gate that its input names, one a line, once it is open."""

    async def run(self, turn: Turn) -> str:
        gates = [Path(line) for line in turn.input.splitlines()]
        for number, gate in enumerate(gates):
            with gate.with_suffix(".pids").open("a") as file:
                file.write(f"{os.getpid()}\n")
            await turn.publish("waits", str(number))
            while not gate.exists():  # noqa: ASYNC110 - the test is another process
                await asyncio.sleep(0.01)
            await turn.remember(f"gate {number}", True)
        return f"{len(gates)} gates"


class GateKeeper(Agent):
    """Calls a tool for each gate that its input names, one a line."""

    async def run(self, turn: Turn) -> str:
        passed = [await turn.call("pass_gate", gate=gate) for gate in turn.input.splitlines()]
        return " ".join(passed)


@tool
async def pass_gate(gate: str) -> str:
    """Note the call beside the gate, and return once the gate is there."""
    path = Path(gate)
    with path.with_suffix(".calls").open("a") as file:
        file.write(f"{os.getpid()}\n")
    while not path.exists():  # noqa: ASYNC110, ASYNC240 - the test is another process
        await asyncio.sleep(0.01)
    return path.name
