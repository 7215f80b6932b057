"""Bindings are looked at, mended, and given up when they cannot be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from agentd.binding_watch import BindingWatch
from agentd.core.binding import TRANSITIONS, Bindings, Drain, Rebind, Repaired
from agentd.launch.protocol import ExitStatus, LaunchSpec, Process
from corefleet.background import Background
from corefleet.errors import LaunchFailed


class Bound:
    """A process whose binding a test sets; `mends`: rebinding helps."""

    pid = 7

    def __init__(self, name: str, mends: bool = True) -> None:
        self.name = name
        self.spec = LaunchSpec(name=name, command=("true",), cpus=(0,), domain=0)
        self.wrong: str | None = None
        self.mends = mends
        self.refuses = ""
        self.rebound = 0

    async def wait(self) -> ExitStatus:
        raise AssertionError("not asked for here")

    def last_words(self) -> str:
        return ""

    def terminate(self) -> None:
        return

    def kill(self) -> None:
        return

    async def drift(self) -> str | None:
        return self.wrong

    async def throttled(self) -> bool:
        return False

    async def rebind(self) -> None:
        self.rebound += 1
        if self.refuses:
            raise LaunchFailed(self.refuses)
        if self.mends:
            self.wrong = None


class Shed:
    """Who runs the processes."""

    def __init__(self, *processes: Bound) -> None:
        self.running: list[Bound] = list(processes)
        self.drained: list[tuple[str, str]] = []

    def processes(self) -> tuple[Process, ...]:
        return tuple(self.running)

    def drain(self, process: Process, reason: str) -> None:
        self.drained.append((process.name, reason))


async def nothing() -> None:
    return


@pytest.fixture
async def background() -> AsyncIterator[Background]:
    errors: list[BaseException] = []
    made = Background(errors.append)
    yield made
    await made.close()
    assert not errors


async def test_a_drifted_process_is_bound_again_and_the_others_are_left_alone(
    background: Background,
) -> None:
    good, bad = Bound("good"), Bound("bad")
    shed = Shed(good, bad)
    watch = BindingWatch(shed, nothing, background)
    bad.wrong = "it may run on CPUs 0-3; expected 0"
    await watch.verify()
    assert (bad.rebound, good.rebound) == (1, 0)
    assert await bad.drift() is None
    assert (watch.bindings.repaired, watch.bindings.lines()) == (1, ())
    await watch.verify()
    assert bad.rebound == 1


@pytest.mark.parametrize("refuses", ["", "CPU 3 is offline"])
async def test_a_process_that_cannot_be_bound_is_drained_once_and_shown(
    background: Background, refuses: str
) -> None:
    bad = Bound("bad", mends=False)
    bad.wrong, bad.refuses = "elsewhere", refuses
    shed = Shed(bad)
    watch = BindingWatch(shed, nothing, background)
    for _ in range(3):
        await watch.verify()
    assert shed.drained == [("bad", f"not bound: {refuses or 'elsewhere'}")]
    assert watch.bindings.lines() == (f"bad: draining: {refuses or 'elsewhere'}",)
    shed.running.clear()
    await watch.verify()
    assert watch.bindings.lines() == ()


async def test_each_round_looks_at_the_machine_first(background: Background) -> None:
    rounds = asyncio.Queue[int]()
    process = Bound("p")

    async def look() -> None:
        process.wrong = "drifted meanwhile"
        rounds.put_nowait(process.rebound)

    watch = BindingWatch(Shed(process), look, background, every_s=0.001)
    watch.start()
    async with asyncio.timeout(5):
        assert [await rounds.get() for _ in range(3)] == [0, 1, 2]
    await watch.close()


def test_every_transition_is_used_and_no_other() -> None:
    bindings = Bindings()
    assert bindings.seen("p", None) == []
    assert bindings.seen("p", "x") == [Rebind("p", "x")]
    assert bindings.seen("p", None) == [Repaired("p", "x")]
    assert bindings.seen("p", "y") == [Rebind("p", "y")]
    assert bindings.seen("p", "z") == [Drain("p", "z")]
    assert bindings.seen("p", None) == []
    assert bindings.seen("p", "z") == []
    assert len(TRANSITIONS) == 3
