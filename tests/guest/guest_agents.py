"""Agents that run in the guest, on workers that systemd started."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import structlog

from corefleet.agent import Agent, Turn

_TOUCHED_BYTES = 24 << 20
_PAGE_BYTES = 4096
_LOOK_EVERY_S = 0.05


async def _opened(gate: Path) -> None:
    while not gate.exists():  # noqa: ASYNC110, ASYNC240 - opened from outside of the guest
        await asyncio.sleep(_LOOK_EVERY_S)


class Gated(Agent):
    """Touches memory, says its process id, and ends once the file that its input names is there."""

    async def run(self, turn: Turn) -> str:
        memory = bytearray(_TOUCHED_BYTES)
        for offset in range(0, len(memory), _PAGE_BYTES):
            memory[offset] = 1
        structlog.get_logger().info("inside a task")
        await turn.publish("waits", os.getpid())
        await _opened(Path(turn.input))
        await turn.remember("done", len(memory))
        return str(os.getpid())


class Hog(Agent):
    """Takes memory until it is stopped."""

    async def run(self, turn: Turn) -> str:
        await turn.publish("begins", os.getpid())
        taken = []
        while True:
            taken.append(b"\1" * (4 << 20))
            await asyncio.sleep(0)


class Burner(Agent):
    """Burns CPU in steps of 50 ms until its gate is open; says how much it was given."""

    async def run(self, turn: Turn) -> str:
        await turn.publish("begins", os.getpid())
        gate = Path(turn.input)
        while not gate.exists():  # noqa: ASYNC240 - opened from outside of the guest
            end = os.times().elapsed + 0.05
            while os.times().elapsed < end:
                pass
            await asyncio.sleep(0)
        return "burnt"
