"""LangGraph's cost of a step, without a checkpoint, in memory and in sqlite."""

from __future__ import annotations

import hashlib
import tempfile
import time
from pathlib import Path
from typing import Any, TypedDict


class _State(TypedDict):
    value: str
    left: int


def measure(steps: int) -> dict[str, object]:
    """Return CPU and wall microseconds of one step for each kind of checkpoint."""
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.checkpoint.sqlite import SqliteSaver

    results: dict[str, object] = {"steps": steps}
    with tempfile.TemporaryDirectory() as scratch:
        database = str(Path(scratch) / "checkpoints.sqlite")
        with SqliteSaver.from_conn_string(database) as sqlite:
            for kind, saver in (("none", None), ("memory", InMemorySaver()), ("sqlite", sqlite)):
                cpu_us, wall_us = _timed(saver, steps)
                results[f"{kind}_cpu_us_per_step"] = round(cpu_us, 1)
                results[f"{kind}_wall_us_per_step"] = round(wall_us, 1)
    return results


def _timed(saver: Any, steps: int) -> tuple[float, float]:
    from langgraph.graph import END, StateGraph

    def mix(state: _State) -> _State:
        digest = hashlib.blake2b(state["value"].encode(), digest_size=12).hexdigest()
        return {"value": digest, "left": state["left"] - 1}

    graph: Any = StateGraph(_State)
    graph.add_node("mix", mix)
    graph.set_entry_point("mix")
    graph.add_conditional_edges("mix", lambda state: "mix" if state["left"] > 0 else END)
    program = graph.compile(checkpointer=saver)
    config = {"configurable": {"thread_id": "bench"}, "recursion_limit": steps + 10}
    program.invoke({"value": "warm", "left": 5}, {**config, "configurable": {"thread_id": "warm"}})
    cpu, wall = time.process_time(), time.perf_counter()
    program.invoke({"value": "seed", "left": steps}, config)
    return (
        (time.process_time() - cpu) / steps * 1e6,
        (time.perf_counter() - wall) / steps * 1e6,
    )
