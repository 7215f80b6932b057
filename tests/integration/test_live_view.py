"""`agentctl top` and `agentctl trace` against two real controlds."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

from corefleet.client import Client
from corefleet.ids import shard_of_task
from corefleet.journal import Journal
from corefleet.messages.records import Step
from corefleet.messages.wire import Assignment, StepEnded
from tests.integration.control_plane import (
    POOL,
    ControlPlane,
    all_owned,
    events_until,
    first_step,
    node_state,
)
from tests.integration.fake_node import FakeNode

UNKNOWN = "3-0123456789abcdefghjkmnpqrs"


async def agentctl(plane: ControlPlane, verb: str, *args: str) -> tuple[int, str, str]:
    """Run a verb against all controlds; return its exit code, stdout and stderr."""
    named = [part for address in plane.addresses for part in ("--address", address)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agentctl", verb, *args, *named),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


def pool_of(view: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(pool for pool in view["pools"] if pool["pool"] == name)
    return found


async def test_top_sums_queues_and_placements_over_both_controlds(
    plane: ControlPlane, client: Client
) -> None:
    owners = await all_owned(client)
    await client.apply_pool("waits", POOL)
    waiting = [await client.submit("waits", str(number)) for number in range(40)]
    by_owner = {owners[shard_of_task(made.task)] for made in waiting}
    assert by_owner == {"c1", "c2"}, "the queue lies in shards of both"
    async with FakeNode(plane.nats.url, "n1"):
        await node_state(client, "n1", "ready")
        before = await self_view(plane)
        for session in ("one", "two"):
            for _ in range(5):
                made = await client.submit("p", "x", session=session)
                await events_until(client, made.task, "finished")
        view = await self_view(plane)
    for made in waiting:
        await client.cancel(made.task)
    assert view["controlds"]["living"] == view["controlds"]["answered"] == 2
    assert sum(each["shards"] for each in view["controlds"]["list"]) == 16
    assert view["nodes"]["states"]["ready"] == 1
    assert view["nodes"]["slots_total"] == 64
    assert pool_of(view, "waits")["queued"] == 40
    assert pool_of(view, "waits")["placed_per_s"] == 0
    since, earlier = pool_of(view, "p")["since_start"], _since(before)
    assert since["placed"] - earlier["placed"] == 10
    assert since["finished"] - earlier["finished"] == 10
    assert since["home"]["new"] - earlier["home"]["new"] == 2
    assert since["home"]["hit"] - earlier["home"]["hit"] == 8
    assert since["wait_p50_s"] > 0
    code, text, _ = await agentctl(plane, "top", "--once", "--interval", "0.2")
    assert code == 0
    assert "controlds 2 of 2 answered" in text


def _since(view: dict[str, Any]) -> dict[str, Any]:
    nothing = {"placed": 0, "finished": 0, "home": {"new": 0, "hit": 0}}
    found = [pool["since_start"] for pool in view["pools"] if pool["pool"] == "p"]
    return found[0] if found else nothing


async def self_view(plane: ControlPlane) -> dict[str, Any]:
    code, out, err = await agentctl(plane, "top", "--once", "--json", "--interval", "0.2")
    assert code == 0, err
    view: dict[str, Any] = json.loads(out)
    return view


class Held:
    """Attempts that journal a timed step, then wait until they are let through."""

    def __init__(self) -> None:
        self.running = asyncio.Event()
        self.through = asyncio.Event()

    async def run(self, node: FakeNode, assignment: Assignment, journal: Journal) -> str:
        record = assignment.record
        step = Step(
            step=record.attempt - 1, kind="tool", name="look", attempt=record.attempt,
            node=node.name, started_ms=time.time_ns() // 1_000_000, wall_us=2_000, cpu_us=500,
        )  # fmt: skip
        await journal.append((step,))
        node.give(assignment, StepEnded(task=record.task, step=step))
        self.running.set()
        await self.through.wait()
        return "done"


async def test_trace_shows_both_attempts_of_a_task_whose_node_died(
    plane: ControlPlane, client: Client
) -> None:
    held = Held()
    async with AsyncExitStack() as stack:
        nodes = {
            name: await stack.enter_async_context(FakeNode(plane.nats.url, name, run=held.run))
            for name in ("t1", "t2")
        }
        for name in nodes:
            await node_state(client, name, "ready")
        made = await client.submit("p", "x")
        await first_step(client, made.task)
        first = (await client.get(made.task)).node
        held.running.clear()
        await nodes[first].die()
        async with asyncio.timeout(10):
            await held.running.wait()
        code, out, err = await agentctl(plane, "trace", made.task, "--json")
        assert code == 0, err
        live = json.loads(out)
        held.through.set()
        await events_until(client, made.task, "finished")
    assert live["state"] == "running"
    lost, second = live["attempts"]
    assert (lost["attempt"], lost["node"], lost["domain"]) == (1, first, 0)
    assert lost["cause"] == "lost"
    assert lost["why"]
    assert live["created_ms"] <= lost["placed_ms"] <= lost["ended_ms"] <= second["placed_ms"]
    assert (second["attempt"], second["ended_ms"], second["cause"]) == (2, None, None)
    assert second["node"] != first
    assert [(s["step"], s["attempt"], s["cpu_ms"]) for s in live["steps"]] == [
        (0, 1, 0.5),
        (1, 2, 0.5),
    ]
    assert live["steps"][1]["gap_ms"] > 0
    assert live["queue_wait_ms"] == lost["placed_ms"] - live["created_ms"]
    ended = json.loads((await agentctl(plane, "trace", made.task, "--json"))[1])
    assert [each["cause"] for each in ended["attempts"]] == ["lost", "done"]
    assert ended["attempts"][1]["ended_ms"] == ended["finished_ms"]
    code, text, _ = await agentctl(plane, "trace", made.task)
    assert code == 0
    assert "left: lost" in text


async def test_trace_of_an_unknown_task_says_so(plane: ControlPlane, client: Client) -> None:
    code, out, err = await agentctl(plane, "trace", UNKNOWN)
    assert (code, out) == (2, "")
    assert "not known; it never was, or its result has expired" in err
    assert (await agentctl(plane, "trace", "no-task"))[0] == 2


async def test_top_goes_on_until_it_is_interrupted(plane: ControlPlane, client: Client) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agentctl", "top", "--json", "--interval", "0.1"),
        *("--address", plane.addresses[0]),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        first = json.loads(await process.stdout.readline())
        second = json.loads(await process.stdout.readline())
        process.send_signal(signal.SIGINT)
        await process.communicate()
    assert first["interval_s"] is None
    assert second["interval_s"] > 0
    assert process.returncode == 0
