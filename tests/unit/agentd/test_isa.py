"""Instruction-set features, masks and CPU times, from the kernel's text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd.core.cpu_times import ALL_CPUS, parse_stat, sum_times
from agentd.core.cpulist import parse_mask
from agentd.core.isa import common_baseline, normalise, read_cpuinfo
from corefleet.errors import InvalidInput

V2 = "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"
V3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
V4 = "avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ("lm", "x86-64-v1"),
        (f"lm {V2}", "x86-64-v2"),
        (f"lm {V2} {V3}", "x86-64-v3"),
        (f"lm {V2} {V3} {V4}", "x86-64-v4"),
        (f"lm {V2} {V4}", "x86-64-v2"),
    ],
)
def test_levels_build_on_each_other(flags: str, level: str) -> None:
    features = read_cpuinfo(f"processor : 0\nflags : {flags}\n").features
    assert max(name for name in features if name.startswith("x86-64-v")) == level


def test_only_what_every_cpu_has_counts() -> None:
    info = read_cpuinfo("processor : 0\nflags : lm avx2\n\nprocessor : 1\nflags : lm\n")
    assert info.features == ("lm", "x86-64-v1")
    assert info.cpus == (0, 1)


@pytest.mark.parametrize(
    ("text", "arch", "features"),
    [
        ("isa\t\t: rv64imafdcv_zba_zbb\n", "riscv64", {"rv64", "v", "zba", "zbb"}),
        (
            "arch : IA-64\nfeatures : branchlong, 16-byte atomic ops\n",
            "ia64",
            {"16-byte-atomic-ops"},
        ),
        ("vendor_id : IBM/S390\nfeatures\t: zarch dfp \n", "s390x", {"zarch", "dfp"}),
        ("cpu\t\t: POWER9, altivec supported\n", "ppc64le", {"altivec"}),
        ("", "", set()),
    ],
)
def test_other_architectures(text: str, arch: str, features: set[str]) -> None:
    info = read_cpuinfo(text)
    assert info.arch == arch
    assert features <= set(info.features)


def test_the_midr_is_put_together_from_its_fields() -> None:
    text = (
        "processor : 3\nFeatures : asimd\nCPU implementer : 0x48\nCPU variant : 0x1\n"
        "CPU part : 0xd01\nCPU revision : 0\n"
    )
    assert read_cpuinfo(text).parts == {3: "0x00000000481fd010"}


def test_the_baseline_of_a_fleet_is_what_all_have() -> None:
    old, new = normalise("x86_64", f"lm {V2}".split()), normalise("x86_64", f"lm {V2} {V3}".split())
    assert common_baseline([old, new]) == old
    assert common_baseline([]) == ()
    assert common_baseline([old, ()]) == ()


@given(st.lists(st.sets(st.sampled_from(["lm", "avx2", "sve", "i8mm"]))))
def test_the_baseline_is_in_every_machine(machines: list[set[str]]) -> None:
    assert all(set(common_baseline(machines)) <= machine for machine in machines)


@given(st.sets(st.integers(0, 600)))
def test_a_mask_is_read_as_the_kernel_writes_it(cpus: set[int]) -> None:
    digits = f"{sum(1 << cpu for cpu in cpus):0152x}"
    groups = [digits[start : start + 8] for start in range(0, len(digits), 8)]
    assert parse_mask(",".join(groups) + "\n", "cpumap") == tuple(sorted(cpus))


@pytest.mark.parametrize("text", ["x", "f,f", "1,0000000g", "-1", "ffffffff,fff", "f" * 20000])
def test_a_mask_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"^cpumap: "):
        parse_mask(text, "cpumap")


def test_cpu_times_are_milliseconds_by_cpu_and_column() -> None:
    times = parse_stat("cpu  3 0 1 9\ncpu0 1 0 1 4 0 0 0 2\ncpu5 2 0 0 5\nintr 5\ncpufreq x\n\n")
    assert sorted(times) == [ALL_CPUS, 0, 5]
    assert times[0]["steal"] == 20
    assert sum_times(times, (0, 5, 7))["user"] == 30
