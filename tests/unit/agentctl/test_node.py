"""agentctl node: one node shown, and agentd asked for a capture."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from agentctl.main import main
from agentctl.verbs import node
from corefleet.errors import ConfigError, LaunchFailed
from corefleet.rpc import fleet_pb2

WRITTEN = {
    "file": "m.tar.gz",
    "expected": "m.expected.json",
    "files": 7,
    "bytes": 123,
    "left_out": ["proc/stat: too large"],
}


def program(source: str) -> tuple[str, ...]:
    """Return a command that stands for agentd."""
    return (sys.executable, "-c", source)


class Nodes:
    """A client that knows these nodes."""

    def __init__(self, *nodes: fleet_pb2.Node) -> None:
        self._nodes = nodes

    async def __aenter__(self) -> Nodes:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def nodes(self) -> Sequence[fleet_pb2.Node]:
        return self._nodes


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet of one node with two domains."""
    slots = [fleet_pb2.Slots(pool="support", total=4, used=1)]
    one = fleet_pb2.Node(
        node="n1", rack="r1", state="ready", epoch=3, arch="x86_64", version="0.1", beat_age_ms=40,
        domains=[
            fleet_pb2.Domain(domain=0, cpus="0-3", memory_bytes=4 << 30, slots=slots),
            fleet_pb2.Domain(domain=8, cpus="4-7", memory_bytes=2 << 30),
        ],
        warnings=["no cgroup v2: memory is not limited"],
        isolation=["memory bandwidth: batch is limited by cpu.max, sensed by canary"],
    )  # fmt: skip
    monkeypatch.setattr(node, "connect", lambda addresses: Nodes(one))


@pytest.mark.usefixtures("fleet")
def test_a_node_is_shown_with_its_domains_slots_and_warnings() -> None:
    ran = CliRunner().invoke(main, ["node", "show", "n1"])
    assert ran.exit_code == 0, ran.output
    lines = ran.stdout.splitlines()
    assert lines[0] == "n1 in r1: ready, epoch 3, x86_64, corefleet 0.1"
    assert lines[1] == "last heartbeat 40 ms ago; 0 running, 0 queued"
    assert "isolation: memory bandwidth: batch is limited by cpu.max, sensed by canary" in lines
    words = [line.split() for line in lines]
    assert ["0", "0-3", "4.0", "GiB", "support", "4", "1"] in words
    assert ["8", "4-7", "2.0", "GiB", "-", "0", "0"] in words
    assert lines[-1] == "warning: no cgroup v2: memory is not limited"


@pytest.mark.usefixtures("fleet")
def test_a_node_is_one_json_document() -> None:
    ran = CliRunner().invoke(main, ["node", "show", "n1", "--json"])
    shown = json.loads(ran.stdout)
    assert shown["node"] == "n1"
    assert [domain["domain"] for domain in shown["domains"]] == [0, 8]


@pytest.mark.usefixtures("fleet")
def test_a_node_that_is_not_there_is_wrong_input_and_the_known_ones_are_named() -> None:
    ran = CliRunner().invoke(main, ["node", "show", "n2"])
    assert ran.exit_code == 2
    assert "node 'n2' never registered; known are: n1" in ran.stderr


@pytest.mark.parametrize("as_json", [False, True])
def test_a_capture_prints_its_file_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, as_json: bool
) -> None:
    asked: list[Sequence[str]] = []

    async def answer(arguments: Sequence[str]) -> dict[str, Any]:
        asked.append(arguments)
        return WRITTEN

    monkeypatch.setattr(node, "ask_agentd", answer)
    given = ["node", "capture", "-o", "m.tar.gz", "--root", str(tmp_path)]
    ran = CliRunner().invoke(main, [*given, *(["--json"] if as_json else [])])
    assert ran.exit_code == 0, ran.output
    assert asked == [
        ["capture", "--json", "--output", "m.tar.gz", "--root", str(tmp_path)],
    ]
    if as_json:
        assert json.loads(ran.stdout) == {"file": "m.tar.gz", "files": 7, "bytes": 123}
    else:
        assert ran.stdout == "m.tar.gz\n"
        assert "correct m.expected.json where it is wrong" in ran.stderr
    assert "left out: proc/stat: too large" in ran.stderr


async def test_the_answer_of_agentd_is_its_json_object() -> None:
    source = "import sys, json; print(json.dumps({'arguments': sys.argv[1:]}))"
    answer = await node.ask_agentd(["capture", "--json"], program(source))
    assert answer == {"arguments": ["capture", "--json"]}


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("import sys; sys.exit('agentd: no')", LaunchFailed, "agentd: no"),
        (
            "import sys; sys.stderr.write('agentd: --output: bad'); sys.exit(2)",
            ConfigError,
            "agentd: --output: bad",
        ),
        ("import sys; sys.exit(7)", LaunchFailed, "ended with 7"),
        ("print('hello')", LaunchFailed, "instead of a JSON object"),
        ("print('[1]')", LaunchFailed, "instead of a JSON object"),
    ],
)
async def test_what_agentd_says_of_its_failure_is_passed_on(
    source: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await node.ask_agentd([], program(source))


async def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(LaunchFailed, match="/no/such/program"):
        await node.ask_agentd([], ("/no/such/program",))


async def test_agentd_ends_with_an_interrupted_agentctl(tmp_path: Path) -> None:
    started = tmp_path / "started"
    os.mkfifo(started)
    source = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(99)"
    asking = asyncio.create_task(node.ask_agentd([], program(source)))
    pid = int(await asyncio.to_thread(started.read_text))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert not psutil.pid_exists(pid)
