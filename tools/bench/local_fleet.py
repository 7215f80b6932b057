"""The one-machine fleet that benchmarks run against."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from agentctl.local.fleet import FleetPlan, LocalFleet
from agentctl.local.presets import MODELS_FILE
from corefleet.messages.records import PoolSpec, ToolSpec
from tools.bench.machine import progress

ROOT = str(Path(__file__).resolve().parents[2])

NOOP = PoolSpec(
    name="noop",
    agent="tools.bench.agents:Noop",
    python_path=(ROOT,),
    slots=512,
    spares=0,
    history_turns=0,
    result_ttl_s=60,
)
CHAIN = PoolSpec(
    name="chain",
    agent="tools.bench.agents:Chain",
    python_path=(ROOT,),
    tools=(ToolSpec(name="mix", source="tools.bench.agents:mix"),),
    max_steps=100_000,
    history_turns=0,
    slots=64,
)
SPEAK = PoolSpec(
    name="speak",
    model="qwen2.5-coder-0.5b",
    prompt="You answer briefly.",
    max_tokens=32,
    slots=4,
)


@asynccontextmanager
async def running_fleet(
    pools: tuple[PoolSpec, ...], *, nodes: int = 2, controlds: int = 2
) -> AsyncIterator[LocalFleet]:
    """Yield a running fleet with `pools`; its data is thrown away."""
    models = MODELS_FILE if any(pool.model for pool in pools) else None
    with tempfile.TemporaryDirectory(prefix="corefleet-bench-") as scratch:
        plan = FleetPlan(
            data=Path(scratch), nodes=nodes, controlds=controlds, port=0, pools=pools,
            models=models, log_level="warning", monitor_nats=True,
        )  # fmt: skip
        async with LocalFleet(plan, report=progress) as fleet:
            yield fleet
