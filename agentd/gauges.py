"""Metrics of a node, read from its state when they are scraped: nothing is counted twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agentd.core.health_samples import ClockState, DiskState
from agentd.core.node import Node
from agentd.core.replicas_io import ReplicaState
from agentd.core.supervision import UnitKey
from agentd.health import HealthWatch
from agentd.isolation import Isolation

_LOADS = {
    "utilisation": (
        "corefleet_memory_bandwidth_used_ratio",
        "Share of the domain's peak memory bandwidth in use.",
    ),
    "bytes_per_s": (
        "corefleet_memory_traffic_bytes_per_second",
        "Memory traffic of the domain.",
    ),
    "latency_ratio": (
        "corefleet_memory_latency_ratio",
        "The canary's latency against its idle baseline.",
    ),
    "llc_hit": (
        "corefleet_llc_hit_ratio",
        "Share of last-level cache look-ups that hit.",
    ),
    "remote_share": (
        "corefleet_remote_pages_ratio",
        "Share of pages that were given to processes of other domains.",
    ),
}


class Units(Protocol):
    """Workers and engines: see supervisor.Supervisor."""

    def troubles(self) -> tuple[str, ...]: ...
    def out_of_memory(self) -> Mapping[UnitKey, int]: ...
    def failures(self) -> Mapping[UnitKey, int]: ...


class Told(Protocol):
    """What is read of a node: see daemon.Daemon."""

    @property
    def node(self) -> Node: ...
    @property
    def isolation(self) -> Isolation: ...
    @property
    def health(self) -> HealthWatch: ...
    @property
    def beats_sent(self) -> int: ...
    @property
    def supervisor(self) -> Units: ...


class NodeCollector(Collector):
    """Exports attempts and slots by pool, units in trouble, health, and isolation.

    Runs in the server's thread: it reads what the loop replaces whole.
    """

    def __init__(self, daemon: Told, replicas: Callable[[], tuple[ReplicaState, ...]]) -> None:
        self._daemon = daemon
        self._replicas = replicas

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._work()
        yield from self._units()
        yield from self._health()
        yield from self._bindings()
        yield from self._bandwidth()

    def _work(self) -> Iterator[Metric]:
        node = self._daemon.node
        attempts = CounterMetricFamily(
            "corefleet_attempts", "Attempts by what became of them.", labels=["pool", "outcome"]
        )
        for (pool, outcome), count in dict(node.tallies).items():
            attempts.add_metric([pool, outcome], count)
        yield attempts
        total = GaugeMetricFamily(
            "corefleet_slots", "Tasks that may run at once.", labels=["pool", "domain"]
        )
        used = GaugeMetricFamily(
            "corefleet_slots_used", "Tasks that run.", labels=["pool", "domain"]
        )
        for slot in node.slots():
            where = [slot.pool, str(slot.domain)]
            total.add_metric(where, slot.total)
            used.add_metric(where, slot.used)
        yield total
        yield used
        yield GaugeMetricFamily(
            "corefleet_node_epoch", "Epoch of the node, 0 while not registered.", node.epoch
        )
        yield CounterMetricFamily(
            "corefleet_heartbeats_sent",
            "Heartbeats that went out over a standing connection.",
            value=self._daemon.beats_sent,
        )

    def _units(self) -> Iterator[Metric]:
        units = self._daemon.supervisor
        yield GaugeMetricFamily(
            "corefleet_units_in_trouble",
            "Workers and engines that fail again and again.",
            value=len(units.troubles()),
        )
        labels = ["kind", "name", "domain"]
        failed = CounterMetricFamily(
            "corefleet_unit_failures",
            "Workers and engines that ended unasked, or could not be started.",
            labels=labels,
        )
        for unit, count in units.failures().items():
            failed.add_metric([unit.kind, unit.name, str(unit.domain)], count)
        yield failed
        killed = CounterMetricFamily(
            "corefleet_out_of_memory",
            "Processes that the kernel killed for want of memory.",
            labels=labels,
        )
        for unit, count in units.out_of_memory().items():
            killed.add_metric([unit.kind, unit.name, str(unit.domain)], count)
        yield killed
        replicas = GaugeMetricFamily(
            "corefleet_model_replicas",
            "Models that engines asked for, by the state of their copy in the domain.",
            labels=["domain", "state"],
        )
        states = Counter((str(each.domain), each.state) for each in self._replicas())
        for (domain, state), number in states.items():
            replicas.add_metric([domain, state], number)
        yield replicas

    def _health(self) -> Iterator[Metric]:
        health = self._daemon.health
        verdict = health.latest
        yield GaugeMetricFamily(
            "corefleet_node_unwell_signals",
            "Signals of the node's health that are not well.",
            len(verdict.unwell) if verdict is not None else 0,
        )
        yield GaugeMetricFamily(
            "corefleet_node_draining_for_health",
            "1 while the node's health asks that nothing new is given to it.",
            verdict is not None and verdict.should_drain,
        )
        used = GaugeMetricFamily(
            "corefleet_disk_used_ratio",
            "Share of space or inodes in use, whichever is scarcer, of a directory's file system.",
            labels=["directory"],
        )
        broken = GaugeMetricFamily(
            "corefleet_disk_broken",
            "1 for a directory whose file system is read-only or cannot be asked.",
            labels=["directory"],
        )
        synchronised = GaugeMetricFamily(
            "corefleet_clock_synchronised", "1 while something disciplines the node's clock."
        )
        offset = GaugeMetricFamily(
            "corefleet_clock_offset_seconds",
            "What the kernel has yet to correct of the clock, above 0 if it is behind.",
        )
        error = GaugeMetricFamily(
            "corefleet_clock_error_seconds",
            "The larger of the clock's offset and the kernel's estimate of its error.",
        )
        for sample in health.samples:
            match sample:
                case DiskState(error=""):
                    used.add_metric([sample.name], sample.used)
                    broken.add_metric([sample.name], sample.read_only)
                case DiskState():
                    broken.add_metric([sample.name], 1)
                case ClockState():
                    synchronised.add_metric([], sample.synchronised)
                    # Without a discipline the kernel's estimates mean nothing.
                    if sample.synchronised:
                        offset.add_metric([], sample.offset_s)
                        error.add_metric([], sample.error_s)
        yield from (used, broken, synchronised, offset, error)

    def _bindings(self) -> Iterator[Metric]:
        bindings = self._daemon.isolation.binding.bindings
        yield CounterMetricFamily(
            "corefleet_bindings_repaired",
            "Processes that were bound again after something had changed it.",
            value=bindings.repaired,
        )
        yield CounterMetricFamily(
            "corefleet_bindings_drained",
            "Processes that were drained because they could not be bound again.",
            value=bindings.drained,
        )

    def _bandwidth(self) -> Iterator[Metric]:
        bandwidth = self._daemon.isolation.bandwidth
        report = bandwidth.report
        active = GaugeMetricFamily(
            "corefleet_bandwidth_control_info",
            "1 for the actuator and the sensor of memory bandwidth that are in use.",
            labels=["actuator", "sensor"],
        )
        active.add_metric([bandwidth.actuator, report.source if report is not None else "none"], 1)
        yield active
        share = GaugeMetricFamily(
            "corefleet_batch_cpu_ratio",
            "Share of its CPUs that the batch class may use.",
            labels=["domain"],
        )
        squeezed = GaugeMetricFamily(
            "corefleet_batch_squeezed",
            "1 while the regulator holds batch below its ceiling, for what a sensor says.",
            labels=["domain"],
        )
        for domain, state in bandwidth.domains.items():
            if bandwidth.actuator != "none":
                share.add_metric([str(domain)], state.share)
                squeezed.add_metric([str(domain)], state.mode not in ("free", "static"))
        yield share
        yield squeezed
        yield GaugeMetricFamily(
            "corefleet_cpu_steal_ratio",
            "Share of CPU time that the hypervisor took.",
            report.steal if report is not None else 0.0,
        )
        for field, (name, what) in _LOADS.items():
            gauge = GaugeMetricFamily(name, what, labels=["domain"])
            for load in report.domains if report is not None else ():
                value = getattr(load, field)
                if value is not None:
                    gauge.add_metric([str(load.domain)], value)
            yield gauge
