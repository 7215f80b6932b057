"""Metrics of a node, read from its state when they are scraped: nothing is counted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agentd.core.node import Node


class NodeCollector(Collector):
    """Exports attempts and slots by pool, and units in trouble. Runs in the server's thread."""

    def __init__(self, node: Node, troubles: Callable[[], tuple[str, ...]]) -> None:
        self._node = node
        self._troubles = troubles

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
