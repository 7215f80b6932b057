"""Discovery on small machines: what is there is found, what is absent or mad is survived."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentd.core.topology import Overrides
from agentd.discovery_json import as_report
from agentd.drawing import as_text
from agentd.hostfs import HostFs
from agentd.probes import discover
from tests.unit.agentd.machines import found, two_sockets


def test_two_sockets(tmp_path: Path) -> None:
    topology = found(tmp_path, two_sockets())
    assert topology.numa
    assert topology.arch == "x86_64"
    assert topology.domains[0].cpus == (0, 1, 2, 3, 8, 9, 10, 11)
    assert topology.domains[1].cpus == (4, 5, 6, 7, 12, 13, 14, 15)
    assert topology.domains[0].memory_bytes == 1024 * 1024
    assert topology.domains[1].memory_bytes == 2 * 1024 * 1024
    assert dict(topology.domains[1].distances) == {0: 21, 1: 10}
    assert topology.cores((0, 1, 8)) == ((0, 8), (1,))
    assert topology.warnings == ()


def test_features_are_those_that_all_cpus_have_and_the_level(tmp_path: Path) -> None:
    topology = found(tmp_path, two_sockets())
    assert "x86-64-v2" in topology.features
    assert "avx512f" not in topology.features


def test_a_machine_without_nodes_is_one_domain(tmp_path: Path) -> None:
    files = {k: v for k, v in two_sockets().items() if "/node/" not in k}
    topology = found(tmp_path, files)
    assert not topology.numa
    assert list(topology.domains) == [0]
    assert topology.domains[0].cpus == tuple(range(16))
    assert topology.domains[0].memory_bytes == 3072 * 1024


def test_an_empty_tree_is_a_machine_of_one_cpu(tmp_path: Path) -> None:
    topology = found(tmp_path, {})
    assert topology.domains[0].cpus == (0,)
    assert topology.arch == ""


def test_only_cpuinfo_tells_of_cpus(tmp_path: Path) -> None:
    topology = found(tmp_path, {"proc/cpuinfo": "processor : 0\n\nprocessor : 1\n"})
    assert topology.domains[0].cpus == (0, 1)


def test_distances_are_by_node_id_not_by_position(tmp_path: Path) -> None:
    files = {
        "sys/devices/system/cpu/online": "0-1",
        "sys/devices/system/node/online": "0,8",
        "sys/devices/system/node/node0/cpulist": "0",
        "sys/devices/system/node/node8/cpulist": "1",
        "sys/devices/system/node/node0/distance": "10 40",
        "sys/devices/system/node/node8/distance": "40 10",
    }
    topology = found(tmp_path, files)
    assert dict(topology.domains[8].distances) == {0: 40, 8: 10}


def test_a_node_without_cpus_is_no_domain(tmp_path: Path) -> None:
    files = {**two_sockets(), "sys/devices/system/node/node2/cpulist": "\n"}
    files["sys/devices/system/node/online"] = "0-2"
    topology = found(tmp_path, files)
    assert sorted(topology.domains) == [0, 1]
    assert any("distance" in line for line in topology.warnings)


def test_offline_cpus_are_left_out(tmp_path: Path) -> None:
    files = {**two_sockets(), "sys/devices/system/cpu/online": "0-6,8-15"}
    topology = found(tmp_path, files)
    assert 7 not in topology.domains[1].cpus
    assert topology.possible == tuple(range(16))


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"proc/self/status": "Name:\tx\nCpus_allowed_list:\t0-1,8-9\n"}, (0, 1, 8, 9)),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpuset.cpus.effective": "1-2\n",
            },
            (1, 2),
        ),
        (
            {
                "proc/self/cgroup": "4:cpuset:/job\n0::/\n",
                "sys/fs/cgroup/cpuset/job/cpuset.cpus": "2-3\n",
            },
            (2, 3),
        ),
        (
            {
                "proc/self/cgroup": "0::/host/path/that/is/not/here\n",
                "sys/fs/cgroup/cpuset.cpus.effective": "3\n",
            },
            (3,),
        ),
    ],
)
def test_our_own_limits_hold(tmp_path: Path, files: dict[str, str], left: tuple[int, ...]) -> None:
    topology = found(tmp_path, {**two_sockets(), **files})
    assert topology.domains[0].cpus == left
    assert list(topology.domains) == [0]


def test_memory_that_our_cpuset_forbids_is_no_domain(tmp_path: Path) -> None:
    files = {**two_sockets(), "proc/self/status": "Mems_allowed_list:\t1\n"}
    topology = found(tmp_path, files)
    assert list(topology.domains) == [1]
    assert any("does not allow its memory" in line for line in topology.warnings)


def test_overrides_have_the_last_word(tmp_path: Path) -> None:
    topology = found(tmp_path, two_sockets(), Overrides(cpus=(4, 5, 0), domains=(1,)))
    assert list(topology.domains) == [1]
    assert topology.domains[1].cpus == (4, 5)


def test_overrides_that_name_nothing_are_reported(tmp_path: Path) -> None:
    topology = found(tmp_path, two_sockets(), Overrides(cpus=(99,), domains=(7,)))
    assert not topology.domains
    assert any(line.startswith("domain 7:") for line in topology.warnings)
    assert any("`cpus`" in line for line in topology.warnings)


def test_nonsense_is_reported_and_survived(tmp_path: Path) -> None:
    files = {
        **two_sockets(),
        "sys/devices/system/node/node1/cpulist": "0-15\n",
        "sys/devices/system/node/node0/distance": "what\n",
        "sys/devices/system/cpu/cpu2/topology/thread_siblings_list": "2,5\n",
        "sys/devices/system/node/node0/meminfo": "MemTotal: none\n",
        "sys/devices/system/cpu/possible": "zero\n",
    }
    topology = found(tmp_path, files)
    cpus = [cpu for domain in topology.domains.values() for cpu in domain.cpus]
    assert sorted(cpus) == list(range(16))
    assert topology.siblings[2] == (2,)
    assert topology.siblings[10] == (10,)
    assert topology.siblings[3] == (3, 11)
    assert len(topology.warnings) == 4


def test_a_node_may_be_known_by_its_mask_only(tmp_path: Path) -> None:
    files = {
        "sys/devices/system/cpu/online": "0-33",
        "sys/devices/system/node/node0/cpumap": "00000003,0000000f\n",
        "sys/devices/system/node/node1/cpumap": "00000000,fffffff0\n",
    }
    topology = found(tmp_path, files)
    assert topology.domains[0].cpus == (0, 1, 2, 3, 32, 33)


def test_the_running_machine_is_found() -> None:
    topology = discover(HostFs(), Overrides())
    assert topology.domains
    assert topology.arch


def test_the_report_names_what_was_found(tmp_path: Path) -> None:
    topology = found(tmp_path, two_sockets())
    text = as_text(topology)
    assert "1 │ 21 10" in text
    domains = as_report(topology)["domains"]
    assert isinstance(domains, dict)
    assert domains["0"]["memory_bytes"] == 1048576
