"""Metrics of a node, read from its state when they are scraped: nothing is counted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agentd.core.node import Node
from agentd.core.supervision import UnitKey
from agentd.isolation import Isolation

_LOADS = {
    "utilisation": "Share of the domain's peak memory bandwidth in use.",
    "bytes_per_s": "Memory traffic of the domain.",
    "latency_ratio": "The canary's latency against its idle baseline.",
    "llc_hit": "Share of last-level cache look-ups that hit.",
    "remote_share": "Share of pages that were given to processes of other domains.",
}


class NodeCollector(Collector):
    """Exports attempts and slots by pool, units in trouble, and isolation.

    Runs in the server's thread: it reads what the loop replaces whole.
    """

    def __init__(
        self,
        node: Node,
        troubles: Callable[[], tuple[str, ...]],
        isolation: Isolation,
        out_of_memory: Callable[[], Mapping[UnitKey, int]],
    ) -> None:
        self._node = node
        self._troubles = troubles
        self._isolation = isolation
        self._out_of_memory = out_of_memory

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        attempts = CounterMetricFamily(
            "corefleet_attempts", "Attempts by what became of them.", labels=["pool", "outcome"]
        )
        for (pool, outcome), count in dict(self._node.tallies).items():
            attempts.add_metric([pool, outcome], count)
        yield attempts
        total = GaugeMetricFamily(
            "corefleet_slots", "Tasks that may run at once.", labels=["pool", "domain"]
        )
        used = GaugeMetricFamily(
            "corefleet_slots_used", "Tasks that run.", labels=["pool", "domain"]
        )
        for slot in self._node.slots():
            where = [slot.pool, str(slot.domain)]
            total.add_metric(where, slot.total)
            used.add_metric(where, slot.used)
        yield total
        yield used
        yield GaugeMetricFamily(
            "corefleet_units_in_trouble",
            "Workers and engines that fail again and again.",
            value=len(self._troubles()),
        )
        yield GaugeMetricFamily(
            "corefleet_node_epoch", "Epoch of the node, 0 while not registered.", self._node.epoch
        )
        yield from self._bindings()
        yield from self._bandwidth()

    def _bindings(self) -> Iterator[Metric]:
        bindings = self._isolation.binding.bindings
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
        killed = CounterMetricFamily(
            "corefleet_out_of_memory",
            "Processes that the kernel killed for want of memory.",
            labels=["kind", "name", "domain"],
        )
        for unit, count in self._out_of_memory().items():
            killed.add_metric([unit.kind, unit.name, str(unit.domain)], count)
        yield killed

    def _bandwidth(self) -> Iterator[Metric]:
        bandwidth = self._isolation.bandwidth
        report = bandwidth.report
        active = GaugeMetricFamily(
            "corefleet_bandwidth_control",
            "1 for the actuator and the sensor of memory bandwidth that are in use.",
            labels=["actuator", "sensor"],
        )
        active.add_metric([bandwidth.actuator, report.source if report is not None else "none"], 1)
        yield active
        share = GaugeMetricFamily(
            "corefleet_batch_share",
            "Share of its CPUs that the batch class may use.",
            labels=["domain"],
        )
        for domain, state in bandwidth.domains.items():
            share.add_metric([str(domain)], state.share)
        yield share
        yield GaugeMetricFamily(
            "corefleet_steal",
            "Share of CPU time that the hypervisor took.",
            report.steal if report is not None else 0.0,
        )
        for name, what in _LOADS.items():
            gauge = GaugeMetricFamily(f"corefleet_memory_{name}", what, labels=["domain"])
            for load in report.domains if report is not None else ():
                value = getattr(load, name)
                if value is not None:
                    gauge.add_metric([str(load.domain)], value)
            yield gauge
