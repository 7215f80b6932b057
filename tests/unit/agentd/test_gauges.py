"""What a node's metrics say, and what they leave out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentd.core.health_samples import ClockState, DiskState, HealthVerdict, Sample
from agentd.core.replicas_io import ReplicaState
from agentd.gauges import NodeCollector
from corefleet.metrics import Metrics


def scraped(
    *samples: Sample,
    verdict: HealthVerdict | None = None,
    actuator: str = "cpu.max",
    mode: str = "free",
    replicas: tuple[ReplicaState, ...] = (),
) -> Metrics:
    told: Any = SimpleNamespace(
        node=SimpleNamespace(tallies={}, slots=tuple, epoch=3),
        isolation=SimpleNamespace(
            binding=SimpleNamespace(bindings=SimpleNamespace(repaired=0, drained=0)),
            bandwidth=SimpleNamespace(
                actuator=actuator,
                report=None,
                domains={0: SimpleNamespace(share=0.25, mode=mode)},
            ),
        ),
        health=SimpleNamespace(latest=verdict, samples=samples),
        beats_sent=5,
        supervisor=SimpleNamespace(troubles=tuple, out_of_memory=dict, failures=dict),
    )
    metrics = Metrics()
    metrics.registry.register(NodeCollector(told, lambda: replicas))
    return metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_a_clock_that_nothing_disciplines_has_no_error() -> None:
    steered = scraped(ClockState(synchronised=True, error_s=0.2, offset_s=-0.1))
    assert value(steered, "corefleet_clock_error_seconds") == 0.2
    assert value(steered, "corefleet_clock_offset_seconds") == -0.1
    free = scraped(ClockState(synchronised=False, error_s=16.0))
    assert value(free, "corefleet_clock_synchronised") == 0
    assert value(free, "corefleet_clock_error_seconds") is None


def test_a_disk_that_cannot_be_asked_is_broken_and_has_no_share() -> None:
    metrics = scraped(
        DiskState("data_dir", "/d", used=0.4), DiskState("run_dir", "/r", error="gone")
    )
    assert value(metrics, "corefleet_disk_used_ratio", directory="data_dir") == 0.4
    assert value(metrics, "corefleet_disk_broken", directory="data_dir") == 0
    assert value(metrics, "corefleet_disk_broken", directory="run_dir") == 1
    assert value(metrics, "corefleet_disk_used_ratio", directory="run_dir") is None


@pytest.mark.parametrize(
    ("actuator", "mode", "squeezed"),
    [("none", "static", None), ("cpu.max", "static", 0), ("cpu.max", "squeezing", 1)],
)
def test_batch_is_squeezed_only_by_a_regulator(
    actuator: str, mode: str, squeezed: float | None
) -> None:
    metrics = scraped(actuator=actuator, mode=mode)
    assert value(metrics, "corefleet_batch_squeezed", domain="0") == squeezed
    share = value(metrics, "corefleet_batch_cpu_ratio", domain="0")
    assert share == (None if squeezed is None else 0.25)


def test_a_node_is_not_unwell_before_it_was_looked_at() -> None:
    assert value(scraped(), "corefleet_node_unwell_signals") == 0
    unwell = scraped(verdict=HealthVerdict("draining", ("disk full", "clock off")))
    assert value(unwell, "corefleet_node_unwell_signals") == 2
    assert value(unwell, "corefleet_node_draining_for_health") == 1


def test_replicas_are_counted_by_domain_and_state() -> None:
    metrics = scraped(
        replicas=(
            ReplicaState(0, "a", "ready", 1, "", 1),
            ReplicaState(0, "b", "ready", 1, "", 1),
            ReplicaState(1, "a", "refused", 1, "no room", 0),
        )
    )
    assert value(metrics, "corefleet_model_replicas", domain="0", state="ready") == 2
    assert value(metrics, "corefleet_model_replicas", domain="1", state="refused") == 1
