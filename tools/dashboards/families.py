"""All metric families that the programs expose, from their own registries."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal, cast

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from agentd.bandwidth.report import DomainLoad, Report
from agentd.core.health_samples import ClockState, DiskState, HealthVerdict
from agentd.core.replicas_io import ReplicaState
from agentd.core.supervision import UnitKey
from agentd.gauges import NodeCollector, Told
from controld.gauges import make_gauges
from corefleet.messages.wire import SlotUse
from corefleet.metrics import Metrics

Program = Literal["controld", "agentd"]
PREFIX = "corefleet_"


@dataclass(frozen=True, slots=True)
class Exposed:
    """One family. `name` as it is scraped: with `_total` or `_info`."""

    program: Program
    name: str
    kind: str
    help: str
    labels: tuple[str, ...]

    @property
    def series(self) -> tuple[str, ...]:
        """Names that a query can ask for."""
        if self.kind == "histogram":
            return tuple(f"{self.name}{end}" for end in ("_bucket", "_sum", "_count"))
        return (self.name,)


def controld_metrics() -> Metrics:
    """Return the metrics of a controld that did nothing yet."""
    metrics = Metrics("0")
    make_gauges(metrics)
    return metrics


def agentd_metrics() -> Metrics:
    """Return the metrics of a node where everything that can be told is told."""
    metrics = Metrics("0")
    metrics.registry.register(
        NodeCollector(_node(), lambda: (ReplicaState(0, "m", "ready", 1, "", 1),))
    )
    return metrics


def exposed() -> list[Exposed]:
    """Return the families of both programs, their own first, in alphabetical order."""
    found = [
        *_families("controld", controld_metrics()),
        *_families("agentd", agentd_metrics()),
    ]
    return sorted(found, key=lambda each: (not each.name.startswith(PREFIX), each.name))


def _families(program: Program, metrics: Metrics) -> list[Exposed]:
    collector: Collector = metrics.registry
    return [
        Exposed(program, _scraped(each), each.type, each.documentation, _labels(metrics, each))
        for each in collector.collect()
    ]


def _scraped(metric: Metric) -> str:
    ends = {"counter": "_total", "info": "_info"}
    return metric.name + ends.get(metric.type, "")


def _labels(metrics: Metrics, metric: Metric) -> tuple[str, ...]:
    if metric.name in metrics.labels:
        return metrics.labels[metric.name]
    return tuple(sorted({label for sample in metric.samples for label in sample.labels}))


def _node() -> Told:
    """Return a node that has one of everything."""
    engine, worker = UnitKey("engine", "m", 0), UnitKey("worker", "p", 0)
    load = DomainLoad(
        domain=0, utilisation=0.5, bytes_per_s=1e9, latency_ratio=1.0, llc_hit=0.5, remote_share=0.0
    )
    node = SimpleNamespace(
        tallies={("p", "finished"): 1},
        slots=lambda: (SlotUse(pool="p", domain=0, total=1, used=0),),
        epoch=1,
    )
    isolation = SimpleNamespace(
        binding=SimpleNamespace(bindings=SimpleNamespace(repaired=0, drained=0)),
        bandwidth=SimpleNamespace(
            actuator="resctrl",
            report=Report(number=1, interval_s=0.5, source="resctrl", domains=(load,)),
            domains={0: SimpleNamespace(share=1.0, mode="free")},
        ),
    )
    samples = (
        DiskState("data_dir", "/var/lib/corefleet", 0.5),
        ClockState(synchronised=True, error_s=0.0),
    )
    told = SimpleNamespace(
        node=node,
        isolation=isolation,
        health=SimpleNamespace(latest=HealthVerdict("ok"), samples=samples),
        beats_sent=1,
        supervisor=SimpleNamespace(
            troubles=lambda: (),
            out_of_memory=lambda: {worker: 1},
            failures=lambda: {engine: 1},
        ),
    )
    return cast("Told", told)
