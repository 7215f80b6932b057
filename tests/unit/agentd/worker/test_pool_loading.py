"""Pools as the worker loads them: agents, tools, and what cannot be loaded."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentd.worker.meter import Meter
from agentd.worker.pool import load_pool
from agentd.worker.stages import DeclaredAgent
from agentd.worker.tools import LoadedTool, ToolThreads
from corefleet.agent import Agent
from corefleet.codec import decode
from corefleet.errors import ConfigError, InvalidInput, ToolFailed
from corefleet.messages.records import PoolSpec, ToolSpec
from corefleet.tool import Tool, tool

MODULE = """
from corefleet.agent import Agent
from corefleet.tool import tool

class Good(Agent):
    async def run(self, turn):
        return turn.input

class Broken(Good):
    def __init__(self):
        raise ValueError("no luck\\ntoday")

@tool(timeout_s=2)
def ready(a: int) -> int:
    "Ready."
    return a

def plain(a: int) -> int:
    "Plain."
    return a

def untyped(a):
    return a

number = 3
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, ...]]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "test_pool_module.py").write_text(MODULE)
    (tmp_path / "test_pool_syntax.py").write_text("def (")
    (tmp_path / "test_pool_exit.py").write_text("raise SystemExit(4)")
    yield (str(tmp_path),)
    for name in [name for name in sys.modules if name.startswith("test_pool_")]:
        if name in {"test_pool_module", "test_pool_syntax", "test_pool_exit"}:
            del sys.modules[name]


def spec(path: tuple[str, ...], agent: str = "declared", *tools: ToolSpec) -> PoolSpec:
    return PoolSpec(name="p", agent=agent, model="m", python_path=path, tools=tools)


def test_a_pool_with_agent_and_tools(path: tuple[str, ...]) -> None:
    pool = load_pool(
        spec(
            path,
            "test_pool_module:Good",
            ToolSpec(name="calculator"),
            ToolSpec(name="mine", source="test_pool_module:ready"),
            ToolSpec(name="plain", source="test_pool_module:plain", at_most_once=True),
        )
    )
    assert isinstance(pool.agent, Agent)
    assert pool.toolbox.names == ("calculator", "mine", "plain")
    assert pool.toolbox.get("plain").at_most_once
    assert [d.description for d in pool.toolbox.definitions(("mine", "plain"))] == [
        "Ready.", "Plain.",
    ]  # fmt: skip
    assert isinstance(load_pool(spec(())).agent, DeclaredAgent)


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        ("test_pool_absent:A", "agent test_pool_absent:A: import of test_pool_absent failed"),
        ("test_pool_syntax:A", "import of test_pool_syntax failed: SyntaxError"),
        ("test_pool_exit:A", "import of test_pool_exit failed: SystemExit: 4"),
        ("test_pool_module:Absent", "test_pool_module has no 'Absent'"),
        ("test_pool_module:number", "3 is not a subclass of corefleet.agent.Agent"),
        ("test_pool_module:Broken", "cannot be made: ValueError: no luck today"),
    ],
)
def test_agents_that_cannot_be_loaded(path: tuple[str, ...], agent: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"pool p: agent {agent}: ") as caught:
        load_pool(spec(path, agent))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (ToolSpec(name="rm"), "not built in; built in are: calculator, utc_clock"),
        (ToolSpec(name="t", source="test_pool_module:gone"), "has no 'gone'"),
        (ToolSpec(name="t", source="test_pool_module:number"), "is not a function"),
        (ToolSpec(name="t", source="test_pool_module:untyped"), "a type hint for every parameter"),
    ],
)
def test_tools_that_cannot_be_loaded(path: tuple[str, ...], wanted: ToolSpec, says: str) -> None:
    with pytest.raises(ConfigError, match=f"pool p: tool {wanted.name}: ") as caught:
        load_pool(spec(path, "declared", wanted))
    assert says in str(caught.value)


def by_schema(schema: dict[str, Any]) -> LoadedTool:
    def run(**arguments: Any) -> Any:
        return arguments

    made = Tool("t", "", schema, run)
    return LoadedTool(ToolSpec(name="t", source="m:f"), made, ToolThreads())


def test_a_tool_of_a_schema_alone_is_checked_against_it() -> None:
    loaded = by_schema(
        {
            "type": "object",
            "properties": {"at": {"type": "object", "properties": {"x": {"maximum": 3}}}},
            "required": ["at"],
        }
    )
    assert loaded.check({"at": {"x": 2}}) == {"at": {"x": 2}}
    with pytest.raises(ToolFailed, match="t: arguments: 'at' is a required property"):
        loaded.check({})
    with pytest.raises(ToolFailed, match=r"t: arguments.at.x: 9 is greater than the maximum of 3"):
        loaded.check({"at": {"x": 9}})


def test_a_schema_that_is_none() -> None:
    with pytest.raises(InvalidInput, match="schema of tool t"):
        by_schema({"type": "nonsense"})


async def test_threads_that_do_not_come_back_are_replaced() -> None:
    release = threading.Event()

    @tool
    def stuck() -> None:
        """Hang."""
        release.wait()

    @tool
    def name() -> str:
        """Tell the thread's name."""
        return threading.current_thread().name

    threads = ToolThreads()
    hanging = LoadedTool(ToolSpec(name="s", source="m:f", timeout_s=0.001), stuck, threads)
    working = LoadedTool(ToolSpec(name="n", source="m:f"), name, threads)
    try:
        for _ in range(40):
            with pytest.raises(ToolFailed, match=r"no result within 0.001 s"):
                await hanging.run({}, "k", Meter())
            assert decode(await working.run({}, "k", Meter()), str).startswith("tool")
    finally:
        release.set()
        threads.close()


async def test_the_tighter_of_both_time_limits_holds() -> None:
    @tool(timeout_s=0.001)
    async def slow() -> None:
        """Hang."""
        await hang.wait()

    import asyncio

    hang = asyncio.Event()
    loaded = LoadedTool(ToolSpec(name="s", source="m:f", timeout_s=5), slow, ToolThreads())
    with pytest.raises(ToolFailed, match=r"no result within 0.001 s"):
        await loaded.run({}, "k", Meter())


async def test_a_tool_cannot_end_the_worker() -> None:
    @tool
    def leave() -> None:
        """Exit."""
        sys.exit(3)

    threads = ToolThreads()
    loaded = LoadedTool(ToolSpec(name="s", source="m:f"), leave, threads)
    with pytest.raises(ToolFailed, match="SystemExit: 3"):
        await loaded.run({}, "k", Meter())
    threads.close()
