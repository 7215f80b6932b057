"""Memory controllers' counters: which are counted, and whose traffic it is.

The trees are written by hand after the drivers that uncore.py names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from agentd.bandwidth.events import DEVICES
from agentd.bandwidth.sensor import Load
from agentd.bandwidth.uncore import UncoreSensor, find_parts
from corefleet.errors import Unavailable
from tests.unit.agentd.bandwidth.fake_counters import SECOND_NS, FakeCounters
from tests.unit.agentd.machines import write_tree

IMC_FORMAT = {"event": "config:0-7", "umask": "config:8-15"}
IMC_EVENTS = {
    "cas_count_read": "event=0x04,umask=0x03",
    "cas_count_read.scale": "6.103515625e-5",
    "cas_count_read.unit": "MiB",
    "cas_count_write": "event=0x04,umask=0x0c",
    "cas_count_write.scale": "6.103515625e-5",
    "cas_count_write.unit": "MiB",
    "clockticks": "event=0xff",
}


def unit(
    name: str,
    kind: int,
    cpumask: str,
    formats: Mapping[str, str],
    events: Mapping[str, str] | None = None,
) -> dict[str, str]:
    base = f"{DEVICES}/{name}"
    return {
        f"{base}/type": f"{kind}\n",
        f"{base}/cpumask": f"{cpumask}\n",
        **{f"{base}/format/{key}": f"{text}\n" for key, text in formats.items()},
        **{f"{base}/events/{key}": f"{text}\n" for key, text in (events or {}).items()},
    }


def nodes(*cpulists: str, packages: Mapping[int, str]) -> dict[str, str]:
    """`packages`: by reading CPU, the CPUs of its socket."""
    return {
        **{
            f"sys/devices/system/node/node{node}/cpulist": f"{cpus}\n"
            for node, cpus in enumerate(cpulists)
        },
        **{
            f"sys/devices/system/cpu/cpu{cpu}/topology/package_cpus_list": f"{cpus}\n"
            for cpu, cpus in packages.items()
        },
    }


def kunpeng() -> dict[str, str]:
    """A Kunpeng 920: a socket of two super clusters, each with its node and controllers."""
    files = nodes("0-31", "32-63", packages={0: "0-63", 32: "0-63"})
    for cluster, cpu in ((3, 0), (1, 32)):
        for channel in range(2):
            files |= unit(
                f"hisi_sccl{cluster}_ddrc{channel}",
                20 + cluster * 2 + channel,
                str(cpu),
                {"event": "config:0-4"},
                {"flux_wr": "config=0x0", "flux_rd": "config=0x1", "act_cmd": "config=0x5"},
            )
        files |= unit(f"hisi_sccl{cluster}_hha2", 40 + cluster, str(cpu), {"event": "config:0-7"})
    return files


def sensor(
    tmp_path: Path, files: dict[str, str], *domains: int
) -> tuple[UncoreSensor, FakeCounters]:
    counters = FakeCounters()
    return UncoreSensor(write_tree(tmp_path, files), domains, counters), counters


def test_kunpeng_counts_32_bytes_and_each_cluster_is_its_own_node(tmp_path: Path) -> None:
    found, counters = sensor(tmp_path, kunpeng(), 0, 1)
    assert found.available() is None
    assert len(counters.opened) == 8
    configs = {event.name: event.config for event, _, _ in counters.opened.values()}
    assert configs["hisi_sccl3_ddrc0/flux_rd"] == 1
    assert configs["hisi_sccl3_ddrc0/flux_wr"] == 0
    assert found.sample(10.0) == {}
    for channel in range(2):
        counters.count(f"hisi_sccl3_ddrc{channel}/flux_rd", 1000)
        counters.count(f"hisi_sccl1_ddrc{channel}/flux_wr", 1)
    loads = found.sample(12.0)
    assert loads == {
        0: Load(bytes_per_s=2 * 1000 * 32 / 2.0),
        1: Load(bytes_per_s=2 * 1 * 32 / 2.0),
    }
    found.close()
    assert counters.opened == {}


def test_sub_numa_clusters_share_what_their_socket_moves(tmp_path: Path) -> None:
    files = nodes("0-3", "4-7", "8-11", "12-15", packages={0: "0-7", 8: "8-15"})
    for channel in range(2):
        files |= unit(f"uncore_imc_{channel}", 20 + channel, "0,8", IMC_FORMAT, IMC_EVENTS)
    found, counters = sensor(tmp_path, files, 0, 1, 2, 3)
    assert found.available() is None
    events = {event.name: event for event, _, _ in counters.opened.values()}
    assert events["uncore_imc_1/cas_count_write"].config == 0x0C04
    assert events["uncore_imc_1/cas_count_write"].kind == 21
    found.sample(0.0)
    counters.count("uncore_imc_0/cas_count_read", 100, cpu=0)
    counters.count("uncore_imc_1/cas_count_write", 50, cpu=8)
    loads = found.sample(1.0)
    assert [loads[node].bytes_per_s for node in range(4)] == [3200.0, 3200.0, 1600.0, 1600.0]
    found.close()


def test_a_node_with_a_reading_cpu_of_its_own_shares_nothing(tmp_path: Path) -> None:
    files = nodes("0-3", "4-7", packages={0: "0-7", 4: "0-7"})
    files |= unit("uncore_imc_0", 20, "0,4", IMC_FORMAT, IMC_EVENTS)
    found, counters = sensor(tmp_path, files, 0, 1)
    assert found.available() is None
    found.sample(0.0)
    counters.count("uncore_imc_0/cas_count_read", 10, cpu=4)
    assert [load.bytes_per_s for _, load in sorted(found.sample(1.0).items())] == [0.0, 640.0]
    found.close()


def test_a_client_uses_the_free_running_counters_and_nothing_twice(tmp_path: Path) -> None:
    files = unit("uncore_imc_0", 20, "0", IMC_FORMAT, {"clockticks": "event=0x01"})
    scaled = {"data_read": "event=0xff,umask=0x20", "data_write": "event=0xff,umask=0x30"}
    for name in ("data_read", "data_write"):
        scaled |= {f"{name}.scale": "6.103515625e-5", f"{name}.unit": "MiB"}
    scaled["data_total"] = "event=0xff,umask=0x10"
    for number in range(2):
        files |= unit(f"uncore_imc_free_running_{number}", 30 + number, "0", IMC_FORMAT, scaled)
    found, counters = sensor(tmp_path, files, 0)
    assert found.available() is None
    assert sorted(event.name for event, _, _ in counters.opened.values()) == [
        "uncore_imc_free_running_0/data_read",
        "uncore_imc_free_running_0/data_write",
        "uncore_imc_free_running_1/data_read",
        "uncore_imc_free_running_1/data_write",
    ]
    found.close()


def test_counted_commands_come_before_free_running_counters(tmp_path: Path) -> None:
    files = unit("uncore_imc_0", 20, "0", IMC_FORMAT, IMC_EVENTS)
    files |= unit(
        "uncore_imc_free_running_0", 30, "0", IMC_FORMAT, {"read": "event=0xff", "write": "event=1"}
    )
    parts = find_parts(write_tree(tmp_path, files))
    assert [part.event.name for part in parts] == [
        "uncore_imc_0/cas_count_read",
        "uncore_imc_0/cas_count_write",
    ]


def test_amd_controllers_are_counted_without_names_in_the_kernel(tmp_path: Path) -> None:
    files = nodes("0-3", "4-7", packages={0: "0-3", 4: "4-7"})
    formats = {"event": "config:0-7", "rdwrmask": "config:8-9"}
    files |= unit("amd_umc_0", 31, "0", formats) | unit("amd_umc_12", 43, "4", formats)
    parts = find_parts(write_tree(tmp_path, files))
    assert [(part.event.kind, part.event.config, part.nodes) for part in parts] == [
        (31, 0x10A, (0,)),
        (31, 0x20A, (0,)),
        (43, 0x10A, (1,)),
        (43, 0x20A, (1,)),
    ]
    assert {part.count_bytes for part in parts} == {64.0}


@pytest.mark.parametrize(
    ("family", "model", "known"), [(23, 49, True), (25, 1, True), (25, 17, False), (26, 2, False)]
)
def test_the_data_fabric_is_counted_on_known_generations_alone(
    tmp_path: Path, family: int, model: int, known: bool
) -> None:
    formats = {"event": "config:0-7,32-35,59-60", "umask": "config:8-15"}
    host = write_tree(
        tmp_path,
        unit("amd_df", 11, "0", formats)
        | {"proc/cpuinfo": f"processor\t: 0\ncpu family\t: {family}\nmodel\t\t: {model}\n"},
    )
    if not known:
        with pytest.raises(Unavailable, match="generation"):
            find_parts(host)
        return
    configs = [part.event.config for part in find_parts(host)]
    assert len(configs) == 8
    assert configs[0] == 0x3807
    assert configs[7] == 0x38C7 | 1 << 32


def test_counters_that_share_their_place_are_scaled(tmp_path: Path) -> None:
    found, counters = sensor(tmp_path, unit("uncore_imc_0", 20, "0", IMC_FORMAT, IMC_EVENTS), 0)
    assert found.available() is None
    found.sample(0.0)
    counters.count("uncore_imc_0/cas_count_read", 10, running_ns=SECOND_NS // 4)
    counters.count("uncore_imc_0/cas_count_write", 10)
    assert found.sample(1.0)[0].bytes_per_s == (40 + 10) * 64
    counters.count("uncore_imc_0/cas_count_read", 0, running_ns=0)
    assert found.sample(2.0) == {}
    found.close()


def test_one_refused_counter_refuses_all_and_leaves_none_open(tmp_path: Path) -> None:
    found, counters = sensor(tmp_path, kunpeng(), 0, 1)
    counters.refuse = ("sccl1_ddrc1/flux_wr",)
    assert "hisi_sccl1_ddrc1/flux_wr on CPU 32: EACCES" in (found.available() or "")
    assert counters.opened == {}


def test_a_domain_without_counters_refuses_all(tmp_path: Path) -> None:
    found, counters = sensor(tmp_path, kunpeng(), 0, 5)
    assert "domain 5" in (found.available() or "")
    assert counters.opened == {}


def test_controllers_of_other_domains_are_not_opened(tmp_path: Path) -> None:
    found, counters = sensor(tmp_path, kunpeng(), 1)
    assert found.available() is None
    assert {cpu for _, cpu, _ in counters.opened.values()} == {32}
    found.close()


def test_a_counter_that_goes_away_is_told(tmp_path: Path) -> None:
    found, counters = sensor(tmp_path, kunpeng(), 0)
    assert found.available() is None
    counters.gone = True
    with pytest.raises(Unavailable, match="gone"):
        found.sample(0.0)
    found.close()
    assert counters.opened == {}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "the kernel has no sys/bus/event_source/devices"),
        (unit("software", 1, "", {}), "no memory controller's counters are listed"),
        (unit("uncore_imc_0", 20, "", {}), "uncore_imc_0: its type, cpumask or format"),
        (unit("uncore_imc_0", 20, "0", {}, {"clockticks": "event=1"}), "no event of memory"),
        (unit("amd_umc_0", 20, "0", {"event": "config:0-7"}), "terms among event"),
    ],
)
def test_a_machine_that_cannot_count_says_why(
    tmp_path: Path, files: dict[str, str], expected: str
) -> None:
    found, counters = sensor(tmp_path, files, 0)
    assert expected in (found.available() or "")
    assert counters.opened == {}
