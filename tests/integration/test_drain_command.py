"""`agentctl drain` and `undrain` as processes, against a control plane with scripted nodes."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from corefleet.client import Client
from corefleet.codec import encode
from corefleet.messages.records import PoolSpec
from corefleet.subjects import pool_key
from tests.integration.fake_node import FakeNode, Gate
from tests.unit.controld.plane import Plane


@dataclass(frozen=True, slots=True)
class Bench:
    """A controld, a client of it, and a node that is at work on one task."""

    plane: Plane
    client: Client
    address: str
    gate: Gate
    task: str

    async def start(self, *words: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agentctl", *words, "--address", self.address),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def run(self, *words: str) -> tuple[int | None, str, str]:
        process = await self.start(*words)
        out, err = await asyncio.wait_for(process.communicate(), 30)
        return process.returncode, out.decode(), err.decode()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    plane = Plane()
    await plane.store.put(pool_key("p"), encode(PoolSpec(name="p", agent="some:Agent", slots=64)))
    controld = await plane.controld("c1")
    gate = Gate()
    async with (
        Client(controld.address) as client,
        FakeNode(plane.connect(), "n1", run=gate.run) as node,
    ):
        node.yields = False
        accepted = await client.submit("p", "x", session="s1")
        await asyncio.wait_for(gate.running.wait(), 20)
        yield Bench(plane, client, controld.address, gate, accepted.task)
        gate.through.set()
    await controld.stop()
    await plane.store.close()
    assert plane.failures == []


async def line_with(stream: asyncio.StreamReader | None, text: str) -> str:
    assert stream is not None
    async with asyncio.timeout(30):
        async for raw in stream:
            if text in raw.decode():
                return raw.decode()
    raise AssertionError(f"nothing said of {text!r}")


async def test_ctrl_c_leaves_the_drain_standing_and_says_so(bench: Bench) -> None:
    process = await bench.start("drain", "n1", "--reason", "new memory", "--deadline", "10m")
    line = await line_with(process.stderr, bench.task)
    assert "p/s1, attempt 1" in line
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 130, err
    assert "the drain of n1 stands; `agentctl undrain n1` ends it" in err.decode()
    code, out, err_text = await bench.run("nodes")
    assert code == 0
    assert "draining" in out
    assert "new memory" in err_text
    assert "(deadline 10m after its begin); 1 left" in err_text
    code, _, said = await bench.run("undrain", "n1")
    assert (code, said) == (0, "n1: drained no more\n")
    code, _, said = await bench.run("undrain", "n1")
    assert (code, said) == (0, "n1: was not drained by anybody\n")


async def test_it_waits_until_the_last_task_has_left(bench: Bench) -> None:
    process = await bench.start("drain", "n1", "--json")
    assert process.stdout is not None
    first = json.loads(await asyncio.wait_for(process.stdout.readline(), 30))
    assert (first["drained"], [each["task"] for each in first["left"]]) == (False, [bench.task])
    bench.gate.through.set()
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["drained"]


async def test_no_wait_returns_at_once_and_who_ends_the_drain_ends_the_wait(bench: Bench) -> None:
    code, out, _ = await bench.run("drain", "n1", "--no-wait", "--json")
    assert code == 0
    assert json.loads(out)["node"] == "n1"
    process = await bench.start("drain", "n1")
    await line_with(process.stderr, bench.task)
    await bench.client.undrain_node("n1")
    _, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    assert "ended by somebody else" in err.decode()


async def test_a_node_that_never_was_is_an_error_of_the_input(bench: Bench) -> None:
    for verb in ("drain", "undrain"):
        code, _, err = await bench.run(verb, "n9")
        assert code == 2
        assert "n9: never registered" in err
        assert "stands" not in err
