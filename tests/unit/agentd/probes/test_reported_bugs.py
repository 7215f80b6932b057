"""Reports that other programs got about odd machines: each is a small tree and what is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentd.core.topology import Topology
from agentd.discovery_json import as_report
from agentd.probes.readings import read_readings
from tests.unit.agentd.machines import found, two_sockets, write_tree

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"
RESCTRL = "sys/fs/resctrl"


def cores(online: str, groups: list[str], package: str = "0") -> dict[str, str]:
    """A machine of one package whose cores are `groups`."""
    files = {f"{CPU}/online": online, f"{CPU}/possible": online}
    members = [(cpu, group) for group in groups for cpu in group.split(",")]
    for cpu, group in members:
        files[f"{CPU}/cpu{cpu}/topology/thread_siblings_list"] = group
        files[f"{CPU}/cpu{cpu}/topology/core_siblings_list"] = online
        files[f"{CPU}/cpu{cpu}/topology/physical_package_id"] = package
    return files


def offline_cpus_without_topology() -> dict[str, str]:
    """CPUs 0-3 of one core each; 1 and 3 are offline and have no topology directory."""
    files = cores("0,2", ["0", "2"])
    files[f"{CPU}/present"] = files[f"{CPU}/possible"] = "0-3"
    files[f"{CPU}/cpu1/online"] = files[f"{CPU}/cpu3/online"] = "0"
    files[f"{NODE}/node0/cpulist"] = "0-3"
    return files


def nodes(*listed: tuple[int, str]) -> dict[str, str]:
    """Nodes by id and cpulist, all online, CPU numbers up to the highest listed."""
    files = {f"{NODE}/online": ",".join(str(node) for node, _ in listed)}
    for node, cpus in listed:
        files[f"{NODE}/node{node}/cpulist"] = cpus + "\n"
    return files


def usable(topology: Topology) -> set[int]:
    return {cpu for domain in topology.domains.values() for cpu in domain.cpus}


def test_koordinator_216_bandwidth_of_amd_is_absolute(tmp_path: Path) -> None:
    topology = found(
        tmp_path,
        {
            f"{RESCTRL}/info/MB/num_closids": "16",
            f"{RESCTRL}/info/MB/min_bandwidth": "0",
            f"{RESCTRL}/info/MB/bandwidth_gran": "1",
            f"{RESCTRL}/info/MB/delay_linear": "0",
            f"{RESCTRL}/schemata": "    MB:0=2048;1=2048\n",
        },
    )
    assert topology.resctrl is not None
    assert topology.resctrl.controls["MB"].unit == "eighth_GBps"


def test_cadvisor_3317_offline_cpus_belong_to_no_core(tmp_path: Path) -> None:
    topology = found(tmp_path, offline_cpus_without_topology())
    assert topology.all_cores == ((0,), (2,))
    assert topology.sets.offline == (1, 3)
    assert topology.sets.without_topology == (1, 3)


def test_kubernetes_89859_offline_cpus_leave_the_others_counted(tmp_path: Path) -> None:
    topology = found(tmp_path, offline_cpus_without_topology())
    assert len(topology.online) == 2
    assert usable(topology) == {0, 2}


def test_cadvisor_3828_a_node_of_memory_only_is_no_error(tmp_path: Path) -> None:
    files = {
        **cores("0-1", ["0", "1"]),
        **nodes((0, "0-1"), (1, "")),
        f"{NODE}/node1/meminfo": "Node 1 MemTotal: 4096 kB\n",
    }
    topology = found(tmp_path, files)
    assert topology.warnings == ()
    assert topology.nodes[1].kind == "memory only"
    assert list(topology.domains) == [0]


def test_node_exporter_734_an_empty_cpulist_is_an_empty_set(tmp_path: Path) -> None:
    topology = found(tmp_path, {**cores("0", ["0"]), **nodes((0, "0"), (1, ""))})
    assert topology.nodes[1].cpus == ()
    assert topology.nodes[1].listed_by == "cpulist"


@pytest.mark.parametrize("ids", [(0, 2, 3), (0, 8)])
def test_pcp_748_node_ids_have_gaps(tmp_path: Path, ids: tuple[int, ...]) -> None:
    listed = [(node, str(number)) for number, node in enumerate(ids)]
    online = f"0-{len(ids) - 1}"
    files = {**cores(online, [cpus for _, cpus in listed]), **nodes(*listed)}
    for node in ids:
        files[f"{NODE}/node{node}/numastat"] = f"numa_hit {node}\nother_node 1\n"
    topology = found(tmp_path, files)
    assert tuple(topology.domains) == ids
    assert {n: node.statistics["numa_hit"] for n, node in topology.nodes.items()} == {
        node: node for node in ids
    }


def test_numactl_13_distances_go_by_id_up_to_255(tmp_path: Path) -> None:
    ids = (0, 8, 250, 251, 252, 253, 254, 255)
    files = {
        **cores("0-1", ["0", "1"]),
        **nodes((0, "0"), (8, "1"), *((node, "") for node in ids[2:])),
        f"{NODE}/node0/distance": "10 40 80 80 80 80 80 81\n",
    }
    topology = found(tmp_path, files)
    assert topology.nodes[0].distances == dict(
        zip(ids, (10, 40, 80, 80, 80, 80, 80, 81), strict=True)
    )


def test_numactl_245_there_is_no_node_0(tmp_path: Path) -> None:
    files = {
        **cores("0-1", ["0", "1"]),
        **nodes((1, "0-1")),
        f"{NODE}/node1/numastat": "numa_hit 7\n",
    }
    topology = found(tmp_path, files)
    assert topology.domains[1].cpus == (0, 1)
    assert topology.nodes[1].statistics == {"numa_hit": 7}
    assert topology.warnings == ()


def test_numactl_152_every_size_of_huge_page_and_unknown_meminfo(tmp_path: Path) -> None:
    pages = f"{NODE}/node0/hugepages/hugepages"
    files = {
        **cores("0", ["0"]),
        **nodes((0, "0")),
        f"{pages}-2048kB/nr_hugepages": "8",
        f"{pages}-2048kB/free_hugepages": "3",
        f"{pages}-1048576kB/nr_hugepages": "2",
        f"{pages}-1048576kB/free_hugepages": "1",
        f"{NODE}/node0/meminfo": "Node 0 MemTotal: 100 kB\nNode 0 Unheard-of: 5 kB\nToken\n",
    }
    topology = found(tmp_path, files)
    counted = {size: (p.total, p.free) for size, p in topology.nodes[0].huge_pages.items()}
    assert counted == {2048: (8, 3), 1048576: (2, 1)}
    assert topology.nodes[0].memory_bytes == 100 * 1024
    assert topology.warnings == ()


def test_kubernetes_83175_a_possible_node_is_not_there(tmp_path: Path) -> None:
    files = {**cores("0-1", ["0", "1"]), **nodes((0, "0"), (1, "1")), f"{NODE}/possible": "0-3"}
    topology = found(tmp_path, files)
    assert list(topology.nodes) == [0, 1]
    assert topology.warnings == ()


def test_kubernetes_71622_offline_cpus_are_never_handed_out(tmp_path: Path) -> None:
    files = {**two_sockets(), f"{CPU}/online": "0,2,4,6,8,10,12,14"}
    topology = found(tmp_path, files)
    assert usable(topology) == {0, 2, 4, 6, 8, 10, 12, 14}
    assert all(cpu % 2 == 0 for core in topology.siblings.values() for cpu in core)


def test_kubernetes_140495_threads_differ_from_core_to_core(tmp_path: Path) -> None:
    topology = found(tmp_path, cores("0-5", ["0,1", "2,3", "4", "5"]))
    assert topology.all_cores == ((0, 1), (2, 3), (4,), (5,))
    assert as_report(topology)["threads_per_core"] == {"1": 2, "2": 2}


def test_nri_plugins_494_offline_cpus_are_in_no_package(tmp_path: Path) -> None:
    topology = found(tmp_path, offline_cpus_without_topology())
    assert [package.cpus for package in topology.packages] == [(0, 2)]
    assert topology.dies == ()
    assert topology.clusters == ()


def test_katalyst_1241_package_id_minus_one_merges_nothing(tmp_path: Path) -> None:
    files = cores("0-3", ["0", "1", "2", "3"], package="-1")
    for cpu, siblings in enumerate(("0-1", "0-1", "2-3", "2-3")):
        files[f"{CPU}/cpu{cpu}/topology/core_siblings_list"] = siblings
    topology = found(tmp_path, files)
    assert [(p.cpus, p.label) for p in topology.packages] == [((0, 1), "-1"), ((2, 3), "-1")]


def test_zeus_242_a_package_id_is_a_label(tmp_path: Path) -> None:
    files = cores("0-1", ["0", "1"])
    for cpu, label in enumerate(("36", "8442")):
        files[f"{CPU}/cpu{cpu}/topology/core_siblings_list"] = str(cpu)
        files[f"{CPU}/cpu{cpu}/topology/physical_package_id"] = label
    topology = found(tmp_path, files)
    assert [(p.cpus, p.label) for p in topology.packages] == [((0,), "36"), ((1,), "8442")]


def test_scx_3384_there_may_be_24_nodes(tmp_path: Path) -> None:
    files = {
        **cores("0-23", [str(c) for c in range(24)]),
        **nodes(*((n, str(n)) for n in range(24))),
    }
    files |= {f"{NODE}/node{n}/distance": " ".join(["12"] * 24) for n in range(24)}
    topology = found(tmp_path, files)
    assert list(topology.domains) == list(range(24))
    assert len(topology.domains[23].distances) == 24


def test_scx_278_no_node_directory_and_no_cache_is_one_domain(tmp_path: Path) -> None:
    topology = found(tmp_path, cores("0-3", ["0", "1", "2", "3"]))
    assert not topology.numa
    assert topology.domains[0].cpus == (0, 1, 2, 3)
    assert topology.caches == ()


def test_scx_196_a_cache_without_an_id_is_known_by_its_cpus(tmp_path: Path) -> None:
    files = cores("0-1", ["0", "1"])
    for cpu in range(2):
        files[f"{CPU}/cpu{cpu}/cache/index3/level"] = "3"
        files[f"{CPU}/cpu{cpu}/cache/index3/shared_cpu_list"] = "0-1"
        files[f"{CPU}/cpu{cpu}/cache/index3/size"] = "8192K"
    (cache,) = found(tmp_path, files).caches
    assert (cache.cpus, cache.size_kb, cache.cache) == ((0, 1), 8192, None)


def test_lrita_numa_4_a_mask_has_groups_of_32(tmp_path: Path) -> None:
    files = {
        f"{CPU}/online": "0-63",
        f"{NODE}/node0/cpumap": "000f,ff000fff\n",
        f"{NODE}/node1/cpumap": "fffffff0,00fff000\n",
    }
    topology = found(tmp_path, files)
    assert topology.domains[0].cpus == (*range(12), *range(24, 36))
    assert len(topology.domains[1].cpus) == 40
    assert topology.warnings == ()


def test_geopm_208_levels_need_not_multiply_to_the_cpus(tmp_path: Path) -> None:
    topology = found(tmp_path, cores("0,8,16", ["0", "8", "16"]))
    assert topology.all_cores == ((0,), (8,), (16,))
    assert topology.packages[0].cpus == (0, 8, 16)


def test_geopm_2176_no_numa_is_survived(tmp_path: Path) -> None:
    topology = found(tmp_path, {f"{CPU}/online": "0,8,16"})
    assert not topology.numa
    assert topology.domains[0].cpus == (0, 8, 16)


def test_cgroups_rs_156_names_differ_in_version_2(tmp_path: Path) -> None:
    files = {
        **two_sockets(),
        "proc/self/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n",
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/cpuset.cpus.effective": "0-1\n",
        "sys/fs/cgroup/job/cpuset.effective_cpus": "7\n",
        "sys/fs/cgroup/job/cpuset.mems.effective": "0\n",
    }
    topology = found(tmp_path, files)
    assert topology.domains[0].cpus == (0, 1)
    assert topology.cgroups.limits == {
        "cpuset.cpus.effective": "0-1",
        "cpuset.mems.effective": "0",
    }


def test_netdata_7531_pressure_that_cannot_be_read_is_off(tmp_path: Path) -> None:
    # A directory opens and refuses to be read, as the files do with psi off.
    host = write_tree(tmp_path, {"proc/pressure/memory": "some avg10=0.00 total=1\n"})
    (tmp_path / "proc/pressure/cpu").mkdir()
    topology = found(tmp_path, cores("0", ["0"]))
    assert topology.pressure == ("memory",)
    assert topology.warnings == ()
    assert list(read_readings(host).pressure) == ["memory"]


def test_collectd_3764_the_classes_that_others_took_are_seen(tmp_path: Path) -> None:
    files = {
        f"{RESCTRL}/info/L3/num_closids": "4",
        f"{RESCTRL}/info/last_cmd_status": "out of CLOSIDs\n",
        f"{RESCTRL}/schemata": "L3:0=f\n",
        **{f"{RESCTRL}/theirs{n}/schemata": "L3:0=f\n" for n in range(3)},
    }
    host = write_tree(tmp_path, files)
    topology = found(tmp_path, files)
    assert topology.resctrl is not None
    assert topology.resctrl.controls["L3"].closids == 4
    tree = read_readings(host).resctrl
    assert sorted(tree["groups"]) == ["theirs0", "theirs1", "theirs2"]  # type: ignore[call-overload]
    assert tree["info"]["last_cmd_status"] == "out of CLOSIDs"  # type: ignore[index]


def test_runc_3550_control_of_l2_alone_counts(tmp_path: Path) -> None:
    topology = found(
        tmp_path,
        {f"{RESCTRL}/info/L2/num_closids": "4", f"{RESCTRL}/schemata": "L2:0=ff;1=ff\n"},
    )
    assert topology.resctrl is not None
    assert list(topology.resctrl.controls) == ["L2"]
    assert topology.resctrl.controls["L2"].unit == "mask"


def test_goresctrl_89_a_resource_that_is_not_configured_is_no_control(tmp_path: Path) -> None:
    (tmp_path / RESCTRL / "info/MB").mkdir(parents=True)
    topology = found(tmp_path, {f"{RESCTRL}/schemata": ""})
    assert topology.resctrl is not None
    assert topology.resctrl.mounted
    assert topology.resctrl.controls == {}
    assert any("info/MB" in line for line in topology.warnings)


def test_xpu_perf_129_nodes_with_neither_cpus_nor_memory_are_no_domains(tmp_path: Path) -> None:
    files = {**cores("0-1", ["0", "1"]), **nodes((0, "0-1"), *((n, "") for n in range(1, 9)))}
    files[f"{NODE}/node0/meminfo"] = "Node 0 MemTotal: 490303 kB\n"
    files |= {f"{NODE}/node{n}/meminfo": f"Node {n} MemTotal: 0 kB\n" for n in range(1, 9)}
    topology = found(tmp_path, files)
    assert len(topology.nodes) == 9
    assert {node.kind for node in topology.nodes.values()} == {"cpu+memory", "neither"}
    assert list(topology.domains) == [0]
