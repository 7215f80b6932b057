"""The worker program as agentd starts it: a process between two Unix sockets."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from corefleet.codec import decode
from corefleet.config import load_pools
from corefleet.messages.links import (
    AppendSteps,
    AttemptOver,
    EmitEvents,
    GenerateDone,
    MessageSent,
    Ping,
    ReturnTask,
    SendMessage,
    Stop,
    WorkerAlive,
    WorkerHello,
    YieldTask,
)
from corefleet.messages.records import PoolSpec, SessionState, Step, ToolSpec, Turn
from corefleet.messages.wire import TaskWaiting, TokenText
from tests.integration.worker_peers import FakeAgentd, FakeEngine, worker_of

ROOT = Path(__file__).parents[2]

AGENTS = """
import asyncio
from corefleet.agent import Agent

class Relay(Agent):
    async def run(self, turn):
        await turn.infer("first")
        await turn.remember("seen", turn.input)
        return await turn.send("other", "peer", turn.input)

class Crash(Agent):
    async def run(self, turn):
        return turn.input[99]

class Sleeper(Agent):
    async def run(self, turn):
        await turn.infer("first")
        await asyncio.Event().wait()
"""


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[FakeEngine]:
    made = FakeEngine(tmp_path / "engine")
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
def module(tmp_path: Path) -> Path:
    (tmp_path / "test_made_agents.py").write_text(AGENTS)
    return tmp_path


def python_pool(module: Path, agent: str) -> PoolSpec:
    return PoolSpec(
        name="p", agent=f"test_made_agents:{agent}", python_path=(str(module),), model="m"
    )


def demo_pool(name: str) -> PoolSpec:
    pools = {pool.name: pool for pool in load_pools(ROOT / "configs" / "pools.toml")}
    return pools[name]


def titles(steps: list[Step]) -> list[str]:
    return [f"{step.kind} {step.name}" for step in steps]


async def test_the_declared_agent_calls_a_tool_and_answers(
    tmp_path: Path, engine: FakeEngine
) -> None:
    answers = [
        GenerateDone(
            call=1, text="", tool="count_letter", arguments='{"word":"Pepper","letter":"p"}',
            finish="tool", tokens_in=50, tokens_out=9,
        ),
        GenerateDone(call=2, text=" Three. ", tokens_in=70, tokens_out=3),
    ]  # fmt: skip
    engine.answer = lambda request: answers[request.call - 1]
    agentd = FakeAgentd(tmp_path / "agentd", demo_pool("support"), engine.socket)
    state = SessionState(history=(Turn("user", "hi"), Turn("assistant", "hello")))
    async with worker_of(agentd):
        hello = await agentd.expect(WorkerHello)
        assert (hello.worker, hello.version) == ("w1", 1)
        agentd.start("How many p are in Pepper?", state=state)
        end = await agentd.finish()
    assert (end.output, end.failure) == ("Three.", None)
    assert end.state is not None
    assert [turn.text for turn in end.state.history] == [
        "hi", "hello", "How many p are in Pepper?", '{"word":"Pepper","letter":"p"}', "3", "Three.",
    ]  # fmt: skip
    first, second = engine.requests
    assert (first.tool_choice, second.tool_choice) == ("required", "auto")
    assert [tool.name for tool in first.tools] == ["calculator", "utc_clock", "count_letter"]
    assert [turn.text for turn in first.turns] == ["hi", "hello", "How many p are in Pepper?"]
    assert second.turns[-2:] == (
        Turn("assistant", '{"word":"Pepper","letter":"p"}', "count_letter"),
        Turn("tool", "3", "count_letter"),
    )
    steps = agentd.journals["t1"]
    assert titles(steps) == [
        "stage intake",
        "stage context",
        "infer qwen2.5-coder-0.5b",
        "stage select",
        "tool count_letter",
        "stage merge",
        "infer qwen2.5-coder-0.5b",
        "stage select",
        "stage reply",
    ]
    assert [step.step for step in steps] == list(range(9))
    assert decode(steps[4].result, int) == 3
    assert len([m for m in agentd.received if isinstance(m, AppendSteps)]) == 2
    assert any(
        isinstance(event, TokenText) and event.text == " Three. "
        for message in agentd.received
        if isinstance(message, EmitEvents)
        for event in message.events
    )


async def test_another_worker_goes_on_from_the_journal(module: Path, engine: FakeEngine) -> None:
    agentd = FakeAgentd(module / "agentd", python_pool(module, "Relay"), engine.socket)
    async with worker_of(agentd) as worker:
        await agentd.expect(WorkerHello)
        agentd.start("x")
        sent = await agentd.expect(SendMessage)
        assert (sent.pool, sent.session, sent.request_id, sent.input) == (
            "other", "peer", "t1/2", "x",
        )  # fmt: skip
        worker.process.kill()
        assert (await worker.ended())[0] == -signal.SIGKILL
    agentd.received.clear()
    async with worker_of(agentd):
        await agentd.expect(WorkerHello)
        agentd.start("x", attempt=2)
        sent = await agentd.expect(SendMessage)
        assert sent.request_id == "t1/2"
        agentd.send(MessageSent(call=sent.call, task="t9"))
        end = await agentd.finish()
    assert end.output == "t9"
    assert len(engine.requests) == 1
    assert titles(agentd.journals["t1"]) == ["infer m", "remember seen", "send other/peer"]


async def test_a_generation_outlives_its_engine(tmp_path: Path, engine: FakeEngine) -> None:
    engine.hold = True
    pool = PoolSpec(name="p", model="m", history_turns=0)
    agentd = FakeAgentd(tmp_path / "agentd", pool, engine.socket)
    async with worker_of(agentd):
        await agentd.expect(WorkerHello)
        agentd.start("again")
        await engine.requested.wait()
        await engine.stop()
        waiting = await agentd.expect(
            EmitEvents, lambda m: any(isinstance(e, TaskWaiting) for e in m.events)
        )
        assert isinstance(waiting.events[0], TaskWaiting)
        assert "the answer begins again" in waiting.events[0].reason
        engine.hold = False
        await engine.start()
        assert (await agentd.finish()).output == "AGAIN"
    assert [request.call for request in engine.requests] == [1, 2]


async def test_a_dropped_attempt_cancels_its_generation(tmp_path: Path, engine: FakeEngine) -> None:
    engine.hold = True
    agentd = FakeAgentd(tmp_path / "agentd", PoolSpec(name="p", model="m"), engine.socket)
    async with worker_of(agentd):
        await agentd.expect(WorkerHello)
        agentd.start("x")
        await engine.requested.wait()
        agentd.send(AttemptOver(task="t1", attempt=1, outcome="dropped", reason="fenced"))
        await engine.was_cancelled.wait()
        assert engine.cancelled == [1]
        engine.hold = False
        agentd.start("y", task="t2")
        assert (await agentd.finish("t2")).output == "Y"


async def test_an_agents_exception_fails_its_task_only(module: Path) -> None:
    agentd = FakeAgentd(module / "agentd", python_pool(module, "Crash"))
    async with worker_of(agentd):
        await agentd.expect(WorkerHello)
        for number in range(3):
            agentd.start("x", task=f"t{number}")
            end = await agentd.finish(f"t{number}")
            assert end.failure is not None
            assert end.failure.code == "agent_error"
            assert end.failure.message == (
                "IndexError: string index out of range "
                "(test_made_agents.py:13 in run: return turn.input[99])"
            )
        agentd.send(Ping(number=7))
        alive = await agentd.expect(WorkerAlive)
        assert alive.number == 7
        assert alive.cpu_us > 0


async def test_stop_gives_back_and_exits_0(module: Path, engine: FakeEngine) -> None:
    agentd = FakeAgentd(module / "agentd", python_pool(module, "Sleeper"), engine.socket)
    async with worker_of(agentd) as worker:
        await agentd.expect(WorkerHello)
        agentd.start("x")
        await agentd.expect(AppendSteps)
        agentd.send(Stop(reason="maintenance", grace_s=10))
        given_back = await agentd.expect(ReturnTask)
        assert given_back.reason == "maintenance"
        assert titles(agentd.journals["t1"]) == ["infer m"]
        code, errors = await worker.ended()
        assert code == 0, errors


async def test_one_attempt_is_given_back_and_the_others_go_on(
    module: Path, engine: FakeEngine
) -> None:
    agentd = FakeAgentd(module / "agentd", python_pool(module, "Relay"), engine.socket)
    engine.hold = True
    async with worker_of(agentd):
        await agentd.expect(WorkerHello)
        agentd.start("x", task="t1")
        agentd.start("y", task="t2")
        await engine.requested.wait()
        agentd.send(YieldTask(task="t1", attempt=1, reason="node n1 is drained"))
        agentd.send(YieldTask(task="t1", attempt=7, reason="an attempt that is not here"))
        engine.release()
        given_back = await agentd.expect(ReturnTask)
        assert (given_back.task, given_back.reason) == ("t1", "node n1 is drained")
        assert titles(agentd.journals["t1"])[0] == "infer m"
        message = await agentd.expect(SendMessage)
        assert message.input == "y"
        agentd.send(MessageSent(call=message.call, task="t9"))
        assert (await agentd.finish("t2")).output == "t9"
        assert not [m for m in agentd.received if isinstance(m, SendMessage) and m.input == "x"]


async def test_terminate_is_a_stop(tmp_path: Path) -> None:
    agentd = FakeAgentd(tmp_path / "agentd", demo_pool("noop"))
    async with worker_of(agentd) as worker:
        await agentd.expect(WorkerHello)
        agentd.start("x")
        await agentd.finish()
        worker.process.terminate()
        assert (await worker.ended())[0] == 0


async def test_without_its_agentd_a_worker_ends(tmp_path: Path) -> None:
    agentd = FakeAgentd(tmp_path / "agentd", demo_pool("noop"))
    async with worker_of(agentd) as worker:
        await agentd.expect(WorkerHello)
        agentd.start("x")
        await agentd.finish()
        assert agentd.link is not None
        await agentd.link.close()
        assert (await worker.ended())[0] == 0


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (
            PoolSpec(name="p", agent="absent:A"),
            "pool p: agent absent:A: import of absent failed: ModuleNotFoundError: No module named 'absent'\n",  # noqa: E501
        ),
        (
            PoolSpec(name="p", model="m", tools=(ToolSpec(name="rm"),)),
            "pool p: tool rm: not built in; built in are: calculator, utc_clock\n",
        ),
    ],
)
async def test_a_pool_that_cannot_be_loaded(tmp_path: Path, spec: PoolSpec, says: str) -> None:
    agentd = FakeAgentd(tmp_path / "agentd", spec)
    async with worker_of(agentd) as worker:
        assert await worker.ended() == (3, says)


async def test_many_tasks_at_a_time(tmp_path: Path) -> None:
    agentd = FakeAgentd(tmp_path / "agentd", demo_pool("noop"))
    async with worker_of(agentd):
        await agentd.expect(WorkerHello)
        for number in range(200):
            agentd.start(f"x{number}", task=f"t{number}")
        ends = await asyncio.gather(*(agentd.finish(f"t{number}") for number in range(200)))
    assert [end.output for end in ends] == [f"x{number}" for number in range(200)]
    assert all(end.state is None and not end.steps for end in ends)
