"""The steps of a turn: what is journaled, when, and what each raises."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

import pytest

from agentd.worker.state import MAX_MEMORY_BYTES
from corefleet.codec import decode
from corefleet.errors import InferFailed, InvalidInput, SendFailed, ToolFailed
from corefleet.messages.links import FinishTask, GenerateDone
from corefleet.messages.records import SessionState, Turn
from corefleet.messages.wire import AgentPublished, StepEnded, TokenText
from corefleet.tool import tool
from tests.unit.agentd.worker.fakes import TASK, FakeNode, Script, kinds, loaded


@tool
async def double(number: int) -> int:
    """Double a number."""
    return 2 * number


async def test_an_agent_without_steps_costs_one_frame() -> None:
    async def program(turn: Any) -> str:
        return f"{turn.input}!"

    node = FakeNode()
    end = await node.run(loaded(Script(program), history_turns=0))
    assert end == FinishTask(task=TASK, attempt=1, output="hello!")
    assert node.appends == []


async def test_the_last_steps_ride_with_the_end() -> None:
    async def program(turn: Any) -> str:
        await turn.remember("k", [1, 2])
        answer = await turn.infer("hi")
        return str(answer.text)

    node = FakeNode()
    end = await node.run(loaded(Script(program)))
    assert (end.output, end.failure) == ("HI", None)
    assert kinds(end.steps) == ["0:remember:k", "1:infer:m"]
    assert (end.steps[1].tokens_in, end.steps[1].tokens_out, end.steps[1].node) == (3, 2, "n1")
    assert node.appends == []


async def test_an_infer_is_journaled_while_the_agent_waits_for_the_next() -> None:
    async def program(turn: Any) -> str:
        await turn.infer("one")
        node.engine.hold = asyncio.Event()  # type: ignore[union-attr]
        await turn.infer("two")
        return ""

    node = FakeNode()
    async with node.running(loaded(Script(program))):
        await node.appended.wait()
        assert [kinds(a.steps) for a in node.appends] == [["0:infer:m"]]


async def test_a_tool_begins_after_the_steps_before_it_are_acknowledged() -> None:
    began = asyncio.Event()

    @tool
    async def act() -> None:
        """Act."""
        began.set()

    async def program(turn: Any) -> str:
        await turn.remember("k", 1)
        await turn.call("act")
        return ""

    node = FakeNode(hold_appends=True)
    async with node.running(loaded(Script(program), act)):
        await node.appended.wait()
        for _ in range(50):
            await asyncio.sleep(0)
        assert not began.is_set()
        await node.acknowledge(node.appends[0])
        await node.ended.wait()
        assert began.is_set()


async def test_steps_that_end_together_share_an_append() -> None:
    async def program(turn: Any) -> str:
        await asyncio.gather(*(turn.call("double", number=n) for n in range(5)))
        await turn.call("double", number=7)
        return ""

    node = FakeNode()
    await node.run(loaded(Script(program), double))
    assert [kinds(a.steps) for a in node.appends] == [[f"{n}:tool:double" for n in range(5)]]


async def test_steps_that_end_while_an_append_flies_share_the_next() -> None:
    release = [asyncio.Event() for _ in range(3)]

    @tool
    async def wait(number: int) -> None:
        """Wait."""
        await release[number].wait()

    async def program(turn: Any) -> str:
        await asyncio.gather(*(turn.call("wait", number=n) for n in range(3)))
        await turn.call("wait", number=0)
        return ""

    node = FakeNode(hold_appends=True)
    async with node.running(loaded(Script(program), wait)):
        release[0].set()
        await node.appended.wait()
        release[1].set()
        release[2].set()
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(node.appends) == 1
        node.hold_appends = False
        await node.acknowledge(node.appends[0])
        await node.ended.wait()
    assert [len(a.steps) for a in node.appends] == [1, 2]


async def test_tool_failures_are_journaled_and_raised() -> None:
    @tool(timeout_s=0.01)
    async def slow() -> None:
        """Never end."""
        await asyncio.Event().wait()

    @tool
    def broken() -> None:
        """Raise."""
        raise KeyError("k")

    @tool
    def big() -> str:
        """Return too much."""
        return "x" * 100_000

    async def program(turn: Any) -> str:
        errors = []
        for name, arguments in (
            ("rm", {}),
            ("double", {"number": "x"}),
            ("double", {"number": 1, "more": 2}),
            ("slow", {}),
            ("broken", {}),
            ("big", {}),
        ):
            with pytest.raises(ToolFailed) as caught:
                await turn.call(name, **arguments)
            errors.append(str(caught.value))
        return "\n".join(errors)

    node = FakeNode()
    pool = loaded(Script(program), double, slow, broken, big)
    end = await node.run(pool)
    assert end.output.splitlines() == [
        "rm is not allowed here; allowed: double, slow, broken, big",
        "double: arguments: Expected `int`, got `str` - at `$.number`",
        "double: arguments: Object contains unknown field `more`",
        "slow: no result within 0.01 s",
        "broken: KeyError: 'k'",
        "big: a result of 100005 bytes; at most 65536",
    ]
    assert [step.error for step in node.journal] == end.output.splitlines()
    again = await node.run(pool, attempt=2)
    assert again.output == end.output


async def test_a_tool_gets_the_same_key_in_every_attempt() -> None:
    keys = []

    @tool
    def charge(amount: int, idempotency_key: str) -> str:
        """Charge."""
        keys.append(idempotency_key)
        return idempotency_key

    async def program(turn: Any) -> str:
        await turn.infer("how much")
        assert turn.step_key == f"{TASK}/1"
        return str(await turn.call("charge", amount=3))

    node = FakeNode(lose_after=0)
    assert await node.run(loaded(Script(program), charge)) is None
    node.lose_after = None
    end = await node.run(loaded(Script(program), charge), attempt=2)
    assert end.output == f"{TASK}/1"
    assert keys == [f"{TASK}/1"]


async def test_plain_tools_run_in_threads_and_their_cpu_time_counts() -> None:
    @tool
    def spin() -> None:
        """Use 5 ms of CPU."""
        end = time.thread_time() + 0.005
        while time.thread_time() < end:
            pass

    async def program(turn: Any) -> str:
        await turn.call("spin")
        return ""

    node = FakeNode()
    end = await node.run(loaded(Script(program), spin))
    (step,) = end.steps
    assert 5000 <= step.cpu_us <= step.wall_us


async def test_memory_is_committed_with_the_end_and_read_before_it() -> None:
    async def program(turn: Any) -> str:
        before = await turn.recall("n", 0), await turn.recall("other", "none")
        await turn.remember("n", 5)
        after = await turn.recall("n")
        return f"{before} {after}"

    state = SessionState(memory={"n": b"\x03", "keep": b"\x01"}, history=(Turn("user", "old"),))
    end = await FakeNode().run(loaded(Script(program), history_turns=2), state=state)
    assert end.output == "(3, 'none') 5"
    assert end.state.memory == {"n": b"\x05", "keep": b"\x01"}
    assert end.state.history == (
        Turn("user", "hello"),
        Turn("assistant", "(3, 'none') 5"),
    )


async def test_a_failed_task_leaves_the_session_as_it_was() -> None:
    async def program(turn: Any) -> str:
        await turn.remember("n", 5)
        raise ValueError("no")

    end = await FakeNode().run(loaded(Script(program)))
    assert (end.output, end.state) == ("", None)


async def test_what_cannot_be_remembered_is_refused() -> None:
    async def program(turn: Any) -> str:
        with pytest.raises(InvalidInput, match=r"remember\('a'\)"):
            await turn.remember("a", object())
        with pytest.raises(InvalidInput, match=f"at most {MAX_MEMORY_BYTES}"):
            await turn.remember("b", "x" * MAX_MEMORY_BYTES)
        with pytest.raises(InvalidInput, match="what JSON has"):
            await turn.publish("t", object())
        with pytest.raises(InvalidInput, match="tools of the pool: none"):
            await turn.infer("x", tools=["rm"])
        with pytest.raises(InvalidInput, match="session"):
            await turn.send("p", "a.b", "x")
        return str(await turn.recall("a", "nothing"))

    end = await FakeNode().run(loaded(Script(program)))
    assert (end.output, end.steps) == ("nothing", ())


async def test_published_events_leave_with_their_step() -> None:
    async def program(turn: Any) -> str:
        await turn.publish("news", {"a": [1]})
        return ""

    node = FakeNode()
    end = await node.run(loaded(Script(program)))
    assert end.steps == ()
    ((step,),) = [a.steps for a in node.appends]
    ended, event = node.events
    assert isinstance(ended, StepEnded)
    assert isinstance(event, AgentPublished)
    assert (event.step, event.topic, event.data, step.kind) == (0, "news", '{"a":[1]}', "publish")


async def test_tokens_are_streamed() -> None:
    async def program(turn: Any) -> str:
        await turn.infer("hi")
        return ""

    node = FakeNode()
    await node.run(loaded(Script(program)))
    assert [(e.step, e.text) for e in node.events if isinstance(e, TokenText)] == [(0, "HI")]


async def test_send_uses_the_steps_key_and_raises_a_refusal() -> None:
    async def program(turn: Any) -> str:
        task = await turn.send("p", "peer", "hi")
        node.refuse_send = "unknown pool `q`"
        with pytest.raises(SendFailed, match=r"to q/peer: unknown pool `q`"):
            await turn.send("q", "peer", "hi")
        return str(task)

    node = FakeNode()
    end = await node.run(loaded(Script(program)))
    assert node.sent == {f"{TASK}/0": "hi"}
    assert end.output == f"task-of-{TASK}/0"


async def test_model_failures() -> None:
    answers = iter(
        [
            GenerateDone(call=0, text="", finish="deadline"),
            GenerateDone(call=0, text="", tool="double", arguments="{"),
            GenerateDone(call=0, text="", tool="double", arguments='{"number": 1}', finish="tool"),
            GenerateDone(call=0, text="cut", finish="length"),
        ]
    )

    async def program(turn: Any) -> str:
        with pytest.raises(InferFailed, match="no answer: deadline"):
            await turn.infer("a")
        with pytest.raises(InferFailed, match="arguments for double are no JSON object"):
            await turn.infer("b")
        call = await turn.infer("c", tools=turn.tools, tool_choice="required")
        assert (call.tool, call.arguments) == ("double", {"number": 1})
        assert (await turn.infer("d")).truncated
        return ""

    node = FakeNode()
    assert node.engine is not None
    node.engine.answer = lambda request: next(answers)
    end = await node.run(loaded(Script(program), double))
    assert end.failure is None
    assert node.engine.requests[2].tool_choice == "required"
    assert [t.name for t in node.engine.requests[2].tools] == ["double"]


async def test_a_pool_without_a_model_says_so() -> None:
    async def program(turn: Any) -> str:
        return str((await turn.infer("a")).text)

    end = await FakeNode(engine=None).run(loaded(Script(program)))
    assert (end.failure.code, end.failure.message) == ("model_error", "pool p has no model")


async def test_time_and_randomness_are_the_tasks_own() -> None:
    async def program(turn: Any) -> str:
        return f"{turn.now().isoformat()} {turn.random().random()}"

    first = await FakeNode().run(loaded(Script(program)))
    second = await FakeNode().run(loaded(Script(program)), attempt=2)
    assert first.output == second.output
    assert first.output.startswith(datetime.fromtimestamp(1_700_000_000, UTC).isoformat())


async def test_stages_are_steps_with_their_time() -> None:
    async def program(turn: Any) -> str:
        with turn.stage("plan"):
            end = time.thread_time() + 0.002
            while time.thread_time() < end:
                pass
        return ""

    end = await FakeNode().run(loaded(Script(program)))
    (step,) = end.steps
    assert (step.kind, step.name) == ("stage", "plan")
    assert 2000 <= step.cpu_us <= step.wall_us + 1


async def test_results_are_the_same_as_on_a_repeated_run() -> None:
    @tool
    async def pair() -> Any:
        """Return a tuple with a set in it."""
        return (1, {2})

    async def program(turn: Any) -> str:
        return repr(await turn.call("pair"))

    end = await FakeNode().run(loaded(Script(program), pair))
    assert end.output == "[1, [2]]"
    assert decode(end.steps[0].result, object) == [1, [2]]
