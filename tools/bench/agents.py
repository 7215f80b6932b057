"""Agents and tools that the benchmarks run."""

from __future__ import annotations

import asyncio
import hashlib
import os

import corefleet.agent
import corefleet.tool


class Noop(corefleet.agent.Agent):
    """Returns its input: the cost of a task is all that is left."""

    async def run(self, turn: corefleet.agent.Turn) -> str:
        return turn.input


class Chain(corefleet.agent.Agent):
    """Input `COUNT PAUSE_MS SEED`: COUNT journaled steps, each a hash of the one before.

    One lost, repeated or swapped step gives another answer.
    """

    async def run(self, turn: corefleet.agent.Turn) -> str:
        count, pause_ms, seed = turn.input.split()
        value = seed
        for _ in range(int(count)):
            link = await turn.call("mix", value=value, pause_ms=int(pause_ms))
            value = link.split()[0]
        return value


def expected_chain(count: int, seed: str) -> str:
    """Return what Chain must answer."""
    value = seed
    for _ in range(count):
        value = _mixed(value)
    return value


@corefleet.tool.tool
async def mix(value: str, pause_ms: int = 0) -> str:
    """Hash a value after a pause; also tells which process did it."""
    if pause_ms:
        await asyncio.sleep(pause_ms / 1000)
    return f"{_mixed(value)} pid={os.getpid()}"


def _mixed(value: str) -> str:
    return hashlib.blake2b(value.encode(), digest_size=12).hexdigest()
