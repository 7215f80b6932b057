"""The declared agent's loop."""

from __future__ import annotations

from typing import Any

import pytest

from agentd.worker.stages import DeclaredAgent
from corefleet.messages.links import Generate, GenerateDone
from corefleet.messages.records import PoolSpec, SessionState, Turn
from corefleet.tool import tool
from tests.unit.agentd.worker.fakes import FakeNode, kinds, loaded


@tool
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def node_that_answers(*answers: GenerateDone) -> FakeNode:
    node = FakeNode()
    left = iter(answers)
    assert node.engine is not None
    node.engine.answer = lambda request: next(left)
    return node


def requests(node: FakeNode) -> list[Generate]:
    assert node.engine is not None
    return node.engine.requests


def calls(arguments: str, name: str = "add") -> GenerateDone:
    return GenerateDone(call=0, text="", tool=name, arguments=arguments, finish="tool")


def says(text: str) -> GenerateDone:
    return GenerateDone(call=0, text=text)


async def run(node: FakeNode, text: str = "q", **keys: Any) -> Any:
    state = keys.pop("state", None)
    spec = {"prompt": "Be brief.", **keys}
    agent = DeclaredAgent(PoolSpec(name="p", model="m", **spec))
    return await node.run(loaded(agent, add, **spec), text, state=state)


async def test_tool_then_answer() -> None:
    node = node_that_answers(calls('{"a": 1, "b": 2}'), says(" 3 \n"))
    end = await run(node, " 1+2? ", tool_choice="required_first")
    assert end.output == "3"
    first, second = requests(node)
    assert (first.system, first.tool_choice, second.tool_choice) == (
        "Be brief.", "required", "auto",
    )  # fmt: skip
    assert second.turns == (
        Turn("user", "1+2?"),
        Turn("assistant", '{"a":1,"b":2}', "add"),
        Turn("tool", "3", "add"),
    )
    assert kinds(node.journal) == [
        "0:stage:intake", "1:stage:context", "2:infer:m", "3:stage:select", "4:tool:add",
        "5:stage:merge", "6:infer:m", "7:stage:select", "8:stage:reply",
    ]  # fmt: skip


async def test_the_model_is_told_of_a_tools_failure() -> None:
    node = node_that_answers(calls('{"a": 1}'), calls("{}", "rm"), says("sorry"))
    end = await run(node)
    assert end.output == "sorry"
    assert [t.text for t in requests(node)[2].turns if t.role == "tool"] == [
        "error: add: arguments: Object missing required field `b`",
        "error: rm is not allowed here; allowed: add",
    ]


@pytest.mark.parametrize(("max_steps", "choices"), [(1, ["none"]), (3, ["auto", "none"]),
                                                    (5, ["auto", "auto", "none"])])  # fmt: skip
async def test_the_last_step_is_kept_for_an_answer(max_steps: int, choices: list[str]) -> None:
    asked = [calls(f'{{"a": {number}, "b": 2}}') for number in range(len(choices) - 1)]
    node = node_that_answers(*asked, says("done"))
    end = await run(node, max_steps=max_steps)
    assert end.output == "done"
    assert [request.tool_choice for request in requests(node)] == choices


async def test_a_model_that_repeats_a_call_is_asked_for_its_answer() -> None:
    again = calls('{"a": 1, "b": 2}')
    node = node_that_answers(again, again, says("three"))
    end = await run(node)
    assert end.output == "three"
    last = requests(node)[-1]
    assert last.tool_choice == "none"
    assert [turn.role for turn in last.turns] == ["user", "assistant", "tool", "user"]
    assert [turn.role for turn in end.state.history] == ["user", "assistant", "tool", "assistant"]


async def test_the_context_is_a_window_of_the_session() -> None:
    node = node_that_answers(says("a"))
    history = tuple(Turn("user", str(n)) for n in range(6))
    end = await run(node, history_turns=4, state=SessionState(history=history))
    assert [t.text for t in requests(node)[0].turns] == ["2", "3", "4", "5", "q"]
    assert [t.text for t in end.state.history] == ["4", "5", "q", "a"]


async def test_an_empty_input_is_rejected_before_the_model_is_asked() -> None:
    node = node_that_answers()
    end = await run(node, "  \n")
    assert (end.failure.code, requests(node)) == ("input_rejected", [])


async def test_an_empty_answer_is_a_failure_of_the_model() -> None:
    end = await run(node_that_answers(says("  ")))
    assert (end.failure.code, end.failure.message) == ("model_error", "the model's answer is empty")
