"""A task that is run again from any point of its journal goes on as it began.

Holds docs/architecture.md, rules 2 and 9: effects follow acknowledged steps only, keep
their keys over attempts, and are not repeated when the tool forbids it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentd.worker.pool import LoadedPool
from corefleet.agent import Inference
from corefleet.codec import decode
from corefleet.messages.links import FinishTask
from corefleet.tool import tool
from tests.unit.agentd.worker.fakes import FakeEngine, FakeNode, Script, kinds, linger, loaded


class World:
    """What the tools did: for each key the arguments that it was used with, and how often."""

    def __init__(self, seed: int | None = None) -> None:
        self.rng = None if seed is None else random.Random(seed)
        self.done: dict[str, list[tuple[str, int]]] = {}

    def pool(self, program: Callable[[Any], Any]) -> LoadedPool:
        @tool
        async def act(number: int, idempotency_key: str) -> int:
            """Have an effect that may be repeated."""
            self.done.setdefault(idempotency_key, []).append(("act", number))
            await linger(self.rng)
            return number + 1

        @tool(at_most_once=True)
        async def once(number: int, idempotency_key: str) -> int:
            """Have an effect that may not be repeated."""
            self.done.setdefault(idempotency_key, []).append(("once", number))
            await linger(self.rng)
            return number + 1

        return loaded(Script(program), act, once)

    def check(self) -> None:
        for key, uses in self.done.items():
            assert len(set(uses)) == 1, f"{key} was used for several things: {uses}"
            assert uses[0][0] == "act" or len(uses) == 1, f"{key} ran twice: {uses}"


async def everything(turn: Any) -> str:
    """One of each, with two parallel branches of several steps whose order of ends shows."""
    ends = []

    async def branch(name: str) -> None:
        number = await turn.call("act", number=ord(name))
        ends.append(f"{name}{number}")
        ends.append((await turn.infer(f"{name}{number}")).text)
        await turn.publish("branch", name)

    with turn.stage("plan"):
        word = (await turn.infer("start")).text
    await asyncio.gather(branch("a"), branch("b"))
    await turn.remember("ends", ends)
    number = await turn.call("once", number=len(ends))
    task = await turn.send("p", "peer", f"{word}{number}")
    return f"{ends} {await turn.recall('ends')} {task} {turn.random().random()}"


@pytest.mark.parametrize("seed", range(5))
async def test_every_prefix_of_the_journal_gives_the_same_task(seed: int) -> None:
    world = World(seed)
    whole = FakeNode(engine=FakeEngine(seed), seed=seed)
    first = await whole.run(world.pool(everything))
    assert first.failure is None
    assert len(whole.journal) == 12
    for cut in range(len(whole.journal) + 1):
        node = FakeNode(engine=FakeEngine(), journal=whole.journal[:cut], sent=dict(whole.sent))
        again = await node.run(World().pool(everything), attempt=2)
        begun_once = [s.kind for s in whole.journal[:cut]].count("intent")
        ended_once = any(s.name == "once" and s.kind == "tool" for s in whole.journal[:cut])
        if begun_once and not ended_once:
            assert again.failure.code == "tool_at_most_once"
            continue
        assert again.failure is None
        assert sorted(kinds(node.journal)) == sorted(kinds(whole.journal))
        if cut >= 6:  # both first steps of the branches have ended: no race is open
            assert again.output == first.output
            assert again.state == first.state


Program = tuple[Any, ...]

_steps = st.one_of(
    st.tuples(st.just("infer"), st.integers(0, 9)),
    st.tuples(st.just("act"), st.integers(0, 9)),
    st.tuples(st.just("once"), st.integers(0, 9)),
    st.tuples(st.just("send"), st.integers(0, 9)),
    st.tuples(st.just("remember"), st.integers(0, 9)),
    st.tuples(st.just("publish"), st.integers(0, 9)),
    st.tuples(st.just("stage"), st.integers(0, 9)),
)
_programs = st.recursive(
    st.lists(_steps, max_size=4).map(tuple),
    lambda inner: st.lists(
        st.one_of(
            _steps,
            st.tuples(st.just("gather"), st.lists(inner, min_size=2, max_size=3)),
            st.tuples(st.just("first"), st.lists(inner, min_size=2, max_size=3)),
        ),
        max_size=4,
    ).map(tuple),
    max_leaves=6,
)


def interpreted(program: Program) -> Callable[[Any], Any]:
    """Make an agent of a program. Every request depends on all results that were seen."""

    async def run(turn: Any) -> str:
        seen: list[str] = []

        async def walk(part: Program) -> None:
            for kind, what in part:
                if kind in {"gather", "first"}:
                    branches = [asyncio.create_task(walk(branch)) for branch in what]
                    if kind == "gather":
                        await asyncio.gather(*branches)
                    else:
                        done, _ = await asyncio.wait(branches, return_when=asyncio.FIRST_COMPLETED)
                        seen.append(str(sorted(branches.index(task) for task in done)))
                        await asyncio.gather(*branches)
                else:
                    await step(kind, what)

        async def step(kind: str, what: int) -> None:
            so_far = len("".join(seen))
            if kind == "infer":
                seen.append((await turn.infer(f"{what} {so_far}")).text)
            elif kind in {"act", "once"}:
                seen.append(str(await turn.call(kind, number=what + 100 * so_far)))
            elif kind == "send":
                seen.append(await turn.send("p", "peer", f"{what} {so_far}"))
            elif kind == "remember":
                await turn.remember(str(what), list(seen))
            elif kind == "publish":
                await turn.publish(str(what), so_far)
            else:
                with turn.stage(str(what)):
                    seen.append(str(what))

        await walk(program)
        return "|".join(seen)

    return run


@settings(max_examples=100)
@given(
    program=_programs,
    crashes=st.lists(st.integers(0, 6), max_size=4),
    seed=st.integers(0, 2**16),
)
def test_any_program_survives_crashes(program: Program, crashes: list[int], seed: int) -> None:
    asyncio.run(_survives(program, crashes, seed))


async def _survives(program: Program, crashes: list[int], seed: int) -> None:
    world = World(seed)
    node = FakeNode(seed=seed)
    committed: dict[tuple[int, str], bytes] = {}
    end = None
    for attempt, lose_after in enumerate([*crashes, None], 1):
        node.engine = FakeEngine(seed + attempt)
        node.appends, node.lose_after = [], lose_after
        end = await node.run(world.pool(interpreted(program)), attempt=attempt)
        world.check()
        for step in node.journal:
            known = committed.setdefault((step.step, step.kind), step.result)
            assert known == step.result, f"step {step.step} has two results"
        places = [(step.step, step.kind) for step in node.journal]
        assert len(places) == len(set(places)), f"a step is journaled twice: {places}"
        if end is not None:
            break
    assert isinstance(end, FinishTask)
    if end.failure is not None:
        assert end.failure.code == "tool_at_most_once"
        return
    effects = sum(len(uses) for uses in world.done.values())
    again = await node.run(world.pool(interpreted(program)), attempt=9)
    assert (again.output, again.failure, again.steps) == (end.output, None, ())
    assert sum(len(uses) for uses in world.done.values()) == effects


async def _asks(*steps: tuple[str, int]) -> FakeNode:
    """Return a node whose journal holds `steps` of an attempt that died."""
    node = FakeNode()
    await node.run(World().pool(interpreted(steps)))
    return node


@pytest.mark.parametrize(
    ("now", "says"),
    [
        ((("infer", 1), ("once", 1)), "step 1 was tool 'act' in attempt 1, and is now tool 'once'"),
        ((("infer", 1), ("act", 2)), "step 1 was tool 'act' with another request in attempt 1"),
        ((("infer", 1), ("infer", 1)), "step 1 was tool 'act' in attempt 1, and is now infer 'm'"),
        ((("infer", 1),), "it ended before step 1, which an earlier run asked: tool 'act'"),
    ],
)
async def test_an_agent_that_asks_something_else_fails(now: Program, says: str) -> None:
    node = await _asks(("infer", 1), ("act", 1))
    end = await node.run(World().pool(interpreted(now)), attempt=2)
    assert end.failure.code == "agent_error"
    assert "the agent is not deterministic" in end.failure.message
    assert says in end.failure.message


async def test_an_agent_cannot_hide_that_it_is_not_deterministic() -> None:
    node = await _asks(("infer", 1), ("act", 1))

    async def program(turn: Any) -> str:
        with suppress(BaseException):
            await turn.infer("else")
        with suppress(BaseException):
            await turn.call("act", number=1)
        return "fine"

    world = World()
    end = await node.run(world.pool(program), attempt=2)
    assert (end.output, end.failure.code) == ("", "agent_error")
    assert world.done == {}


async def test_a_tool_that_may_have_run_is_not_called_again() -> None:
    program = interpreted((("once", 1), ("infer", 1)))
    node = FakeNode()
    await node.run(World().pool(program))
    assert kinds(node.journal) == ["0:intent:once", "0:tool:once", "1:infer:m"]
    node.journal = node.journal[:1]
    world = World()
    end = await node.run(world.pool(program), attempt=2)
    assert end.failure.code == "tool_at_most_once"
    assert "step 0: tool 'once' was begun by an earlier attempt" in end.failure.message
    assert world.done == {}


async def test_a_crash_before_the_intent_is_durable_leaves_the_tool_uncalled() -> None:
    world = World()
    node = FakeNode(lose_after=0)
    assert await node.run(world.pool(interpreted((("once", 1),)))) is None
    assert world.done == {}


async def test_an_own_open_entry_in_the_journal_is_no_step() -> None:
    node = await _asks(("act", 1))
    opened = node.journal[0].__class__(step=0, kind="open", attempt=2)
    node.journal.insert(0, opened)
    end = await node.run(World().pool(interpreted((("act", 1),))), attempt=2)
    assert (end.output, end.failure) == ("2", None)


async def test_a_branch_that_comes_late_to_its_step_does_not_stop_the_others() -> None:
    """Such an agent is not deterministic; as long as it does not matter, it goes on."""
    late = asyncio.Event()

    async def program(turn: Any) -> str:
        async def first() -> None:
            await late.wait()
            await turn.infer("late")

        branch = asyncio.create_task(first())
        early = await turn.infer("early")
        late.set()
        await branch
        return str(early.text)

    node = FakeNode()
    await node.run(loaded(Script(program)))
    node.journal.reverse()
    late.clear()
    end = await node.run(loaded(Script(program)), attempt=2)
    assert (end.output, end.failure) == ("EARLY", None)


@pytest.mark.parametrize("depth", [0, 1, 4])
async def test_a_result_is_followed_to_the_next_step_however_deep(depth: int) -> None:
    """Results that came apart come one upon the other when the journal answers."""

    async def deep(turn: Any, left: int) -> None:
        if left:
            await asyncio.gather(deep(turn, left - 1))
        else:
            await turn.infer("a")

    async def program(turn: Any) -> str:
        async def one() -> None:
            await deep(turn, depth)
            await turn.infer("after a")

        async def two() -> None:
            await turn.infer("b")
            await turn.infer("after b")

        await asyncio.gather(one(), two())
        return "done"

    node = FakeNode()
    assert node.engine is not None
    node.engine.after = {"b": "after a", "after a": "after b"}
    await node.run(loaded(Script(program)))
    ends = [decode(step.result, Inference).text for step in node.journal]
    assert ends[:2] == ["A", "B"]
    for cut in (2, 3, 4):
        again = FakeNode(journal=node.journal[:cut])
        end = await again.run(loaded(Script(program)), attempt=2)
        assert (end.output, end.failure) == ("done", None)
