"""What agentd finds on a machine that we made ourselves."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentd.core.cpulist import parse_list
from tools.guest.guest import BIN, Guest
from tools.guest.layout import Layout

_KERNEL_RESERVE_MB = 96
"""What the kernel keeps of a node's memory for itself, at most."""
_DISCOVER_LIMIT_S = 100.0


def discover(guest: Guest, *properties: str) -> dict[str, Any]:
    """Return the report of `agentd discover`, run in a unit with these options."""
    options = " ".join(properties)
    report: dict[str, Any] = json.loads(
        guest.must(
            f"systemd-run --quiet --wait --pipe {options} {BIN}/agentd discover --json",
            _DISCOVER_LIMIT_S,
        )
    )
    return report


@pytest.fixture(scope="module")
def found(guest: Guest) -> dict[str, Any]:
    """As agentd's own service finds it when `confine_system` keeps it on a few CPUs."""
    return discover(guest, "-p Delegate=yes", "-p AllowedCPUs=1,3", "-p AllowedMemoryNodes=1,3")


def test_every_node_is_a_domain_with_its_cpus(found: dict[str, Any], guest_layout: Layout) -> None:
    """agentd's own cpuset does not count: the fleet has what corefleet.slice may use."""
    assert found["arch"] == "x86_64"
    assert {
        int(node): parse_list(each["cpus"], "cpus") for node, each in found["domains"].items()
    } == {node: tuple(guest_layout.cpus_of(node)) for node in range(guest_layout.nodes)}


def test_distances_are_those_of_the_firmware(found: dict[str, Any], guest_layout: Layout) -> None:
    nodes = range(guest_layout.nodes)
    assert {int(node): each["distances"] for node, each in found["domains"].items()} == {
        node: {str(other): guest_layout.distance(node, other) for other in nodes} for node in nodes
    }


def test_memory_is_that_of_each_node(found: dict[str, Any], guest_layout: Layout) -> None:
    given = guest_layout.node_memory_mb << 20
    for domain in found["domains"].values():
        assert given - (_KERNEL_RESERVE_MB << 20) <= domain["memory_bytes"] <= given


def test_systemd_pressure_and_delegated_control_groups_are_seen(found: dict[str, Any]) -> None:
    assert found["systemd"] is True
    assert sorted(found["psi"]) == ["cpu", "io", "memory"]
    groups = found["cgroup"]
    assert (groups["version"], groups["hybrid"], groups["writable"]) == (2, False, True)


def test_nothing_about_the_machine_surprises(found: dict[str, Any]) -> None:
    assert found["warnings"] == []


def test_a_cpuset_outside_the_system_slice_confines_discovery(guest: Guest) -> None:
    report = discover(
        guest, "--slice=container.slice", "-p AllowedCPUs=1,3", "-p AllowedMemoryNodes=1,3"
    )

    assert sorted(report["domains"]) == ["1", "3"]
    assert report["cgroup"]["writable"] is False  # systemd did not give it away


def test_a_cpu_that_is_offline_is_not_used(guest: Guest) -> None:
    online = "/sys/devices/system/cpu/cpu2/online"
    guest.must(f"echo 0 >{online}")
    try:
        report = discover(guest)
    finally:
        guest.must(f"echo 1 >{online}")

    assert parse_list(report["cpus"]["online"], "online") == (0, 1, 3)
    assert sorted(report["domains"]) == ["0", "1", "3"]
