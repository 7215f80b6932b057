"""Refusing to start where isolation that is required is not there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import agentd
from agentd import requirements
from agentd.core.topology import ControlGroups, Topology
from agentd.requirements import REQUIREMENTS, unmet

GOOD = Topology(
    domains={},
    siblings={},
    possible=(),
    online=(),
    arch="x86_64",
    features=(),
    numa=True,
    warnings=(),
    cgroups=ControlGroups(version=2, controllers=("cpu", "memory", "pids")),
    systemd=True,
)
UNBOUND = "memory is not bound to its domain: numactl says: no"


def test_a_machine_that_has_everything_lacks_nothing() -> None:
    assert unmet(REQUIREMENTS, GOOD, True, (), "resctrl") == ()
    assert unmet(REQUIREMENTS, GOOD, True, (), "software") == ()


def test_nothing_required_is_nothing_missing() -> None:
    bare = replace(GOOD, numa=False, cgroups=ControlGroups(), systemd=False)
    assert unmet((), bare, False, (UNBOUND,), "") == ()


@pytest.mark.parametrize("name", ["numa", "numa-binding"])
def test_numa_needs_nodes_and_a_launcher_that_binds(name: str) -> None:
    (line,) = unmet((name,), replace(GOOD, numa=False), True, (), "resctrl")
    assert line.startswith(f"`require` has {name}, but the kernel shows no NUMA nodes: boot")
    (line,) = unmet((name,), GOOD, False, ("processes see /tmp", UNBOUND), "resctrl")
    assert line.startswith(f"`require` has {name}, but {UNBOUND}")


@pytest.mark.parametrize(
    ("groups", "outlives", "unisolated", "words"),
    [
        (ControlGroups(version=1), True, (), "cgroup v1: boot with systemd.unified"),
        (ControlGroups(version=1, hybrid=True), True, (), "v1 and v2 mixed"),
        (ControlGroups(), True, (), "no cgroups"),
        (GOOD.cgroups, False, (), "the plain launcher sets no limits: set `launcher`"),
        (GOOD.cgroups, True, ("a process may swap",), "a process may swap: use a newer systemd"),
    ],
)
def test_cgroup_needs_v2_and_a_launcher_that_sets_limits(
    groups: ControlGroups, outlives: bool, unisolated: tuple[str, ...], words: str
) -> None:
    (line,) = unmet(("cgroup",), replace(GOOD, cgroups=groups), outlives, unisolated, "")
    assert words in line


def test_unbound_memory_alone_is_no_missing_cgroup() -> None:
    assert unmet(("cgroup",), GOOD, True, (UNBOUND,), "") == ()


def test_bandwidth_needs_a_control_that_acts() -> None:
    (line,) = unmet(("bandwidth",), GOOD, True, (), "static")
    assert "memory bandwidth is static: mount resctrl" in line
    (line,) = unmet(("bandwidth",), GOOD, False, (), "")
    assert "not controlled: the plain launcher cannot slow a class down" in line


def test_systemd_needs_it_as_launcher() -> None:
    (line,) = unmet(("systemd",), GOOD, False, (), "")
    assert "set `launcher` to 'systemd'" in line
    (line,) = unmet(("systemd",), replace(GOOD, systemd=False), False, (), "")
    assert "does not run this machine" in line


def test_each_missing_thing_has_one_line_in_the_order_asked() -> None:
    bare = replace(GOOD, numa=False, cgroups=ControlGroups(), systemd=False)
    lines = unmet(("systemd", "numa", "systemd", "cgroup"), bare, False, (), "")
    assert [line.split(",")[0].split()[-1] for line in lines] == ["systemd", "numa", "cgroup"]


def test_an_unknown_requirement_is_not_taken_for_met() -> None:
    (line,) = unmet(("gold",), GOOD, True, (), "resctrl")
    assert "gold, but not known; expected some of: numa, cgroup" in line


def test_the_launchers_still_say_it_in_the_words_we_look_for() -> None:
    for launcher in ("plain.py", "systemd.py"):
        source = (Path(agentd.__file__).parent / "launch" / launcher).read_text()
        assert f'"{requirements._UNBOUND} to its domain' in source
