"""The whole on one machine, through the command line: `agentctl up` and the other verbs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentctl.local.processes import free_port

HERE = Path(__file__).resolve().parent
AGENTCTL = (sys.executable, "-m", "agentctl")


@dataclass(frozen=True, slots=True)
class Ran:
    """What one call of agentctl printed, and its exit code."""

    code: int
    out: str
    err: str

    def json(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.out.splitlines()]


@dataclass(frozen=True, slots=True)
class Fleet:
    address: str

    def __call__(self, verb: str, *arguments: str, stdin: bytes = b"") -> Ran:
        done = subprocess.run(
            [*AGENTCTL, verb, *arguments, "--address", self.address],
            input=stdin, capture_output=True, timeout=60, check=False,
        )  # fmt: skip
        ran = Ran(done.returncode, done.stdout.decode(), done.stderr.decode())
        assert "Traceback" not in ran.err
        return ran


@pytest.fixture(scope="module")
def agentctl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), HERE / "pools.toml") as fleet:
        yield fleet


@contextmanager
def running_fleet(directory: Path, pools: Path) -> Iterator[Fleet]:
    """A fleet of a controld and two virtual nodes, ended with SIGTERM."""
    port = free_port()
    command = [
        *AGENTCTL, "up", "--port", str(port), "--controlds", "1",
        "--data", str(directory), "--pools", str(pools),
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as up:
        said = []
        assert up.stderr is not None
        for line in up.stderr:
            said.append(line)
            if line.startswith("ready"):
                break
        else:
            pytest.fail(f"up ended with {up.wait()}:\n{''.join(said)}")
        try:
            yield Fleet(f"127.0.0.1:{port}")
        finally:
            up.terminate()
            said.extend(up.stderr)
            assert up.wait(timeout=30) == 0, "".join(said)


def test_run_prints_the_answer_on_stdout_and_the_steps_on_stderr(agentctl: Fleet) -> None:
    ran = agentctl("run", "counter", "hello")
    assert (ran.code, ran.out) == (0, "hello 0\n")
    assert "placed on n" in ran.err
    assert "done on n" in ran.err


def test_a_session_remembers_and_keeps_its_order(agentctl: Fleet) -> None:
    tasks = [agentctl("submit", "counter", f"t{i}", "--session", "order").out for i in range(4)]
    ends = [agentctl("watch", task.strip(), "--json").json()[-1] for task in tasks]
    assert [end["finished"]["output"] for end in ends] == ["t0 0", "t1 1", "t2 2", "t3 3"]  # type: ignore[index]


def test_the_same_request_id_is_the_same_task(agentctl: Fleet) -> None:
    first = agentctl("submit", "counter", "x", "--request-id", "once")
    again = agentctl("submit", "counter", "x", "--request-id", "once")
    assert first.code == again.code == 0
    assert first.out == again.out
    assert "accepted before" in again.err
    other = agentctl("submit", "counter", "y", "--request-id", "once")
    assert other.code == 2
    assert "once" in other.err


def test_bad_input_is_named_and_nothing_is_accepted(agentctl: Fleet, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 2_000_000)
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    refusals = {
        ("submit", "nopool", "x"): "nopool",
        ("submit", "counter", "x", "--session", "a.b"): "session",
        ("submit", "counter", "--file", str(tmp_path / "large")): "input",
        ("submit", "counter", "--file", str(tmp_path / "latin")): "UTF-8",
        ("submit", "counter", "--file", str(tmp_path / "none")): "--file",
        ("submit", "counter", "x", "--request-id", "a b"): "request_id",
        ("get", "3-00000000000000000000000000"): "3-00000000000000000000000000",
        ("get", "nonsense"): "task",
        ("cancel", "3-00000000000000000000000000"): "3-00000000000000000000000000",
        ("explain", "nonsense"): "task",
    }
    for call, named in refusals.items():
        ran = agentctl(*call)
        assert ran.code == 2, (call, ran)
        assert named in ran.err, (call, ran)
        assert ran.out == ""


def test_a_finished_task_cannot_be_cancelled(agentctl: Fleet) -> None:
    task = agentctl("submit", "counter", "x").out.strip()
    assert agentctl("watch", task).code == 0
    ran = agentctl("cancel", task)
    assert ran.code == 2
    assert "done" in ran.err


def test_a_running_task_is_cancelled(agentctl: Fleet) -> None:
    task = agentctl("submit", "waiter", "x", "--session", "long").out.strip()
    assert any(line["task"] == task for line in agentctl("ls", "--json").json())
    assert agentctl("cancel", task, "--reason", "enough").code == 0
    ran = agentctl("watch", task)
    assert ran.code == 1
    assert "enough" in ran.err
    after = agentctl("get", task, "--json").json()[0]
    assert after["state"] == "cancelled"


def test_an_agents_error_fails_its_task_and_names_it(agentctl: Fleet) -> None:
    ran = agentctl("run", "broken", "the moon")
    assert ran.code == 1
    assert "agent_error" in ran.err
    assert "no such thing: the moon" in ran.err


def test_a_tool_that_the_pool_does_not_list_is_refused(agentctl: Fleet) -> None:
    ran = agentctl("run", "forbidden", "x")
    assert ran.code == 1
    assert "calculator" in ran.err


def test_a_message_to_another_session_becomes_its_task(agentctl: Fleet) -> None:
    task = agentctl("run", "sender", "ping").out.strip()
    ran = agentctl("watch", task)
    assert ran.out.startswith("ping ")


def test_a_task_that_no_node_takes_waits_and_says_why(agentctl: Fleet) -> None:
    task = agentctl("submit", "nowhere", "x").out.strip()
    shown = agentctl("get", task, "--json").json()[0]
    assert shown["state"] == "queued"
    assert agentctl("explain", task).code == 0
    listed = agentctl("ls", "--pool", "nowhere", "--json").json()
    assert "node" in str(listed[0]["reason"])
    assert agentctl("cancel", task).code == 0


def test_what_there_is_can_be_listed(agentctl: Fleet) -> None:
    nodes = agentctl("nodes", "--json").json()
    assert {node["node"] for node in nodes} == {"n1", "n2"}
    assert {node["state"] for node in nodes} == {"ready"}
    assert "counter" in agentctl("pools").out
    controlds = agentctl("controlds", "--json").json()
    assert sum(len(c["shards"]) for c in controlds) == 16  # type: ignore[arg-type,misc]


def test_up_names_a_typo_in_the_pools(tmp_path: Path) -> None:
    pools = tmp_path / "pools.toml"
    pools.write_text('[a]\nagent = "x:Y"\nslot = 3\n')
    done = subprocess.run(
        [*AGENTCTL, "up", "--pools", str(pools), "--data", str(tmp_path / "data")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "`a.slot`: unknown key; did you mean `slots`?" in done.stderr
    assert not (tmp_path / "data").exists()


def test_without_a_fleet_the_exit_code_says_so() -> None:
    ran = Fleet(f"127.0.0.1:{free_port()}")("nodes")
    assert ran.code == 3
