"""Discovery on recorded machines gives every value that their finders expect."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agentd.core.topology import Overrides
from agentd.hostfs import HostFs
from agentd.probes import discover, refresh
from tests.machines.cases import (
    FOLDER,
    INFORMATIONAL,
    Comparison,
    capture_ids,
    case_ids,
    compare,
    examine,
    expected_of,
    report_of,
    unpack,
)

CASES: list[Any] = [*capture_ids(), *case_ids()]
if not case_ids():
    reason = f"recorded machines: no *.tar.gz in {FOLDER}"
    CASES.append(pytest.param("none", marks=pytest.mark.skip(reason=reason)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machines")


@pytest.fixture
def root(case: str, folder: Path) -> Path:
    """The case's tree, unpacked once."""
    path = folder / case
    return path if path.exists() else unpack(case, folder)


@pytest.mark.parametrize("case", CASES)
def test_every_expected_value_is_found(case: str, root: Path) -> None:
    expected = expected_of(case)
    comparison = Comparison()
    compare(expected, report_of(root, expected), "", comparison)
    assert not comparison.differences, "\n".join(comparison.differences[:40])
    assert comparison.compared > len(expected.keys() - INFORMATIONAL.keys())


@pytest.mark.parametrize("case", CASES)
def test_what_may_be_used_is_online_allowed_and_in_one_domain(case: str, root: Path) -> None:
    topology, _ = examine(root)
    used = [cpu for domain in topology.domains.values() for cpu in domain.cpus]
    assert len(used) == len(set(used))
    assert set(used) <= set(topology.online) - set(topology.sets.isolated)
    assert set(used) <= set(topology.sets.allowed or used)
    assert all(domain.cpus for domain in topology.domains.values())
    cores = topology.all_cores
    assert sorted(cpu for core in cores for cpu in core) == sorted(topology.online)
    assert all(one[0] < other[0] for one, other in pairwise(cores))


@pytest.mark.parametrize("case", CASES)
def test_a_refresh_of_an_unchanged_machine_changes_nothing(case: str, root: Path) -> None:
    host = HostFs(root)
    topology = discover(host, Overrides())
    assert refresh(host, topology, Overrides()) == topology
