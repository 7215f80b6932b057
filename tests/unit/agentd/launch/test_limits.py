"""Control group files against specs, as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from agentd.hostfs import HostFs
from agentd.launch.limits import OomKills, at_high, group_of, wrong_limits, wrong_quota
from agentd.launch.protocol import LaunchSpec
from tests.unit.agentd.machines import write_tree

GROUP = "a.slice/u.service"
SPEC = LaunchSpec(name="it", command=("x",), cpus=(2, 3), domain=1, memory_max=10_000_000)
RIGHT = {
    "cpuset.cpus.effective": "2-3\n",
    "cpuset.mems.effective": "1\n",
    "memory.high": "max\n",
    # Rounded down to pages.
    "memory.max": "9998336\n",
    "pids.max": "max\n",
}


def tree(root: Path, files: dict[str, str]) -> HostFs:
    return write_tree(root, {f"sys/fs/cgroup/{GROUP}/{n}": text for n, text in files.items()})


def test_what_is_as_asked_is_not_wrong(tmp_path: Path) -> None:
    assert wrong_limits(tree(tmp_path, RIGHT), GROUP, SPEC, memory=True) is None


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("cpuset.cpus.effective", "0-3\n", "'0-3'; expected 2-3"),
        ("cpuset.cpus.effective", "junk\n", "is not valid"),
        ("cpuset.mems.effective", "0-1\n", "'0-1'; expected 1"),
        ("memory.max", "max\n", "'max'; expected 10000000"),
        ("memory.max", "5000000\n", "expected 10000000"),
        ("memory.high", "4096\n", "memory.high is 4096; expected max"),
        ("pids.max", "7\n", "expected max"),
    ],
)
def test_what_is_not_as_asked_is_named(tmp_path: Path, name: str, text: str, says: str) -> None:
    wrong = wrong_limits(tree(tmp_path, RIGHT | {name: text}), GROUP, SPEC, memory=True)
    assert wrong is not None
    assert says in wrong


def test_a_group_that_cannot_be_read_is_wrong(tmp_path: Path) -> None:
    wrong = wrong_limits(HostFs(tmp_path), GROUP, SPEC, memory=True)
    assert wrong is not None
    assert "cannot be read" in wrong


@pytest.mark.parametrize(
    ("text", "cpus", "right"),
    [
        ("max 100000\n", None, True),
        ("50000 100000\n", 0.5, True),
        ("50000 100000\n", None, False),
        ("50000 100000\n", 0.75, False),
        ("max 100000\n", 0.5, False),
        ("1000 10000\n", 0.1, True),
        ("", 0.5, False),
        ("50000\n", 0.5, False),
        ("5 0\n", 0.5, False),
    ],
)
def test_a_quota_is_quota_by_period(
    tmp_path: Path, text: str, cpus: float | None, right: bool
) -> None:
    host = tree(tmp_path, {"cpu.max": text})
    assert (wrong_quota(host, GROUP, cpus) is None) is right


@pytest.mark.parametrize(
    ("text", "high", "reached"),
    [
        ("9437184\n", 9_437_184, True),
        ("9400000\n", 9_437_184, True),
        ("9300000\n", 9_437_184, False),
        ("9437184\n", 0, False),
        ("", 9_437_184, False),
    ],
)
def test_memory_at_its_high_mark_is_throttled(
    tmp_path: Path, text: str, high: int, reached: bool
) -> None:
    spec = msgspec.structs.replace(SPEC, memory_high=high)
    assert at_high(tree(tmp_path, {"memory.current": text}), GROUP, spec) is reached


def test_the_group_of_a_process_is_that_of_version_2(tmp_path: Path) -> None:
    host = write_tree(tmp_path, {"proc/7/cgroup": f"1:cpu:/old\n0::/{GROUP}\n"})
    assert group_of(host, 7) == GROUP
    assert group_of(host, 8) is None


def events(root: Path, kills: int) -> None:
    tree(root, {"memory.events": f"low 0\nhigh 2\noom 9\noom_kill {kills}\n"})


def test_each_kill_for_memory_is_told_of_once(tmp_path: Path) -> None:
    kills = OomKills(HostFs(tmp_path))
    events(tmp_path, 4)
    kills.begin(GROUP)
    assert not kills.take(GROUP)
    events(tmp_path, 6)
    kills.begin(GROUP)
    assert [kills.take(GROUP) for _ in range(3)] == [True, True, False]


def test_kills_of_children_are_forgotten_in_a_while(tmp_path: Path) -> None:
    kills = OomKills(HostFs(tmp_path))
    kills.begin(GROUP)
    kills.settle(GROUP, 0.0)
    events(tmp_path, 1)
    kills.settle(GROUP, 6.0)
    kills.settle(GROUP, 7.0)
    events(tmp_path, 2)
    kills.settle(GROUP, 20.0)
    assert kills.take(GROUP)
    assert not kills.take(GROUP)
    kills.settle(GROUP, 30.0)
    assert not kills.take(GROUP)
