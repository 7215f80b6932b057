"""Children of a one-machine fleet: read for readiness, and surely ended."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from agentctl.local.processes import Child
from corefleet.errors import LaunchFailed, Timeout

PARENT = """
import subprocess, sys
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("below", below.pid, flush=True)
below.wait()
"""


async def test_the_line_that_was_waited_for_is_returned_and_logged(tmp_path: Path) -> None:
    log = tmp_path / "log" / "x.log"
    child = await Child.start("x", [sys.executable, "-c", "print('a'); print('ready 7')"], log)
    assert await child.wait_line(lambda line: line.startswith("ready"), 30) == "ready 7"
    assert await child.wait() == 0
    assert log.read_text() == "a\nready 7\n"


async def test_a_child_that_ends_before_it_is_ready_is_told_with_its_output(
    tmp_path: Path,
) -> None:
    child = await Child.start(
        "x", [sys.executable, "-c", "import sys; sys.exit('port in use')"], tmp_path / "log"
    )
    with pytest.raises(LaunchFailed, match="port in use"):
        await child.wait_line(lambda line: "ready" in line, 30)
    await child.stop()


async def test_a_child_that_is_never_ready_times_out_with_its_output(tmp_path: Path) -> None:
    child = await Child.start("x", ["sh", "-c", "echo busy; exec sleep 600"], tmp_path / "log")
    await child.wait_line(lambda line: line == "busy", 30)
    with pytest.raises(Timeout, match="busy"):
        await child.wait_line(lambda line: "ready" in line, 0.05)
    await child.stop()
    assert not child.running


async def test_killing_the_tree_leaves_nothing_below(tmp_path: Path) -> None:
    child = await Child.start("x", [sys.executable, "-c", PARENT], tmp_path / "log")
    line = await child.wait_line(lambda text: text.startswith("below"), 30)
    below = psutil.Process(int(line.split()[1]))
    child.kill_tree()
    await child.stop()
    psutil.wait_procs([below], timeout=10)
    assert not below.is_running()


async def test_a_program_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    child = await Child.start("x", ["/no/such/program"], tmp_path / "log")
    with pytest.raises(LaunchFailed, match="/no/such/program"):
        await child.wait_line(lambda line: "ready" in line, 30)
    await child.stop()
