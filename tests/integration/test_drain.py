"""A node of a whole fleet is drained while its tasks are in the middle of their work."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from corefleet.client import Client
from corefleet.rpc import tasks_pb2
from tests.integration.test_fleet import HERE, Fleet, Ran, running_fleet

TASKS = 8
PATIENCE_S = 60.0
POOLS = f"""
[walker]
agent = "fleet_agents:Walker"
python_path = ["{HERE}"]
spares = 0
slots = 8
tools = [{{ name = "walk", source = "fleet_agents:walk" }}]
"""


async def live(client: Client) -> Counter[str]:
    """Return how many tasks are placed on each node."""
    return Counter(task.node for task in (await client.list(pool="walker")).tasks)


async def all_walk(notes: list[Path], steps: int) -> None:
    """Return once each task has taken `steps` more steps."""
    async with asyncio.timeout(PATIENCE_S):
        before = [len(walked(note)) for note in notes]
        # The workers are other processes.
        while any(  # noqa: ASYNC110
            len(walked(n)) < b + steps for n, b in zip(notes, before, strict=True)
        ):
            await asyncio.sleep(0.05)


def walked(note: Path) -> list[int]:
    """Return the numbers of the steps that a task's tool was called for."""
    return [int(line) for line in note.read_text().split()] if note.exists() else []


async def end_of(client: Client, task: str) -> tasks_pb2.Task:
    async with asyncio.timeout(PATIENCE_S):
        events = [event async for event in client.watch(task)]
    return events[-1].finished


async def test_a_drained_node_is_left_at_step_boundaries_and_used_again_when_undrained(
    tmp_path: Path,
) -> None:
    pools = tmp_path / "pools.toml"
    pools.write_text(POOLS)
    with running_fleet(tmp_path / "data", pools) as fleet:
        async with Client(fleet.address) as client:
            await move_to_and_fro(fleet, client, tmp_path)


async def move_to_and_fro(fleet: Fleet, client: Client, directory: Path) -> None:
    async def agentctl(*words: str) -> Ran:
        return await asyncio.to_thread(fleet, *words)

    notes = [directory / f"task{i}" for i in range(TASKS)]
    tasks = [
        (await client.submit("walker", str(note), session=f"w{i}")).task
        for i, note in enumerate(notes)
    ]
    await all_walk(notes, 1)
    before = await live(client)
    node = max(before, key=before.__getitem__)
    (other,) = {"n1", "n2"} - {node}

    ran = await agentctl("drain", node, "--reason", "new memory", "--deadline", "5m")
    assert ran.code == 0, ran.err
    assert f"{node} is drained, after" in ran.err
    assert await live(client) == {other: TASKS}, "all have moved, none is lost"
    (shown,) = [each for each in await client.nodes() if each.node == node]
    assert (shown.state, shown.running, shown.queued) == ("draining", 0, 0)
    assert shown.drain.reason == "new memory"
    await all_walk(notes, 1)

    assert (await agentctl("undrain", node)).code == 0
    ran = await agentctl("drain", other, "--deadline", "5m")
    assert ran.code == 0, ran.err
    assert await live(client) == {node: TASKS}, "it is used again"

    (directory / "stop").touch()
    for task, note in zip(tasks, notes, strict=True):
        end = await end_of(client, task)
        assert end.state == tasks_pb2.TASK_STATE_DONE, end
        assert walked(note) == list(range(int(end.output) + 1)), "no step twice, none left out"
        calls = [step for step in end.steps if step.kind == "tool"]
        assert len(calls) == len(walked(note))
        assert {step.node for step in calls} == {node, other}
        assert end.attempt <= 3
