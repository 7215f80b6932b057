"""The network that the other tests stand on does what they think it does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults import lan as lans
from tests.faults.lan import Lan

DELAY_MS = 60
PATIENCE_S = 0.5


@pytest.fixture
def lan() -> Iterator[Lan]:
    if why := lans.missing():
        pytest.skip(why)
    with Lan() as running:
        running.add("a")
        running.add("b")
        yield running


def reach(lan: Lan, source: str, target: str) -> float | None:
    """Return after how many seconds `target` answers (it refuses), None if it does not."""
    code = (
        "import socket, time; t = time.monotonic()\n"
        f"s = socket.socket(); s.settimeout({PATIENCE_S!r})\n"
        f"try: s.connect(({lan.address(target)!r}, 9))\n"
        "except ConnectionRefusedError: print(time.monotonic() - t)\n"
        "except OSError: pass"
    )
    done = subprocess.run(
        [*lan.inside(source), sys.executable, "-c", code],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(done.stdout) if done.stdout else None


def test_a_host_that_is_cut_off_is_reached_by_nobody_until_it_is_mended(lan: Lan) -> None:
    assert reach(lan, "a", "b") is not None
    lan.cut("b")
    assert reach(lan, "a", "b") is None
    lan.mend("b")
    assert reach(lan, "a", "b") is not None


def test_a_cut_one_way_loses_what_is_sent_that_way_only(lan: Lan) -> None:
    lan.add("c")
    lan.cut_one_way("a", "b")
    assert reach(lan, "a", "b") is None
    assert reach(lan, "a", "c") is not None
    lan.mend_one_way("a", "b")
    assert reach(lan, "a", "b") is not None


def test_every_packet_of_a_slow_host_is_late_each_way(lan: Lan) -> None:
    lan.delay("b", DELAY_MS)
    assert reach(lan, "a", "b") is not None  # who has the address is asked once, late too
    late = reach(lan, "a", "b")
    assert late is not None
    assert late >= 2 * DELAY_MS / 1000
    lan.undelay("b")
    prompt = reach(lan, "a", "b")
    assert prompt is not None
    assert prompt < 2 * DELAY_MS / 1000


def test_what_a_dead_run_left_behind_is_removed_by_the_next_one() -> None:
    if why := lans.missing():
        pytest.skip(why)
    code = (
        "import os, subprocess, tests.faults.lan as lans\n"
        "lan = lans.Lan().__enter__(); lan.add('x')\n"
        "left = subprocess.Popen([*lan.inside('x'), 'sleep', '1000'],"
        " **dict.fromkeys(('stdout', 'stderr'), subprocess.DEVNULL))\n"
        "print(lan.namespace('x'), left.pid, flush=True); os._exit(9)"
    )
    dead = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    namespace, pid = dead.stdout.split()
    assert Path(f"/run/netns/{namespace}").exists()
    left = psutil.Process(int(pid))
    with Lan():
        pass
    assert not Path(f"/run/netns/{namespace}").exists()
    psutil.wait_procs([left], timeout=10)
    assert not left.is_running()
