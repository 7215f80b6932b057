"""Every metric follows Prometheus' conventions for names, units and labels.

https://prometheus.io/docs/practices/naming/
"""

from __future__ import annotations

import re
import subprocess

import pytest
from prometheus_client import generate_latest

from corefleet.config import cache_dir
from corefleet.metrics import Metrics
from tools.dashboards.families import (
    PREFIX,
    Exposed,
    agentd_metrics,
    controld_metrics,
    exposed,
)
from tools.prometheus_fetch import fetch

OURS = [each for each in exposed() if each.name.startswith(PREFIX)]

LABELS = {
    "actuator": "one value a node",
    "answer": "three values",
    "by": "who looked: three values",
    "cause": "why an attempt was given up, or which limit refused: a fixed list",
    "directory": "data_dir and run_dir",
    "domain": "NUMA domains of one node",
    "duplicate": "true or false",
    "error": "names of our exceptions",
    "found": "what a look found: a fixed list",
    "home": "hit, moved, missed, new",
    "kind": "kinds of units: a fixed list",
    "name": "pools and models of one node",
    "outcome": "what became of an attempt: a fixed list",
    "pool": "an operator makes them: some dozens",
    "python": "one value a process",
    "reason": "why a unit was left: a fixed list",
    "sensor": "one value a node",
    "source": "dead or free",
    "state": "states of nodes, tasks or replicas: a fixed list",
    "use": "which of the two connections",
    "version": "one value a process",
}
"""Labels and what bounds their values: never nodes, tasks, sessions or tenants."""

NOT_BASE = re.compile(
    r"_(ms|us|ns|milliseconds|microseconds|minutes|hours|s|percent|kb|mb|gb|kib|mib|share)(_|$)"
)


@pytest.mark.parametrize("family", OURS, ids=lambda each: f"{each.program}-{each.name}")
def test_a_metric_is_named_by_the_conventions(family: Exposed) -> None:
    assert re.fullmatch(r"corefleet(_[a-z0-9]+)+", family.name)
    assert not NOT_BASE.search(family.name)
    assert family.name.endswith("_total") == (family.kind == "counter")
    assert not re.search(r"_(count|sum|bucket|created)$", family.name)
    if family.kind == "histogram":
        assert family.name.endswith(("_seconds", "_bytes"))
    assert re.match(r"[A-Z0-9].*\.$", family.help), family.help


@pytest.mark.parametrize("family", OURS, ids=lambda each: f"{each.program}-{each.name}")
def test_the_values_of_a_label_are_bounded(family: Exposed) -> None:
    assert set(family.labels) <= LABELS.keys()


def test_every_label_that_is_allowed_is_used() -> None:
    assert {label for family in OURS for label in family.labels} == set(LABELS)


def test_a_name_means_one_thing_in_both_programs() -> None:
    by_name: dict[str, Exposed] = {}
    for family in OURS:
        first = by_name.setdefault(family.name, family)
        assert (first.kind, first.help, first.labels) == (family.kind, family.help, family.labels)


@pytest.mark.parametrize("make", [controld_metrics, agentd_metrics])
def test_promtool_finds_nothing_in_a_scrape(make: type[Metrics]) -> None:
    fetch(cache_dir() / "bin")
    metrics = make()
    done = subprocess.run(
        [cache_dir() / "bin" / "promtool", "check", "metrics"],
        input=generate_latest(metrics.registry),
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
