"""A simulated fleet against real controlds: benchmarks can believe what they see of it."""

from __future__ import annotations

import asyncio

from corefleet.client import Client
from corefleet.rpc import tasks_pb2
from tests.integration.control_plane import ControlPlane, node_state
from tools.fleet.fleet import SimFleet
from tools.fleet.plan import Durations, Shape


async def test_tasks_of_a_killed_rack_end_elsewhere_with_each_step_once(
    plane: ControlPlane, client: Client
) -> None:
    fleet = SimFleet(plane.nats.url, Shape(80), {"p": 4}, Durations.parse("fixed:0"), 0.2)
    try:
        await fleet.start()
        await node_state(client, "n00079", "ready")
        placed: dict[str, str] = {}
        all_placed = asyncio.Event()

        async def one(session: str) -> tasks_pb2.Task:
            async for event in client.run("p", "20 0.1", session=session):
                if event.HasField("placed"):
                    placed[session] = event.placed.node
                    if len(placed) == 40:
                        all_placed.set()
                if event.HasField("finished"):
                    return event.finished
            raise AssertionError("the events ended without an end")

        async with asyncio.timeout(60):
            running = [asyncio.create_task(one(f"s{number}")) for number in range(40)]
            await all_placed.wait()
            dead = set(fleet.named("rack-000"))
            hit = {session for session, node in placed.items() if node in dead}
            assert hit
            await fleet.kill(sorted(dead))
            ends = await asyncio.gather(*running)
        for number, task in enumerate(ends):
            assert task.state == tasks_pb2.TASK_STATE_DONE
            assert task.node not in dead
            assert [step.step for step in task.steps if step.kind == "tool"] == list(range(20))
            if f"s{number}" in hit:
                assert task.attempt > 1
        await fleet.revive(sorted(dead))
        await node_state(client, "n00000", "ready")
    finally:
        await fleet.close()
