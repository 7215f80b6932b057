"""The driver against a kernel that refuses, rounds and moves as Linux does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentd.bandwidth.resctrl import MOST_PASSES, Attached, ResctrlDriver
from agentd.bandwidth.resctrl_files import ResctrlFiles, ability, why_not
from agentd.core.schemata import UNLIMITED_MBPS
from agentd.core.topology import Topology
from agentd.hostfs import HostFs
from corefleet.errors import InvalidInput, Unavailable
from tests import resctrl_kernel as kernels
from tests.resctrl_kernel import (
    AMD,
    AMD_NODES,
    CLUSTER_NODES,
    INTEL,
    INTEL_CDP,
    INTEL_CLUSTERS,
    INTEL_L2,
    INTEL_MBPS,
    MPAM,
    MPAM_NODES,
    TWO_NODES,
    Profile,
    ResctrlKernel,
    recorded_resctrl,
)
from tests.unit.agentd.topologies import recorded

CLASSES = ("engine", "online", "batch")
MACHINES: dict[str, tuple[Profile, Topology]] = {
    "intel": (INTEL, TWO_NODES),
    "cdp": (INTEL_CDP, TWO_NODES),
    "mbps": (INTEL_MBPS, TWO_NODES),
    "clusters": (INTEL_CLUSTERS, CLUSTER_NODES),
    "amd": (AMD, AMD_NODES),
    "mpam": (MPAM, MPAM_NODES),
}


def opened(
    host: HostFs, topology: Topology = TWO_NODES, classes: tuple[str, ...] = CLASSES
) -> ResctrlDriver:
    driver = ResctrlDriver.open(host, topology, classes)
    assert isinstance(driver, ResctrlDriver), driver
    return driver


def refused(host: HostFs, topology: Topology = TWO_NODES) -> str:
    reason = ResctrlDriver.open(host, topology, CLASSES)
    assert isinstance(reason, str)
    return reason


@pytest.mark.parametrize("name", MACHINES)
def test_classes_get_groups_without_a_limit(name: str, tmp_path: Path) -> None:
    profile, topology = MACHINES[name]
    kernel = ResctrlKernel(tmp_path, profile)

    assert why_not(kernel, topology) is None
    driver = opened(kernel, topology)

    assert sorted(driver.classes) == sorted(CLASSES)
    assert driver.notes == []
    assert kernel.groups.keys() == {"", *(f"corefleet-{one}" for one in CLASSES)}
    for one in CLASSES:
        assert set(driver.read_back(one).values()) == {driver.control.unlimited}


@pytest.mark.parametrize("name", MACHINES)
@settings(max_examples=30)
@given(
    asked=st.lists(
        st.tuples(
            st.sampled_from(CLASSES), st.sampled_from((0, 1)), st.floats(0.001, 1) | st.none()
        ),
        max_size=12,
    ),
    peaks=st.dictionaries(st.sampled_from((0, 1)), st.floats(1e8, 1e12)),
)
def test_every_share_is_accepted_and_read_back_as_predicted(
    name: str, asked: list[tuple[str, int, float | None]], peaks: dict[int, float]
) -> None:
    profile, topology = MACHINES[name]
    kernel = ResctrlKernel(Path("absent"), profile)
    driver = opened(kernel, topology)
    driver.set_peaks(peaks)

    for service_class, domain, share in asked:
        done = driver.set_share(service_class, domain, share)
        assert not [note for note in done.notes if "is kept as" in note]
        assert done.values
        assert done.values.items() <= driver.read_back(service_class).items()

    assert driver.verify() == []
    for resource, values in kernel.groups[""].values.items():
        default = next(r.default for r in profile.resources if r.name == resource)
        assert set(values.values()) == {default}, "the root group was changed"


def test_a_share_is_written_for_its_domain_alone(tmp_path: Path) -> None:
    kernel = ResctrlKernel(tmp_path)
    driver = opened(kernel)

    assert driver.set_share("batch", 1, 0.25).values == {1: 30}

    assert kernel.writes[-1] == ("corefleet-batch/schemata", "MB:1=30\n")
    assert driver.read_back("batch") == {0: 100, 1: 30}
    assert driver.read_back("online") == {0: 100, 1: 100}


def test_no_percentage_reaches_an_absolute_machine(tmp_path: Path) -> None:
    kernel = ResctrlKernel(tmp_path, AMD)
    driver = opened(kernel, AMD_NODES)

    done = driver.set_share("batch", 0, 0.5)
    assert set(done.values.values()) == {2048}
    assert "peak of domain 0" in done.notes[0]

    driver.set_peaks({0: 200e9})
    assert driver.set_share("batch", 0, 0.5).values == dict.fromkeys((0, 2, 4, 6), 200)
    assert driver.set_share("batch", 0, None).values == dict.fromkeys((0, 2, 4, 6), 2048)


def test_bandwidth_of_an_arm_machine_is_by_node_and_its_cache_is_left_alone(
    tmp_path: Path,
) -> None:
    kernel = ResctrlKernel(tmp_path, MPAM)
    driver = opened(kernel, MPAM_NODES)

    assert driver.set_share("batch", 1, 0.4).values == {1: 40}

    assert kernel.read("sys/fs/resctrl/corefleet-batch/schemata") == (
        "L3:1=fffffff;122=fffffff\nL3PRI:1=0000000;122=0000000\nMB:0=0000100;1=0000040\n"
        "MBPRI:0=0000003;1=0000003\nMBHDL:0=0000001;1=0000001\nMBMIN:0=0000000;1=0000000\n"
    )


def test_hardware_that_keeps_another_value_is_noted_and_not_reported_again(
    tmp_path: Path,
) -> None:
    def coarse(value: int) -> int:
        return value // 3 * 3 if value < 100 else value

    mb = kernels.Resource("MB", "bandwidth", (0, 1), 32, least=1, linear=None, hardware=coarse)
    kernel = ResctrlKernel(tmp_path, Profile((mb,), ("mon_MB_00",), aligned=False))
    driver = opened(kernel, MPAM_NODES)

    done = driver.set_share("batch", 0, 0.5)

    assert done.values == {0: 48}
    assert "MB 0=50 is kept as 48" in done.notes[0]
    assert driver.verify() == []


def test_batch_gets_the_last_closid(tmp_path: Path) -> None:
    kernel = ResctrlKernel(tmp_path)
    kernel.foreign(*(f"other{n}" for n in range(6)))

    driver = opened(kernel)

    assert driver.classes == ("batch",)
    assert len(driver.notes) == 2
    assert "ENOSPC: Out of CLOSIDs (6 groups of others); engine has no limit" in driver.notes[0]
    done = driver.set_share("online", 0, 0.5)
    assert done.values == {}
    assert "no resctrl group" in done.notes[0]
    assert driver.attach("online", lambda: [1]) == Attached(0, 0, settled=True)


def test_no_closid_at_all_is_a_reason(tmp_path: Path) -> None:
    kernel = ResctrlKernel(tmp_path, INTEL)
    kernel.foreign(*(f"other{n}" for n in range(7)))

    assert "Out of CLOSIDs (7 groups of others)" in refused(kernel)
    assert "7 groups of others use all 8" in (why_not(kernel, TWO_NODES) or "")
    assert len(kernel.groups) == 8


def test_groups_of_others_are_never_touched(tmp_path: Path) -> None:
    kernel = ResctrlKernel(tmp_path)
    kernel.foreign("k8s", "corefleetish", "batch")
    kernel.spawn(7)
    kernel.write("sys/fs/resctrl/k8s/tasks", "7\n")
    kernel.write("sys/fs/resctrl/k8s/schemata", "MB:0=20\n")
    kernel.writes.clear()

    driver = opened(kernel)
    driver.set_share("batch", 0, 0.5)
    assert driver.close() == []

    assert kernel.groups.keys() == {"", "k8s", "corefleetish", "batch"}
    assert kernel.group_of[7] == "k8s"
    assert kernel.groups["k8s"].values["MB"] == {0: 20, 1: 100}
    assert {path.split("/")[0] for path, _ in kernel.writes} == {
        f"corefleet-{one}" for one in CLASSES
    }


def test_groups_left_behind_are_adopted_with_their_tasks_and_stale_ones_removed(
    tmp_path: Path,
) -> None:
    kernel = ResctrlKernel(tmp_path)
    kernel.spawn(1, 2)
    first = opened(kernel, classes=("batch", "gone"))
    first.attach("batch", lambda: [1])
    first.attach("gone", lambda: [2])
    first.set_share("batch", 0, 0.1)

    second = opened(kernel)

    assert kernel.group_of == {1: "corefleet-batch", 2: ""}
    assert "corefleet-gone" not in kernel.groups
    assert second.read_back("batch") == {0: 100, 1: 100}
    assert second.members("batch") == {1}


def test_closing_lets_the_tasks_fall_back_to_the_root_group(tmp_path: Path) -> None:
    kernel = ResctrlKernel(tmp_path)
    kernel.spawn(1)
    driver = opened(kernel)
    driver.attach("batch", lambda: [1])

    assert driver.close() == []

    assert kernel.groups.keys() == {""}
    assert kernel.group_of == {1: ""}
    assert driver.close() == []


def test_threads_made_while_others_are_moved_are_moved_too(tmp_path: Path) -> None:
    kernel = ResctrlKernel(tmp_path)
    kernel.spawn(1, 2)
    driver = opened(kernel)

    def passes() -> Iterator[list[int]]:
        yield [1, 2]
        kernel.spawn(3)
        kernel.end(2)
        yield [1, 2, 3]
        while True:
            yield [1, 3]

    listing = passes()

    assert driver.attach("batch", lambda: next(listing)) == Attached(3, 4, settled=True)
    assert kernel.group_of == {1: "corefleet-batch", 3: "corefleet-batch"}
    kernel.spawn(4, parent=1)
    assert driver.members("batch") == {1, 3, 4}
    assert all(text.count("\n") == 1 for path, text in kernel.writes if path.endswith("tasks"))


def test_a_cgroup_that_never_rests_is_left_unsettled(tmp_path: Path) -> None:
    kernel = ResctrlKernel(tmp_path)
    driver = opened(kernel)
    seen: list[int] = []

    def listing() -> list[int]:
        seen.append(100 + len(seen))
        kernel.spawn(seen[-1])
        return list(seen)

    assert driver.attach("batch", listing) == Attached(MOST_PASSES, MOST_PASSES, settled=False)


def test_a_thread_that_ended_is_skipped(tmp_path: Path) -> None:
    kernel = ResctrlKernel(tmp_path)
    kernel.spawn(1)
    driver = opened(kernel)

    assert driver.attach("engine", lambda: [1, 99]) == Attached(1, 2, settled=True)


def test_strays_are_found_and_moved_back(tmp_path: Path) -> None:
    kernel = ResctrlKernel(tmp_path)
    kernel.iommu = ["iommu_group:17"]
    kernel.spawn(1, 2, 3)
    driver = opened(kernel)
    driver.attach("batch", lambda: [1, 2])
    kernel.write("sys/fs/resctrl/tasks", "2\n")

    assert driver.recheck("batch", lambda: [1, 2, 99]) == (2,)
    assert driver.recheck("batch", lambda: [1, 2]) == ()
    assert kernel.group_of[3] == ""


def test_iommu_groups_among_the_tasks_are_no_threads(tmp_path: Path) -> None:
    root = tmp_path / "sys/fs/resctrl/corefleet-batch"
    kernel = ResctrlKernel(tmp_path)
    driver = opened(kernel)
    kernel.spawn(5, 6)
    driver.attach("batch", lambda: [5])
    original = kernel.read

    def with_devices(path: str, most_bytes: int = 1 << 20) -> str | None:
        text = original(path, most_bytes)
        return f"iommu_group:17\n{text}" if path.endswith("batch/tasks") else text

    kernel.read = with_devices  # type: ignore[method-assign]

    assert not root.exists()
    assert driver.members("batch") == {5}


def test_limits_that_others_change_are_reported(tmp_path: Path) -> None:
    kernel = ResctrlKernel(tmp_path)
    driver = opened(kernel)
    driver.set_share("batch", 0, 0.5)
    kernel.write("sys/fs/resctrl/corefleet-batch/schemata", "MB:0=90\n")
    kernel.remove_directory("sys/fs/resctrl/corefleet-online")

    assert driver.verify() == [
        "resctrl: batch: MB 0 is 90, we wrote 50",
        "resctrl: the group corefleet-online is gone",
    ]
    with pytest.raises(Unavailable, match=r"corefleet-online.*ENOENT"):
        driver.set_share("online", 0, 0.5)
    with pytest.raises(Unavailable, match="is gone"):
        driver.recheck("online", lambda: [1])


def test_a_refusal_carries_the_kernels_words_and_leaves_the_old_limit(tmp_path: Path) -> None:
    kernel = ResctrlKernel(tmp_path)
    driver = opened(kernel)
    driver.set_share("batch", 0, 0.5)
    kernel.modes["corefleet-batch"] = "pseudo-locked"

    with pytest.raises(Unavailable, match=r"MB:0=20 .*EINVAL: Resource group is pseudo-locked"):
        driver.set_share("batch", 0, 0.2)

    assert driver.read_back("batch") == {0: 50, 1: 100}


@pytest.mark.parametrize(("profile", "kept"), [(INTEL_MBPS, 2), (INTEL, 100)])
def test_a_cache_that_went_offline_is_refused_and_what_was_kept_is_known(
    profile: Profile, kept: int, tmp_path: Path
) -> None:
    one_node = kernels.machine({0: range(8)}, {0: range(4), 1: range(4, 8)})
    kernel = ResctrlKernel(tmp_path, profile)
    driver = opened(kernel, one_node)
    driver.set_peaks({0: 40 * 2**20})
    gone = tuple(replace(one, ids=(0,)) for one in profile.resources)
    kernel.profile = replace(profile, resources=gone)
    del kernel.groups["corefleet-batch"].values["MB"][1]

    with pytest.raises(Unavailable, match="a domain id that it does not have"):
        driver.set_share("batch", 0, 0.1)

    assert driver.read_back("batch") == {0: kept}
    assert [line for line in driver.verify() if "batch" in line] == [
        f"resctrl: batch: MB 1 is None, we wrote {profile.resources[0].default}"
    ]


def test_an_unknown_domain_id_is_told_from_an_earlier_refusal(tmp_path: Path) -> None:
    files = ResctrlFiles(ResctrlKernel(tmp_path))
    host = files.host
    with pytest.raises(OSError, match="out of range") as first:
        host.write("sys/fs/resctrl/schemata", "MB:0=110\n")
    assert "MB value 110 out of range [10,100]" in files.explain(first.value, "write")

    with pytest.raises(OSError, match="9=50") as second:
        host.write("sys/fs/resctrl/schemata", "MB:9=50\n")

    assert "a domain id that it does not have" in files.explain(second.value, "write")


def test_words_about_an_earlier_command_are_not_taken_for_a_denial(tmp_path: Path) -> None:
    kernel = ResctrlKernel(tmp_path)
    kernel.status = "Mask out of range"
    kernel.read_only = True

    assert refused(kernel) == "resctrl: mkdir corefleet-batch: EROFS; batch has no limit"


def test_a_kernel_that_cannot_set_its_limits_leaves_no_groups(tmp_path: Path) -> None:
    mb = kernels.Resource("MB", "bandwidth", (0, 1), least=10, step=10, unsettable=True)
    kernel = ResctrlKernel(tmp_path, Profile((mb,)))

    assert "No support for non-linear MB domains" in refused(kernel)
    assert kernel.groups.keys() == {""}


@pytest.mark.parametrize(
    ("profile", "topology", "word"),
    [
        (INTEL_L2, TWO_NODES, "controls L2, no memory bandwidth"),
        (INTEL, MPAM_NODES, None),
        (INTEL, kernels.machine({0: range(4)}, {5: range(4)}), "neither L3 caches"),
        (INTEL_CLUSTERS, kernels.machine({0: range(4)}, {}), None),
        (Profile((kernels.Resource("MB", "bandwidth", (0,), linear=None),)), TWO_NODES, "unknown"),
    ],
)
def test_why_not_agrees_with_open(
    profile: Profile, topology: Topology, word: str | None, tmp_path: Path
) -> None:
    reason = why_not(ResctrlKernel(tmp_path, profile), topology)

    if word is None:
        assert reason is None
        opened(ResctrlKernel(tmp_path, profile), topology)
    else:
        assert word in (reason or "")
        assert refused(ResctrlKernel(tmp_path, profile), topology) == reason


def test_a_machine_without_resctrl_says_so(tmp_path: Path) -> None:
    assert refused(HostFs(tmp_path), TWO_NODES) == "resctrl: the kernel or the CPU has none"
    assert "arm64.mpam" in (why_not(HostFs(tmp_path), MPAM_NODES) or "")


def test_what_is_not_mounted_comes_with_the_command(tmp_path: Path) -> None:
    kernel = ResctrlKernel(tmp_path, mounted=False)

    assert "mount -t resctrl resctrl /sys/fs/resctrl" in refused(kernel)


def test_cpus_that_are_not_ours_are_not_limited(tmp_path: Path) -> None:
    half = kernels.machine({0: range(4)}, {0: range(4), 1: range(4, 8)})
    kernel = ResctrlKernel(tmp_path)

    driver = opened(kernel, half)

    assert all(text.startswith("MB:0=") and "1=" not in text[5:] for _, text in kernel.writes)
    with pytest.raises(InvalidInput, match="domain: 1"):
        driver.set_share("batch", 1, 0.5)


@pytest.mark.parametrize(
    ("variant", "unit", "ids"),
    [
        ("x86-intel-resctrl-set-a/full", "percent", (0, 1, 2, 3)),
        ("x86-intel-resctrl-set-a/l2l3mb", "percent", (0, 1)),
        ("x86-intel-resctrl-set-a/nol3", "percent", (0, 1, 2, 3)),
        ("x86-intel-resctrl-set-a/nol3.mbps", "MBps", (0, 1, 2, 3)),
        ("x86-intel-resctrl-set-a/l2", "controls L2, no memory bandwidth", ()),
        ("x86-amd-resctrl-smba", "eighth_GBps", (0, 2, 4, 6, 8, 10, 12, 14)),
    ],
)
def test_recorded_machines_have_their_unit(
    variant: str, unit: str, ids: tuple[int, ...], tmp_path: Path
) -> None:
    name, _, part = variant.partition("/")
    if name not in recorded():
        pytest.skip(f"no recorded machine {name}")
    host = recorded_resctrl(recorded()[name], part, tmp_path)
    topology = kernels.machine({0: range(16)}, {key: (key,) for key in ids})

    if not ids:
        assert unit in (why_not(host, topology) or "")
        return
    assert why_not(host, topology) is None
    line = ResctrlFiles(host).bandwidth_lines()[0]
    able = ability(ResctrlFiles(host), topology)
    assert (able.control.unit, able.control.ids) == (unit, ids)
    assert set(line.numbers()) == set(ids)
    if unit == "MBps":
        assert able.control.full == UNLIMITED_MBPS
