"""The agent that the plant runs: a session's tasks are one chain of hashes.

What a task answers depends on every step of every task of its session before it: one
lost, repeated or swapped step, or task, gives another answer.
"""

from __future__ import annotations

import corefleet.agent
from corefleet.messages.records import PoolSpec, ToolSpec
from tools.bench.agents import expected_chain
from tools.bench.local_fleet import ROOT

LINK = "link"

LEDGER = PoolSpec(
    name="ledger",
    agent="tests.faults.agents:Ledger",
    python_path=(ROOT,),
    tools=(ToolSpec(name="mix", source="tools.bench.agents:mix"),),
    history_turns=0,
    max_attempts=100,
    progress_timeout_s=4.0,
    slots=64,
    spares=0,
)


class Ledger(corefleet.agent.Agent):
    """Input `COUNT PAUSE_MS`: COUNT journaled links of the session's chain; returns the last."""

    async def run(self, turn: corefleet.agent.Turn) -> str:
        count, pause_ms = (int(word) for word in turn.input.split())
        value = str(await turn.recall(LINK, "start"))
        for _ in range(count):
            link = await turn.call("mix", value=value, pause_ms=pause_ms)
            value = str(link).split()[0]
        await turn.remember(LINK, value)
        return value


def expected(counts: list[int]) -> list[str]:
    """Return what a session's tasks with so many links each must answer, in order."""
    answers = []
    value = "start"
    for count in counts:
        value = expected_chain(count, value)
        answers.append(value)
    return answers
