"""A real agentd is asked for an attempt that runs: it comes back at a step boundary."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from corefleet.codec import decode
from corefleet.ids import shard_of_task
from corefleet.messages.records import JournalEntry, PoolSpec, Step, ToolSpec
from corefleet.messages.wire import Assignment, TaskFinished, TaskReturned
from tests.integration.scripted_control import ScriptedControl
from tests.integration.test_agentd import running
from tests.servers.nats import NatsServer

HERE = Path(__file__).parent
KEEPER = PoolSpec(
    name="keeper", agent="node_agents:GateKeeper", python_path=(str(HERE),), slots=2, spares=0,
    tools=(ToolSpec(name="pass_gate", source="node_agents:pass_gate"),),
)  # fmt: skip
DRAINED = "node n1 is drained: new memory"


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
async def control(nats: NatsServer, tmp_path: Path) -> AsyncIterator[ScriptedControl]:
    control = await ScriptedControl.start(nats.url, (KEEPER,))
    async with running(nats, tmp_path):
        yield control
    await control.close()


async def journal(control: ScriptedControl, item: Assignment) -> list[Step]:
    subject = control.layout.journal(shard_of_task(item.record.task), item.record.task)
    newest = await control.log.last(subject, 2.0)
    stored = await control.log.read(subject, newest.sequence if newest else 0, 2.0)
    return [step for each in stored for step in decode(each.payload, JournalEntry).steps]


async def called(gate: Path) -> int:
    """Return how often the gate's tool was called, once it was."""
    calls = gate.with_suffix(".calls")
    async with asyncio.timeout(20):
        while not calls.exists():  # noqa: ASYNC110 - the worker is another process
            await asyncio.sleep(0.01)
    return len(calls.read_text().splitlines())


async def test_a_step_under_way_ends_is_journaled_once_and_the_next_attempt_replays_it(
    control: ScriptedControl, tmp_path: Path
) -> None:
    gates = [tmp_path / f"{number}.gate" for number in range(3)]
    gates[0].touch()
    first = await control.placed("keeper", "s", "\n".join(map(str, gates)), "n1")
    assert (await control.assign(first))[0].accepted
    await called(gates[1])
    other = await control.placed("keeper", "t", str(gates[2]), "n1")
    assert (await control.assign(other))[0].accepted
    await called(gates[2])

    control.want_back(first, DRAINED)
    control.want_back(first, DRAINED)
    # The assignment is answered behind the requests: the attempt is still there, in its step.
    assert (await control.assign(first))[0].accepted
    assert control.returned == []
    gates[1].touch()
    given: TaskReturned = await control.until(
        lambda: next(iter(control.returned), None), "the attempt given back"
    )
    record = first.record
    assert (given.task, given.attempt, given.node) == (record.task, 1, "n1")
    assert given.reason == DRAINED
    steps = await journal(control, first)
    assert [step.step for step in steps] == [0, 1]
    assert not (await control.assign(first))[0].accepted, "the attempt is not taken again"

    second = await control.again(first, "n1")
    assert (await control.assign(second))[0].accepted
    gates[2].touch()
    result = (await control.event(record.task, TaskFinished)).result
    assert (result.state, result.output) == ("done", "0.gate 1.gate 2.gate")
    assert [step.attempt for step in result.steps if step.kind == "tool"] == [1, 1, 2]
    assert [await called(gate) for gate in gates] == [1, 1, 2], "the other task called 2.gate, too"
    assert (await control.event(other.record.task, TaskFinished)).result.attempt == 1
