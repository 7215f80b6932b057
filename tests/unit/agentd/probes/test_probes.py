"""Single probes: isolation, the fleet's own cpuset, kinds of cores, pages, resctrl's units."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentd.core.topology import Overrides
from agentd.probes import discover, refresh
from agentd.probes.allowed import fleet_group
from agentd.probes.resctrl import values_by_domain
from tests.unit.agentd.machines import found, two_sockets, write_tree

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"
RESCTRL = "sys/fs/resctrl"


def test_isolated_cpus_are_used_only_when_asked_for(tmp_path: Path) -> None:
    files = {**two_sockets(), f"{CPU}/isolated": "1,9\n"}
    assert found(tmp_path, files).domains[0].cpus == (0, 2, 3, 8, 10, 11)
    asked = found(tmp_path, files, Overrides(isolated=True))
    assert asked.domains[0].cpus == (0, 1, 2, 3, 8, 9, 10, 11)
    assert asked.sets.isolated == (1, 9)


def test_naming_an_isolated_cpu_is_not_asking_for_it(tmp_path: Path) -> None:
    files = {**two_sockets(), f"{CPU}/isolated": "1,9\n"}
    topology = found(tmp_path, files, Overrides(cpus=(0, 1)))
    assert topology.domains[0].cpus == (0,)
    assert any("CPU 1, which is isolated" in line for line in topology.warnings)


def test_a_machine_whose_every_cpu_is_isolated_is_used_and_says_so(tmp_path: Path) -> None:
    topology = found(tmp_path, {**two_sockets(), f"{CPU}/isolated": "0-15\n"})
    assert sum(len(domain.cpus) for domain in topology.domains.values()) == 16
    assert any("isolated" in line for line in topology.warnings)


@pytest.mark.parametrize("unset", ["(null)\n", "\0\n", "\n"])
def test_an_unset_list_is_empty(tmp_path: Path, unset: str) -> None:
    topology = found(tmp_path, {**two_sockets(), f"{CPU}/nohz_full": unset})
    assert topology.sets.nohz_full == ()
    assert topology.warnings == ()


def test_a_nul_after_a_list_is_no_nonsense(tmp_path: Path) -> None:
    topology = found(tmp_path, {**two_sockets(), f"{NODE}/node0/cpulist": "0-3,8-11\n\0"})
    assert topology.nodes[0].listed_cpus == (0, 1, 2, 3, 8, 9, 10, 11)
    assert topology.warnings == ()


@pytest.mark.parametrize(
    ("own", "systemd", "slice_there", "group"),
    [
        ("/corefleet.slice/agentd.service", True, True, "/"),
        ("/user.slice/u.service/corefleet.slice/x", False, False, "/user.slice/u.service"),
        ("/system.slice/agentd.service", True, False, "/"),
        ("/job", True, True, "/"),
        ("/job", False, False, "/job"),
        ("/user.slice/session-1.scope", True, False, "/user.slice/session-1.scope"),
    ],
)
def test_rule_6_the_fleet_is_bounded_by_the_parent_of_its_slice(
    own: str, systemd: bool, slice_there: bool, group: str
) -> None:
    assert fleet_group(own, systemd, slice_there) == group


def test_rule_6_a_confined_agentd_does_not_confine_the_fleet(tmp_path: Path) -> None:
    files = {
        **two_sockets(),
        "run/systemd/system/x": "",
        "proc/self/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n",
        "proc/self/cgroup": "0::/system.slice/agentd.service\n",
        "proc/self/status": "Cpus_allowed_list:\t0\nMems_allowed_list:\t0\n",
        "sys/fs/cgroup/cpuset.cpus.effective": "0-7\n",
        "sys/fs/cgroup/system.slice/agentd.service/cpuset.cpus.effective": "0\n",
    }
    topology = found(tmp_path, files)
    assert topology.sets.allowed == tuple(range(8))
    assert list(topology.domains) == [0, 1]
    assert topology.cgroups.own == "/system.slice/agentd.service"
    assert topology.systemd


def test_a_group_without_a_cpuset_inherits_the_nearest(tmp_path: Path) -> None:
    files = {
        **two_sockets(),
        "proc/self/mounts": "cgroup2 /odd/place cgroup2 rw 0 0\n",
        "proc/self/cgroup": "0::/a/b\n",
        "odd/place/a/cpuset.cpus.effective": "2-3\n",
        "odd/place/cpuset.cpus.effective": "0-15\n",
    }
    assert found(tmp_path, files).domains[0].cpus == (2, 3)


@pytest.mark.parametrize(
    ("mounts", "version", "hybrid"),
    [
        ("", 0, False),
        ("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n", 2, False),
        ("c /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0\n", 1, False),
        (
            "c /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0\nu /u cgroup2 rw 0 0\n",
            1,
            True,
        ),
    ],
)
def test_versions_of_control_groups(
    tmp_path: Path, mounts: str, version: int, hybrid: bool
) -> None:
    groups = found(tmp_path, {**two_sockets(), "proc/self/mounts": mounts}).cgroups
    assert (groups.version, groups.hybrid) == (version, hybrid)


def test_a_group_is_ours_to_divide_only_if_it_is_writable(tmp_path: Path) -> None:
    files = {
        **two_sockets(),
        "proc/self/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n",
        "proc/self/cgroup": "0::/job\n",
    }
    assert not found(tmp_path, files).cgroups.writable
    files["sys/fs/cgroup/job/cgroup.procs"] = ""
    assert found(tmp_path, files).cgroups.writable
    # Under systemd each group is systemd's unless it is marked as delegated.
    assert not found(tmp_path, {**files, "run/systemd/system/x": ""}).cgroups.writable


def arm(parts: dict[int, str], capacities: dict[int, int]) -> dict[str, str]:
    files = {f"{CPU}/online": f"0-{len(parts) - 1}"}
    blocks = [
        f"processor\t: {cpu}\nFeatures\t: fp asimd asimddp i8mm sve bf16\n"
        f"CPU implementer\t: 0x41\nCPU variant\t: 0x0\nCPU part\t: {part}\nCPU revision\t: 1\n"
        for cpu, part in parts.items()
    ]
    files["proc/cpuinfo"] = "\n".join(blocks)
    files |= {f"{CPU}/cpu{cpu}/cpu_capacity": str(value) for cpu, value in capacities.items()}
    return files


def test_kinds_come_from_the_make_and_not_from_capacity(tmp_path: Path) -> None:
    parts = {0: "0xd87", 1: "0xd85", 2: "0xd85"}
    topology = found(tmp_path, arm(parts, {0: 718, 1: 997, 2: 1024}))
    assert [(k.name, k.cpus, k.capacity) for k in topology.kinds] == [
        ("performance", (1, 2), 1024),
        ("efficiency", (0,), 718),
    ]
    assert topology.arch == "aarch64"
    assert set(topology.features) == {"asimd", "asimddp", "bf16", "fp", "i8mm", "sve"}


def test_one_make_that_clocks_differently_is_one_kind(tmp_path: Path) -> None:
    topology = found(tmp_path, arm({0: "0xd0c", 1: "0xd0c"}, {0: 997, 1: 1024}))
    assert [(kind.name, kind.cpus) for kind in topology.kinds] == [("uniform", (0, 1))]


def test_x86_types_are_named_by_their_event_sources(tmp_path: Path) -> None:
    files = {
        **two_sockets(),
        "sys/devices/cpu_core/cpus": "0-7\n",
        "sys/devices/cpu_atom/cpus": "8-15\n",
    }
    kinds = found(tmp_path, files).kinds
    assert [(kind.name, kind.cpus) for kind in kinds] == [
        ("performance", tuple(range(8))),
        ("efficiency", tuple(range(8, 16))),
    ]


@pytest.mark.parametrize(
    ("files", "size"),
    [
        ({}, 4096),
        ({"proc/self/smaps": "Size: 64 kB\nKernelPageSize:       64 kB\n"}, 65536),
        (
            {
                f"{NODE}/node0/meminfo": "Node 0 MemTotal: 9000 kB\nNode 0 MemFree: 6500 kB\n",
                f"{NODE}/node0/vmstat": "nr_free_pages 100\n",
            },
            65536,
        ),
    ],
)
def test_the_page_size_of_a_recording(tmp_path: Path, files: dict[str, str], size: int) -> None:
    assert found(tmp_path, {**two_sockets(), **files}).page_bytes == size


@pytest.mark.parametrize(
    ("linear", "least", "schemata", "mounts", "unit"),
    [
        ("1", "10", "MB:0=100;1=100", "", "percent"),
        ("1", "10", "MB:0=4294967295", "", "MBps"),
        ("1", "10", "MB:0=5000", "r /sys/fs/resctrl resctrl rw,mba_MBps 0 0\n", "MBps"),
        ("0", "0", "MB:0=2048", "", "eighth_GBps"),
        ("0", "0", "MB:0=16", "", "eighth_GBps"),
        ("0", "10", "MB:0=90", "", "percent"),
    ],
)
def test_the_unit_of_bandwidth(
    tmp_path: Path, linear: str, least: str, schemata: str, mounts: str, unit: str
) -> None:
    files = {
        f"{RESCTRL}/info/MB/num_closids": "8",
        f"{RESCTRL}/info/MB/min_bandwidth": least,
        f"{RESCTRL}/info/MB/bandwidth_gran": "10",
        f"{RESCTRL}/info/MB/delay_linear": linear,
        f"{RESCTRL}/schemata": schemata + "\n",
        "proc/self/mounts": mounts,
    }
    resctrl = found(tmp_path, files).resctrl
    assert resctrl is not None
    control = resctrl.controls["MB"]
    assert (control.unit, control.closids, control.granularity) == (unit, 8, 10)


def test_monitors_of_caches_and_of_memory_are_found(tmp_path: Path) -> None:
    files = {
        f"{RESCTRL}/info/L3_MON/mon_features": "llc_occupancy\n",
        f"{RESCTRL}/info/L3_MON/num_rmids": "128",
        f"{RESCTRL}/info/MB_MON/mon_features": "mbm_total_bytes\n",
        f"{RESCTRL}/info/MB_MON/num_rmids": "64",
    }
    resctrl = found(tmp_path, files).resctrl
    assert resctrl is not None
    assert resctrl.monitors == ("llc_occupancy", "mbm_total_bytes")
    assert resctrl.rmids == 128


def test_resctrl_that_nobody_mounted(tmp_path: Path) -> None:
    (tmp_path / RESCTRL).mkdir(parents=True)
    resctrl = found(tmp_path, two_sockets()).resctrl
    assert resctrl is not None
    assert not resctrl.mounted


def test_schemata_are_read_with_their_padding() -> None:
    text = "    MB:0=  100;1=0000050\n  L3:1=fffffff;122=00003c0\nL3:uninitialized\nnonsense\n"
    assert values_by_domain(text) == {
        "MB": {"0": "100", "1": "0000050"},
        "L3": {"1": "fffffff", "122": "00003c0"},
    }


def test_a_cpu_in_every_node_is_reported_and_used_once(tmp_path: Path) -> None:
    files = two_sockets()
    for node in range(2):
        files[f"{NODE}/node{node}/cpulist"] = "0-15\n"
    topology = found(tmp_path, files)
    assert list(topology.domains) == [0]
    assert len(topology.domains[0].cpus) == 16
    assert any("CPU 0 is also in domain 0" in line for line in topology.warnings)


def test_a_cache_is_known_by_its_level_and_not_by_its_index(tmp_path: Path) -> None:
    files = two_sockets()
    for cpu in range(16):
        base = f"{CPU}/cpu{cpu}/cache"
        files |= {f"{base}/index3/level": "4", f"{base}/index2/level": "3"}
        files |= {f"{base}/index2/shared_cpu_map": "ffff\n", f"{base}/index2/size": "2M\n"}
    (cache,) = found(tmp_path, files).caches
    assert (cache.cpus, cache.size_kb) == (tuple(range(16)), 2048)


def test_a_refresh_sees_memory_and_statistics(tmp_path: Path) -> None:
    pages = f"{NODE}/node1/hugepages/hugepages-2048kB"
    files = {**two_sockets(), f"{pages}/nr_hugepages": "4", f"{pages}/free_hugepages": "4"}
    host = write_tree(tmp_path, files)
    before = discover(host, Overrides())
    changed = {
        f"{pages}/free_hugepages": "1",
        f"{NODE}/node1/meminfo": "Node 1 MemTotal: 4096 kB\nNode 1 MemFree: 7 kB\n",
        f"{NODE}/node1/numastat": "numa_miss 3\n",
        f"{CPU}/cpu0/topology/thread_siblings_list": "not looked at",
    }
    after = refresh(write_tree(tmp_path, changed), before, Overrides())
    assert after.nodes[1].huge_pages[2048].free == 1
    assert after.nodes[1].statistics == {"numa_miss": 3}
    assert after.nodes[1].free_bytes == 7 * 1024
    assert after.domains[1].memory_bytes == 4096 * 1024
    assert after.siblings == before.siblings


@pytest.mark.parametrize(
    "changed",
    [
        {f"{CPU}/online": "0-6,8-15\n"},
        {f"{CPU}/isolated": "7\n"},
        {"proc/self/status": "Cpus_allowed_list:\t0-6\n"},
    ],
)
def test_a_refresh_discovers_anew_when_cpus_came_or_went(
    tmp_path: Path, changed: dict[str, str]
) -> None:
    host = write_tree(tmp_path, {**two_sockets(), "proc/self/status": "Cpus_allowed_list:\t0-15\n"})
    before = discover(host, Overrides())
    after = refresh(write_tree(tmp_path, changed), before, Overrides())
    assert 7 in before.domains[1].cpus
    assert all(7 not in domain.cpus for domain in after.domains.values())
    assert after == discover(host, Overrides())


def test_a_refresh_finds_a_node_that_came(tmp_path: Path) -> None:
    before = discover(write_tree(tmp_path, two_sockets()), Overrides())
    came = write_tree(tmp_path, {f"{NODE}/node9/cpulist": "\n", f"{NODE}/online": "0-1,9\n"})
    assert list(refresh(came, before, Overrides()).nodes) == [0, 1, 9]
