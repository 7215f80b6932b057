"""Traffic by domain from counters that wrap, rates, and words instead of numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd.bandwidth.resctrl_counters import CounterWidth, advance, reading
from agentd.bandwidth.resctrl_monitor import BATCH, GroupUse, ResctrlMonitor, Traffic
from agentd.core.topology import Topology
from agentd.hostfs import HostFs
from tests import resctrl_kernel as kernels
from tests.resctrl_kernel import (
    AMD,
    AMD_NODES,
    CLUSTER_NODES,
    INTEL,
    INTEL_CLUSTERS,
    INTEL_L2,
    MPAM,
    MPAM_NODES,
    TWO_NODES,
    ResctrlKernel,
    recorded_resctrl,
)
from tests.unit.agentd.topologies import recorded

TOTAL = "mbm_total_bytes"
L3_0, L3_1 = "mon_L3_00", "mon_L3_01"


def opened(host: HostFs, topology: Topology = TWO_NODES) -> ResctrlMonitor:
    monitor = ResctrlMonitor.open(host, topology)
    assert isinstance(monitor, ResctrlMonitor), monitor
    return monitor


def test_the_first_sample_of_counters_says_nothing(tmp_path: Path) -> None:
    kernel = ResctrlKernel(tmp_path)
    monitor = opened(kernel)
    kernel.set_monitor("", L3_0, TOTAL, 10**9)

    assert monitor.sample(100.0) is None
    kernel.set_monitor("", L3_0, TOTAL, 3 * 10**9)
    assert monitor.sample(102.0) == {0: Traffic(1e9, None), 1: Traffic(0.0, None)}


def test_the_traffic_of_all_groups_counts_and_batch_is_told_apart(tmp_path: Path) -> None:
    kernel = ResctrlKernel(tmp_path)
    kernel.foreign("others", BATCH)
    monitor = opened(kernel)
    monitor.sample(0.0)

    for number, group in enumerate(("", "others", BATCH), start=1):
        kernel.set_monitor(group, L3_1, TOTAL, number * 1000)
        kernel.set_monitor(group, L3_1, "mbm_local_bytes", number * 100)
        kernel.set_monitor(group, L3_1, "llc_occupancy", number)

    assert monitor.sample(2.0) == {0: Traffic(0.0, 0.0), 1: Traffic(3000.0, 1500.0)}
    assert monitor.uses[1, BATCH] == GroupUse(1500.0, 150.0, 3.0)
    assert monitor.uses[1, ""] == GroupUse(500.0, 50.0, 1.0)


def test_caches_of_a_domain_are_summed_by_their_ids(tmp_path: Path) -> None:
    kernel = ResctrlKernel(tmp_path, AMD)
    monitor = opened(kernel, AMD_NODES)
    monitor.sample(0.0)
    for key in (0, 2, 4, 6):
        kernel.set_monitor("", f"mon_L3_{key:02d}", TOTAL, 100)
    kernel.set_monitor("", "mon_L3_14", TOTAL, 7)

    assert monitor.sample(1.0) == {0: Traffic(400.0, None), 1: Traffic(7.0, None)}


def test_a_cache_above_two_domains_is_read_by_node_where_the_kernel_can(tmp_path: Path) -> None:
    kernel = ResctrlKernel(tmp_path, INTEL_CLUSTERS)
    monitor = opened(kernel, CLUSTER_NODES)
    monitor.sample(0.0)
    kernel.set_monitor("", "mon_L3_00", TOTAL, 400)
    kernel.set_monitor("", "mon_L3_00/mon_sub_L3_00", TOTAL, 300)
    kernel.set_monitor("", "mon_L3_00/mon_sub_L3_01", TOTAL, 100)

    assert monitor.sample(1.0) == {0: Traffic(300.0, None), 1: Traffic(100.0, None)}


def test_a_cache_above_two_domains_is_shared_out_evenly_where_it_cannot(tmp_path: Path) -> None:
    kernel = ResctrlKernel(tmp_path, replace(INTEL_CLUSTERS, meters=("mon_L3_00",)))
    monitor = opened(kernel, CLUSTER_NODES)
    monitor.sample(0.0)
    kernel.set_monitor("", "mon_L3_00", TOTAL, 400)

    assert monitor.sample(1.0) == {0: Traffic(200.0, None), 1: Traffic(200.0, None)}


def test_an_arm_machine_gives_a_rate_at_once(tmp_path: Path) -> None:
    kernel = ResctrlKernel(tmp_path, MPAM)
    kernel.foreign(BATCH)
    monitor = opened(kernel, MPAM_NODES)
    kernel.set_monitor("", "mon_MB_01", TOTAL, 500)
    kernel.set_monitor(BATCH, "mon_MB_01", TOTAL, 200)

    first = monitor.sample(0.0)

    assert first == {0: Traffic(0.0, 0.0), 1: Traffic(700e6, 200e6)}
    assert monitor.sample(5.0) == first


@pytest.mark.parametrize("word", ["Unavailable", "Error", "Unassigned", ""])
def test_a_domain_that_is_not_counted_is_left_out_until_it_is_again(
    word: str, tmp_path: Path
) -> None:
    kernel = ResctrlKernel(tmp_path)
    kernel.foreign("others")
    monitor = opened(kernel)
    monitor.sample(0.0)

    kernel.set_monitor("others", L3_0, TOTAL, word)
    assert monitor.sample(1.0) == {1: Traffic(0.0, None)}
    kernel.set_monitor("others", L3_0, TOTAL, 500)
    assert monitor.sample(2.0) == {1: Traffic(0.0, None)}
    kernel.set_monitor("others", L3_0, TOTAL, 600)
    assert monitor.sample(3.0) == {0: Traffic(100.0, None), 1: Traffic(0.0, None)}


def test_a_new_group_counts_from_its_second_sample(tmp_path: Path) -> None:
    kernel = ResctrlKernel(tmp_path)
    monitor = opened(kernel)
    monitor.sample(0.0)
    kernel.foreign("new")
    kernel.set_monitor("new", L3_0, TOTAL, 5000)

    assert monitor.sample(1.0) == {0: Traffic(0.0, None), 1: Traffic(0.0, None)}
    kernel.set_monitor("new", L3_0, TOTAL, 5100)
    assert monitor.sample(2.0) == {0: Traffic(100.0, None), 1: Traffic(0.0, None)}
    kernel.remove_directory("sys/fs/resctrl/new")
    assert monitor.sample(3.0) == {0: Traffic(0.0, None), 1: Traffic(0.0, None)}


@given(
    width=st.sampled_from([(24, 65536), (24, 98304), (32, 1), (44, 64), (62, 1), (64, 1)]),
    steps=st.lists(st.integers(0, 1 << 20), min_size=2, max_size=8),
    start=st.integers(0, 1 << 22),
)
def test_counters_of_every_width_wrap_without_a_jump(
    width: tuple[int, int], steps: list[int], start: int
) -> None:
    bits, scale = width
    end = (1 << bits) * scale
    value = end - (start + 1) * scale
    seen = CounterWidth()
    # A machine that has run for a while has shown its step.
    seen.learn(scale)
    for step in steps:
        new = (value + step * scale) % end
        seen.learn(value)
        seen.learn(new)
        assert advance(value, new, 1.0, seen.ends()) == step * scale
        value = new


def test_a_counter_that_began_anew_is_no_traffic(tmp_path: Path) -> None:
    kernel = ResctrlKernel(tmp_path)
    monitor = opened(kernel)
    kernel.set_monitor("", L3_0, TOTAL, 1 << 50)
    monitor.sample(0.0)
    kernel.set_monitor("", L3_0, TOTAL, 4096)

    assert monitor.sample(1.0) == {1: Traffic(0.0, None)}
    kernel.set_monitor("", L3_0, TOTAL, 8192)
    assert monitor.sample(2.0) == {0: Traffic(4096.0, None), 1: Traffic(0.0, None)}


def test_impossible_steps_are_no_traffic() -> None:
    ends = CounterWidth().ends()

    assert advance(0, 1 << 50, 1.0, ends) is None
    assert advance(5, 10, 0.0, ends) is None
    assert advance(5, 10, -1.0, ends) is None
    assert advance(5, 10, 0.1, ends) == 5


@pytest.mark.parametrize(
    ("text", "value"),
    [("12\n", 12), ("Unavailable\n", None), (None, None), ("-1\n", None), ("²\n", None)],
)
def test_only_numbers_are_readings(text: str | None, value: int | None) -> None:
    assert reading(text) == value


def test_a_machine_that_changed_under_us_says_nothing(tmp_path: Path) -> None:
    kernel = ResctrlKernel(tmp_path)
    monitor = opened(kernel)
    monitor.sample(0.0)

    kernel.profile = replace(INTEL, meters=("mon_L3_00", "mon_L3_09"))
    assert monitor.sample(1.0) is None
    kernel.profile = INTEL
    assert monitor.sample(2.0) == {0: Traffic(0.0, None), 1: Traffic(0.0, None)}
    kernel.mounted = False
    assert monitor.sample(3.0) == {}


def test_each_reason_for_no_monitoring_is_told(tmp_path: Path) -> None:
    def reason(host: HostFs, topology: Topology = TWO_NODES) -> str:
        result = ResctrlMonitor.open(host, topology)
        assert isinstance(result, str)
        return result

    assert "no resctrl" in reason(HostFs(tmp_path))
    assert "mount -t resctrl" in reason(ResctrlKernel(tmp_path, mounted=False))
    assert f"no {TOTAL}" in reason(ResctrlKernel(tmp_path, INTEL_L2))
    assert f"no {TOTAL}" in reason(
        ResctrlKernel(tmp_path, replace(INTEL, events=("llc_occupancy",)))
    )
    strange = kernels.machine({0: range(4)}, {5: range(4)})
    assert "neither L3 caches" in reason(ResctrlKernel(tmp_path), strange)


def test_recorded_machines_are_monitored(tmp_path: Path) -> None:
    name = "x86-intel-resctrl-set-a"
    if name not in recorded():
        pytest.skip(f"no recorded machine {name}")
    host = recorded_resctrl(recorded()[name], "full", tmp_path)
    topology = kernels.machine({0: range(16)}, {key: (key,) for key in range(4)})
    monitor = opened(host, topology)

    assert monitor.sample(0.0) is None
    second = monitor.sample(1.0)

    assert second is not None
    assert second.keys() <= {0}
