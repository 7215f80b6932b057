"""How attempts end: failures of the agent, drops, stops, and tasks that are given back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentd.worker.attempt import MAX_OUTPUT_BYTES
from corefleet.errors import InferFailed, InvalidInput, ToolFailed
from corefleet.messages.links import FinishTask, ReturnTask
from corefleet.tool import tool
from tests.unit.agentd.worker.fakes import TASK, FakeNode, Script, kinds, loaded


@tool
async def double(number: int) -> int:
    """Double a number."""
    return 2 * number


async def test_the_failure_names_error_and_line() -> None:
    async def program(turn: Any) -> str:
        raise ValueError("no such luck")

    end = await FakeNode().run(loaded(Script(program)))
    assert end.failure.code == "agent_error"
    assert end.failure.message.startswith("ValueError: no such luck (test_attempt_ends.py:")
    assert end.failure.message.endswith('in program: raise ValueError("no such luck"))')


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (ToolFailed("t"), "tool_error"),
        (InferFailed("m"), "model_error"),
        (InvalidInput("input", "", "text"), "input_rejected"),
        (InvalidInput("key", "", "text"), "agent_error"),
        (SystemExit(3), "agent_error"),
        (asyncio.CancelledError(), "agent_error"),
        (ExceptionGroup("g", [ToolFailed("t")]), "tool_error"),
    ],
)
async def test_failure_codes(raised: BaseException, code: str) -> None:
    async def program(turn: Any) -> str:
        raise raised

    end = await FakeNode().run(loaded(Script(program)))
    assert end.failure.code == code


@pytest.mark.parametrize("output", [None, 3, "x" * (MAX_OUTPUT_BYTES + 1)])
async def test_an_output_that_is_none(output: Any) -> None:
    async def program(turn: Any) -> Any:
        return output

    end = await FakeNode().run(loaded(Script(program)))
    assert end.failure.code == "agent_error"
    assert "run() returned" in end.failure.message


async def test_branches_left_behind_are_cancelled() -> None:
    seen = []

    async def program(turn: Any) -> str:
        async def branch() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

        left = asyncio.create_task(branch())
        await asyncio.sleep(0)
        return f"{left.done()}"

    end = await FakeNode().run(loaded(Script(program)))
    assert end.output == "False"
    assert seen == ["cancelled"]


async def test_drop_cancels_the_agent_and_its_generation_and_says_nothing() -> None:
    seen = []

    async def program(turn: Any) -> str:
        try:
            await turn.infer("a")
        finally:
            seen.append("ended")
        return ""

    node = FakeNode()
    assert node.engine is not None
    node.engine.hold = asyncio.Event()
    async with node.running(loaded(Script(program))) as attempt:
        await node.engine.requested.wait()
        attempt.drop("fenced")
        await asyncio.wait((attempt.task,))
    assert (seen, node.engine.cancelled, node.end) == (["ended"], 1, None)


async def test_stop_waits_for_the_step_and_returns_the_task_from_there() -> None:
    release = asyncio.Event()
    began = asyncio.Event()

    @tool
    async def act() -> str:
        """Act."""
        began.set()
        await release.wait()
        return "acted"

    async def program(turn: Any) -> str:
        first = await turn.call("act")
        second = await turn.infer("again")
        return f"{first} {second.text}"

    node = FakeNode()
    pool = loaded(Script(program), act)
    async with node.running(pool) as attempt:
        await began.wait()
        attempt.stop("maintenance")
        release.set()
        await node.ended.wait()
    assert node.end == ReturnTask(task=TASK, attempt=1, reason="maintenance")
    assert kinds(node.journal) == ["0:tool:act"]
    end = await node.run(pool, attempt=2)
    assert end.output == "acted AGAIN"


async def test_stop_lets_an_agent_at_its_last_step_finish() -> None:
    async def program(turn: Any) -> str:
        return str((await turn.infer("a")).text)

    node = FakeNode()
    assert node.engine is not None
    node.engine.hold = asyncio.Event()
    async with node.running(loaded(Script(program))) as attempt:
        await node.engine.requested.wait()
        attempt.stop("maintenance")
        node.engine.hold.set()
        await node.ended.wait()
    assert isinstance(node.end, FinishTask)


async def test_a_task_without_an_engine_is_given_back() -> None:
    async def program(turn: Any) -> str:
        await turn.call("double", number=1)
        return str((await turn.infer("a")).text)

    node = FakeNode()
    assert node.engine is not None
    node.engine.gone = True
    end = await node.run(loaded(Script(program), double))
    assert end == ReturnTask(task=TASK, attempt=1, reason="no engine")
    assert kinds(node.journal) == ["0:tool:double"]


async def test_stop_before_the_agent_has_begun_returns_the_task_untouched() -> None:
    async def program(turn: Any) -> str:
        return str((await turn.infer("a")).text)

    node = FakeNode()
    async with node.running(loaded(Script(program))) as attempt:
        attempt.stop("drained")
        await node.ended.wait()
    assert node.end == ReturnTask(task=TASK, attempt=1, reason="drained")
    assert (node.journal, node.engine.requests if node.engine else None) == ([], [])


async def test_stop_never_parts_an_intent_from_its_result() -> None:
    began, release = asyncio.Event(), asyncio.Event()

    @tool(at_most_once=True)
    async def pay() -> str:
        """Pay."""
        began.set()
        await release.wait()
        return "paid"

    async def program(turn: Any) -> str:
        paid = await turn.call("pay")
        return f"{paid} {(await turn.infer('thanks')).text}"

    node = FakeNode()
    pool = loaded(Script(program), pay)
    async with node.running(pool) as attempt:
        await began.wait()
        attempt.stop("drained")
        release.set()
        await node.ended.wait()
    assert node.end == ReturnTask(task=TASK, attempt=1, reason="drained")
    assert kinds(node.journal) == ["0:intent:pay", "0:tool:pay"]
    end = await node.run(pool, attempt=2)
    assert end.output == "paid THANKS"
