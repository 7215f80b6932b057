"""Real processes killed and frozen in the middle of turns: nothing lost, nothing twice.

Each turn is a chain of hashes, one journaled step each: a lost, repeated or swapped
step gives another answer.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from agentctl.local.fleet import FleetPlan, LocalFleet
from corefleet.client import Client
from corefleet.ids import shard_of
from corefleet.rpc import tasks_pb2
from tools.bench.agents import expected_chain
from tools.bench.local_fleet import CHAIN

STEPS, PAUSE_MS = 40, 30


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[LocalFleet]:
    plan = FleetPlan(data=tmp_path, nodes=2, controlds=2, port=0, pools=(CHAIN,))
    async with LocalFleet(plan) as running:
        yield running


class Turn:
    """A turn under way; `moving` is set once its first step is done."""

    def __init__(self, fleet: LocalFleet, session: str, client: Client) -> None:
        self.session = session
        self.node = ""
        self.worker = 0
        self.attempts: list[int] = []
        self.moving = asyncio.Event()
        self._client = client
        self._following = asyncio.create_task(self._follow())

    async def end(self) -> tasks_pb2.Task:
        """Return the finished task, checked for what no fault may change."""
        finished = await self._following
        assert finished.state == tasks_pb2.TASK_STATE_DONE, finished
        assert finished.output == expected_chain(STEPS, self.session)
        steps = [step.step for step in finished.steps if step.kind == "tool"]
        assert steps == sorted(set(steps))
        assert len(steps) == STEPS
        return finished

    async def _follow(self) -> tasks_pb2.Task:
        text = f"{STEPS} {PAUSE_MS} {self.session}".encode()
        try:
            async for event in self._client.run("chain", text, session=self.session):
                if event.HasField("placed"):
                    self.node = event.placed.node
                    self.attempts.append(event.placed.attempt)
                elif event.HasField("step"):
                    if pid := re.search(r"pid=(\d+)", event.step.summary):
                        self.worker = int(pid[1])
                    self.moving.set()
                elif event.HasField("finished"):
                    return event.finished
        finally:
            self.moving.set()
        raise AssertionError("the events ended before the task did")


async def test_a_killed_worker_is_replaced_within_the_same_attempt(fleet: LocalFleet) -> None:
    async with fleet.client() as client:
        turn = Turn(fleet, "worker", client)
        await turn.moving.wait()
        victim = turn.worker
        psutil.Process(victim).kill()
        finished = await turn.end()
    assert finished.attempt == 1
    assert turn.worker != victim


async def test_a_killed_nodes_turn_goes_on_elsewhere(fleet: LocalFleet) -> None:
    async with fleet.client() as client:
        turn = Turn(fleet, "node", client)
        await turn.moving.wait()
        victim = turn.node
        fleet.kill_node(victim)
        finished = await turn.end()
    assert finished.node != victim
    assert finished.attempt == 2
    assert {step.attempt for step in finished.steps} == {1, 2}


async def test_a_killed_owners_shard_is_taken_over(fleet: LocalFleet) -> None:
    async with fleet.client() as client:
        turn = Turn(fleet, "owner", client)
        await turn.moving.wait()
        shard = shard_of("chain", "owner", fleet.plan.shards)
        owner = next(c.controld for c in await client.controlds() if shard in c.shards)
        fleet.kill_controld(owner)
        following = Turn(fleet, "owner", client)
        await turn.end()
        await following.end()
        await fleet.controlds[owner].stop()
        await fleet.start_controld(owner)


async def test_a_frozen_node_that_wakes_up_late_changes_nothing(fleet: LocalFleet) -> None:
    """Rules 1 and 9: the requeue fences the frozen attempt, whoever writes last."""
    async with fleet.client() as client:
        turn = Turn(fleet, "frozen", client)
        await turn.moving.wait()
        victim = psutil.Process(fleet.nodes[turn.node].pid)
        frozen = [victim, *victim.children(recursive=True)]
        for process in frozen:
            process.suspend()
        finished = await turn.end()
        for process in frozen:
            process.resume()
        assert finished.attempt >= 2
        later = Turn(fleet, "frozen", client)
        await later.end()
        shown = await client.get(finished.task)
    assert shown.output == finished.output
    assert len(shown.steps) == len(finished.steps)


async def test_a_nats_restart_loses_nothing(fleet: LocalFleet) -> None:
    async with fleet.client() as client:
        turns = [Turn(fleet, f"nats{i}", client) for i in range(3)]
        for turn in turns:
            await turn.moving.wait()
        await fleet.restart_nats()
        for turn in turns:
            await turn.end()


async def test_tasks_flow_while_etcd_is_frozen(fleet: LocalFleet) -> None:
    """Shorter than a lease: ownership stands, and nothing on a task's way needs etcd."""
    async with fleet.client() as client:
        etcd = fleet.servers["etcd"].pid
        os.kill(etcd, signal.SIGSTOP)
        try:
            turn = Turn(fleet, "etcd", client)
            await turn.moving.wait()
        finally:
            os.kill(etcd, signal.SIGCONT)
        await turn.end()
