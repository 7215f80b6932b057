"""Run a turn, kill its node while it runs, and time how it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from agentctl.local.fleet import LocalFleet
from agentctl.output import event_line
from corefleet.client import Client
from corefleet.rpc import tasks_pb2


@dataclass(slots=True)
class Takeover:
    """What was seen. Gaps are seconds from the kill; 0 when it did not come to that."""

    killed: str = ""
    placed_gap_s: float = 0.0
    step_gap_s: float = 0.0
    finished: tasks_pb2.Task | None = None
    steps: list[int] = field(default_factory=list)
    """Numbers of the steps in the order in which they were committed."""


async def run_takeover(
    fleet: LocalFleet,
    client: Client,
    pool: str,
    session: str,
    text: str,
    report: Callable[[str], None],
) -> Takeover:
    """Submit a turn; after its first committed step, kill its node; follow it to the end."""
    seen = Takeover()
    node = ""
    killed_at = 0.0
    async for event in client.run(pool, text.encode(), session=session):
        what = event.WhichOneof("what")
        if line := event_line(event):
            since = f"[+{time.monotonic() - killed_at:.2f} s] " if killed_at else ""
            report(f"{since}{line}")
        if what == "placed":
            node = event.placed.node
            if killed_at and not seen.placed_gap_s:
                seen.placed_gap_s = time.monotonic() - killed_at
        elif what == "step":
            seen.steps.append(event.step.step)
            if not killed_at:
                report(f"kill -9 of {node}: agentd, its workers and its engine")
                fleet.kill_node(node)
                seen.killed = node
                killed_at = time.monotonic()
            elif not seen.step_gap_s:
                seen.step_gap_s = time.monotonic() - killed_at
        elif what == "finished":
            seen.finished = event.finished
    return seen
