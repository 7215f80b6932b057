"""A test that leaves something behind fails, and is named."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SAMPLE = """
import asyncio, socket, subprocess, sys, threading
import pytest

stop = threading.Event()
kept = []

def test_leaks_a_thread():
    threading.Thread(target=stop.wait, name="straggler", daemon=True).start()

def test_ends_its_thread():
    stop.set()

def test_leaks_a_process():
    kept.append(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]))

def test_leaks_a_socket_in_a_cycle():
    cycle = [socket.socket()]
    cycle.append(cycle)

async def test_leaks_a_task():
    kept.append(asyncio.create_task(asyncio.Event().wait()))

async def test_ends_its_task():
    task = asyncio.create_task(asyncio.Event().wait())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

@pytest.fixture
async def background():
    task = asyncio.create_task(asyncio.Event().wait())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

async def test_a_fixture_may_run_a_task(background):
    pass

@pytest.fixture(scope="module")
def server():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.communicate()

def test_a_wider_fixture_may_run_a_process(server):
    assert server.poll() is None
"""


def test_every_leak_fails_the_test_that_made_it(tmp_path: Path) -> None:
    sample = tmp_path / "test_sample.py"
    sample.write_text(SAMPLE)
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"),
            *("-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}", "-q", str(sample)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    failed = set(re.findall(r"^ERROR \S*::(\w+)", run.stdout, re.MULTILINE))
    assert failed == {
        "test_leaks_a_thread",
        "test_leaks_a_process",
        "test_leaks_a_socket_in_a_cycle",
        "test_leaks_a_task",
    }, run.stdout
    assert re.search(r"test_leaks_a_thread leaked:\s+thread straggler", run.stdout)
    assert "process " in run.stdout
    assert "unclosed <socket.socket" in run.stdout
    assert "Event.wait" in run.stdout
