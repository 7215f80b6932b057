"""The drawing of a machine: true to its numbers, narrow, and short for many equal parts."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from agentd.core.topology import (
    Control,
    ControlGroups,
    CoreKind,
    CpuSets,
    Domain,
    HugePages,
    Resctrl,
    Topology,
)
from agentd.drawing import WIDTH_COLUMNS, as_text
from agentd.drawing_boxes import cpu_text, page_text, size_text
from tests.unit.agentd.drawn_machines import GIB, big, laptop, machine


def line_with(text: str, part: str) -> str:
    """Return the one line of `text` that holds `part`, without its frame."""
    found = [line for line in text.splitlines() if part in line]
    assert len(found) == 1, (part, text)
    return found[0].strip("│ ╭╮─")


def drawn_cpus(text: str) -> list[int]:
    """Return the CPUs in the cells of a drawing."""
    cells = re.findall(r"\[([\d ()*~]+)\]", text)
    return [int(number) for cell in cells for number in re.findall(r"\d+", cell)]


def test_a_laptop_is_one_box_in_another_with_each_core_in_brackets() -> None:
    lines = as_text(laptop()).splitlines()
    assert lines[0] == (
        "x86_64, 8 CPUs online (0-7), 1 package, 1 NUMA node, 1 domain, pages of 4 KiB"
    )
    assert lines[1].startswith("╭─ package 0: CPUs 0-7 ─")
    assert lines[2].startswith("│ ╭─ domain 0: CPUs 0-7, 4 cores of 2 threads each, 4.0 GiB ─")
    assert lines[3].split("│")[2].strip() == "L3 8.0 MiB     [0 4] [1 5] [2 6] [3 7]"
    assert len({len(line) for line in lines[1:6]}) == 1


def test_ascii_draws_the_same_without_other_characters() -> None:
    for topology in (laptop(), big()):
        plain = as_text(topology, ascii=True)
        assert plain.isascii()
        assert drawn_cpus(plain) == drawn_cpus(as_text(topology))
        assert list(map(len, plain.splitlines())) == list(map(len, as_text(topology).splitlines()))


def test_512_cpus_on_128_nodes_are_folded_into_a_few_lines() -> None:
    text = as_text(big())
    assert len(text.splitlines()) < 25
    assert "x 126 more like this: packages 2-127, CPUs 8-511, 3.5 GiB to 4.0 GiB each" in text
    assert "from 0-127: 10 x 1, 20 x 127" in text


def test_a_node_unlike_its_neighbours_is_not_folded_away() -> None:
    topology = big(20)
    odd = topology.nodes[9]
    nodes = {**topology.nodes, 9: replace(odd, listed_cpus=(*odd.listed_cpus, 200))}
    text = as_text(replace(topology, nodes=nodes))
    assert "domain 9: CPUs 36-39" in text
    assert "offline: CPUs 200" in text
    assert "x 7 more like this: packages 2-8, CPUs 8-35" in text
    assert "x 8 more like this: packages 12-19" in text


def test_nodes_without_cpus_or_memory_are_said_to_be() -> None:
    text = as_text(
        machine(
            {0: range(4), 1: (4, 5), 2: (), 3: ()},
            cores=[(c,) for c in range(6)],
            memory={1: 0, 2: 128 * GIB, 3: 0},
            offline={3: (6, 7)},
        )
    )
    assert "domain 1: CPUs 4-5, 2 cores of one thread each, no memory" in text
    assert line_with(text, "node 2") == "node 2: memory only, 128.0 GiB"
    assert line_with(text, "node 3") == "node 3: empty, offline: CPUs 6-7"


def test_many_memory_only_nodes_take_three_lines() -> None:
    text = as_text(
        machine({0: (0,), **dict.fromkeys(range(250, 256), ())}, cores=[(0,)], memory={})
    )
    assert "x 4 more like this: nodes 252-255, 4.0 GiB each" in text


def test_isolated_tickless_and_forbidden_cpus_are_marked_and_explained() -> None:
    topology = laptop()
    allowed = Domain(0, (0, 1, 2, 4, 5, 6), 4 * GIB, {0: 10})
    text = as_text(
        replace(
            topology,
            domains={0: allowed},
            sets=CpuSets(isolated=(2, 6), nohz_full=(6,), offline=(8, 9)),
        )
    )
    assert "[0 4] [1 5] [2* 6*~] [(3) (7)]" in text
    assert "N*  isolated from the scheduler: 2,6" in text
    assert "N~  without a tick (nohz_full): 6" in text
    assert "(N) not used: 3,7" in text
    assert "used: CPUs 0-2,4-6" in text
    assert "\noffline: 8-9" in text


def test_a_node_that_is_no_domain_says_so() -> None:
    topology = machine({0: (0,), 1: (1,)}, cores=[(0,), (1,)])
    text = as_text(replace(topology, domains={0: topology.domains[0]}))
    assert "node 1: CPUs 1," in text
    assert "not used: none of its CPUs, or not its memory, is ours" in text


def test_hybrid_cores_have_rows_and_a_line_for_each_kind() -> None:
    topology = machine(
        {0: range(8)},
        cores=[(0, 1), (2, 3), (4,), (5,), (6,), (7,)],
        packages=[("0", range(8))],
        caches=[(24576, range(8))],
    )
    kinds = (
        CoreKind("performance", (0, 1, 2, 3), 1024),
        CoreKind("efficiency", (4, 5, 6, 7), 623, "0x410fd460"),
    )
    text = as_text(replace(topology, kinds=kinds))
    assert "6 cores: 2 of 2 threads, 4 of one thread" in text
    assert "L3 24.0 MiB, performance [0 1] [2 3]" in text
    assert "L3 24.0 MiB, efficiency [4] [5] [6] [7]" in text
    assert "efficiency: CPUs 4-7, capacity 623 of 1024, MIDR 0x410fd460" in text


def test_packages_inside_one_node_are_rows() -> None:
    text = as_text(
        machine(
            {0: range(4)},
            cores=[(c,) for c in range(4)],
            packages=[("0", (0, 1)), ("1", (2, 3))],
        )
    )
    assert line_with(text, "package 1") == "package 1      [2] [3]"


def test_labels_that_are_odd_or_not_unique_get_an_index() -> None:
    text = as_text(
        machine(
            {0: (0,), 1: (1,), 2: (2,)},
            cores=[(0,), (1,), (2,)],
            packages=[("0", (0,)), ("0", (1,)), ("-1\x1b[31m", (2,))],
        )
    )
    assert "package #0 (labelled 0): CPUs 0" in text
    assert "package #1 (labelled 0): CPUs 1" in text
    assert "package #2 (labelled -1?[31m): CPUs 2" in text


def test_an_l3_that_spans_nodes_says_how_many_cpus_are_elsewhere() -> None:
    text = as_text(
        machine({0: (0, 1), 1: (2, 3)}, cores=[(c,) for c in range(4)], caches=[(4096, range(4))])
    )
    assert text.count("and 2 CPUs of other nodes") == 2


def test_distances_are_by_node_id() -> None:
    rows = {0: {0: 10, 8: 40}, 8: {0: 41, 8: 10}}
    text = as_text(machine({0: (0,), 8: (1,)}, cores=[(0,), (1,)], distances=rows))
    assert "distance │  0  8" in text
    assert "       8 │ 41 10" in text
    assert "not symmetric, e.g. between 0 and 8" in text


def test_huge_pages_that_are_reserved_are_shown_by_node() -> None:
    pages = {2048: HugePages(512, 500), 1048576: HugePages(0, 0)}
    text = as_text(machine({0: (0,)}, cores=[(0,)], huge=pages))
    assert "huge pages: 512 of 2 MiB (500 free)" in text
    assert text.splitlines().count("huge pages: 2 MiB, 1 GiB") == 1


def test_what_the_kernel_can_control_is_said_in_words() -> None:
    resctrl = Resctrl(
        mounted=True,
        controls={
            "MB": Control("MB", 8, 10, 10, "percent"),
            "L3": Control("L3", 16),
        },
        monitors=("mbm_total_bytes",),
        rmids=256,
    )
    text = as_text(
        replace(
            laptop(),
            resctrl=resctrl,
            cgroups=ControlGroups(2, writable=True, controllers=("cpu", "memory")),
            pressure=("cpu", "io"),
            systemd=True,
            features=("avx2", "x86-64-v2", "x86-64-v3"),
        )
    )
    assert (
        "memory bandwidth (resctrl): L3: 16 groups; MB: 8 groups, from 10 % in steps of 10; "
        "monitors" in text
    )
    assert "cgroups: v2, writable, controllers cpu memory" in text
    assert "pressure stall information: cpu, io" in text
    assert "systemd: yes" in text
    assert "instruction set: x86-64-v3 avx2" in text


def test_a_machine_that_says_nothing_is_drawn() -> None:
    nothing = Topology(
        domains={0: Domain(0, (0,), 0, {})},
        siblings={},
        possible=(0,),
        online=(0,),
        arch="",
        features=(),
        numa=False,
        warnings=("cpu/online: 'x' is not valid",),
    )
    text = as_text(nothing)
    assert "unknown architecture, 1 CPU online (0)" in text
    assert "no NUMA nodes: the whole machine is domain 0" in text
    assert "domain 0: CPUs 0, 1 core of one thread, no memory" in text
    assert text.endswith("warning: cpu/online: 'x' is not valid")


def test_sizes_and_lists_are_short() -> None:
    assert [size_text(n) for n in (0, 1023, 1024, 3 * GIB // 2, 4096 * GIB)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 GiB", "4.0 TiB",
    ]  # fmt: skip
    assert [page_text(n) for n in (4, 64, 2048, 16 << 20)] == [
        "4 KiB", "64 KiB", "2 MiB", "16 GiB",
    ]  # fmt: skip
    assert cpu_text(range(0, 200, 2), 30) == "0,2,4,6,8,10,12,.. (100 CPUs)"


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    """Any number of nodes, packages and caches, none of which need fit another."""
    count = draw(st.integers(1, 40))
    cpus = draw(st.lists(st.integers(0, 8191), min_size=count, max_size=count, unique=True))
    ids = draw(st.lists(st.integers(0, 1023), min_size=1, max_size=20, unique=True))
    node_of = [draw(st.sampled_from(ids)) for _ in cpus]
    threads = draw(st.integers(1, 8))
    nodes = {n: sorted(c for c, m in zip(cpus, node_of, strict=True) if m == n) for n in ids}
    cores = [
        tuple(own[i : i + threads]) for own in nodes.values() for i in range(0, len(own), threads)
    ]
    size = draw(st.integers(1, 16))
    groups = [sorted(cpus)[i : i + size] for i in range(0, count, size)]
    return machine(
        nodes,
        cores=cores,
        packages=[(draw(st.text(max_size=30)), group) for group in groups],
        caches=[(draw(st.integers(1, 1 << 20)), group) for group in groups],
        memory={n: draw(st.integers(0, 1 << 44)) for n in ids},
    )


@settings(max_examples=60, deadline=None)
@given(machines())
def test_no_line_is_too_wide_and_no_cpu_is_drawn_twice(topology: Topology) -> None:
    text = as_text(topology)
    assert max(map(len, text.splitlines())) <= WIDTH_COLUMNS
    drawn = drawn_cpus(text)
    assert len(drawn) == len(set(drawn))
    assert set(drawn) <= set(topology.online)
    if "more like this" not in text and " cores)" not in text:
        assert set(drawn) == set(topology.online)
