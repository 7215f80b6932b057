"""Pressure stall information, steal, and pages given to other nodes' processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentd.bandwidth.numastat import RemoteShare
from agentd.bandwidth.pressure import Steal, pressure_of
from tests.unit.agentd.machines import write_tree

PSI = "some avg10=12.50 avg60=1.00 avg300=0.00 total=9\nfull avg10=3.00 avg60=0 avg300=0 total=1\n"


def test_pressure_is_some_of_ten_seconds_as_a_share(tmp_path: Path) -> None:
    host = write_tree(tmp_path, {"proc/pressure/memory": PSI, "proc/pressure/cpu": "nonsense"})
    assert pressure_of(host, "memory") == 0.125
    assert pressure_of(host, "cpu") is None


def test_a_kernel_without_pressure_says_none(tmp_path: Path) -> None:
    assert pressure_of(write_tree(tmp_path, {}), "memory") is None


def test_steal_is_a_share_of_all_time_between_two_samples(tmp_path: Path) -> None:
    host = write_tree(tmp_path, {"proc/stat": "cpu  100 0 0 100 0 0 0 50 7 7\ncpu0 1 1\n"})
    steal = Steal(host)
    write_tree(tmp_path, {"proc/stat": "cpu  130 0 10 140 0 0 0 70 9 9\n"})
    assert steal.sample() == pytest.approx(0.2)
    assert steal.sample() == 0.0


@pytest.mark.parametrize("text", [None, "", "cpu  1 2 3\n", "intr 1 2 3 4 5 6 7 8 9\n"])
def test_a_kernel_that_tells_no_steal_has_none(tmp_path: Path, text: str | None) -> None:
    steal = Steal(write_tree(tmp_path, {} if text is None else {"proc/stat": text}))
    assert steal.sample() == 0.0


def numastat(local: int, other: int) -> str:
    return (
        f"numa_hit {local}\nnuma_miss 0\nnuma_foreign 0\ninterleave_hit 5\n"
        f"local_node {local}\nother_node {other}\n"
    )


def node_file(node: int) -> str:
    return f"sys/devices/system/node/node{node}/numastat"


def test_the_remote_share_is_of_new_pages_by_node(tmp_path: Path) -> None:
    host = write_tree(tmp_path, {node_file(0): numastat(100, 1000), node_file(1): numastat(10, 10)})
    remote = RemoteShare(host, (0, 1, 2))
    write_tree(tmp_path, {node_file(0): numastat(175, 1025)})
    assert remote.sample() == {0: 0.25}
    assert remote.sample() == {}


def test_a_node_whose_counters_go_back_or_away_says_nothing(tmp_path: Path) -> None:
    host = write_tree(tmp_path, {node_file(0): numastat(100, 100)})
    remote = RemoteShare(host, (0,))
    write_tree(tmp_path, {node_file(0): numastat(1, 1)})
    assert remote.sample() == {}
    write_tree(tmp_path, {node_file(0): "local_node x\nother_node 3\n"})
    assert remote.sample() == {}
    write_tree(tmp_path, {node_file(0): numastat(5, 5)})
    assert remote.sample() == {}
    write_tree(tmp_path, {node_file(0): numastat(5, 9)})
    assert remote.sample() == {0: 1.0}
