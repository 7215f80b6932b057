"""Agents and tools of the fleet that the end-to-end tests run."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from corefleet.agent import Agent, Turn
from corefleet.tool import tool


class Counter(Agent):
    """Answers how many tasks of its session came before."""

    async def run(self, turn: Turn) -> str:
        seen: int = await turn.recall("seen", 0)
        await turn.remember("seen", seen + 1)
        return f"{turn.input} {seen}"


class Sender(Agent):
    """Sends its input to the session `sink` of the pool `counter`."""

    async def run(self, turn: Turn) -> str:
        return await turn.send("counter", "sink", turn.input)


class Broken(Agent):
    async def run(self, turn: Turn) -> str:
        raise LookupError(f"no such thing: {turn.input}")


class Forbidden(Agent):
    """Calls a tool that its pool does not list."""

    async def run(self, turn: Turn) -> str:
        return str(await turn.call("calculator", expression="1+1"))


class Waiter(Agent):
    """Takes steps of 50 ms until it is cancelled."""

    async def run(self, turn: Turn) -> str:
        while True:
            await turn.call("nap", seconds=0.05)


@tool
async def nap(seconds: float) -> str:
    """Pass some time."""
    await asyncio.sleep(seconds)
    return "rested"


class Walker(Agent):
    """Takes steps until the file `stop` lies beside the one that its input names."""

    async def run(self, turn: Turn) -> str:
        steps = 0
        while not await turn.call("walk", path=turn.input, number=steps):
            steps += 1
        return str(steps)


@tool
def walk(path: str, number: int) -> bool:
    """Note the step, pass some time, and return whether it was the last one."""
    file = Path(path)
    with file.open("a") as notes:
        notes.write(f"{number}\n")
    time.sleep(0.1)
    return file.with_name("stop").exists()
