"""Gauges that the exporter keeps: members, owners, queues, connections, clocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from controld.cluster import Cluster
from controld.exporter import OFFSET_ROUND_S, Exporter
from controld.gauges import make_gauges
from controld.registry import Registry
from corefleet.background import Background
from corefleet.bus import Bus
from corefleet.messages.wire import Heartbeat
from corefleet.metrics import Metrics


class Plant:
    """A controld of four shards, with tables that tests fill."""

    def __init__(self) -> None:
        self.now = 0.0
        self.metrics = Metrics()
        self.gauges = make_gauges(self.metrics)
        self.tables = {
            name: SimpleNamespace(records={})
            for name in ("controlds", "shards", "racks", "nodes", "pools")
        }
        cluster = SimpleNamespace(
            settings=SimpleNamespace(shards=4),
            bus=SimpleNamespace(connected=True),
            clock=SimpleNamespace(monotonic=lambda: self.now),
        )
        self.beats_bus = SimpleNamespace(connected=False)
        self.exporter = Exporter(
            cast("Cluster", cluster),
            Background(lambda error: None),
            cast("Registry", SimpleNamespace(**self.tables)),
            cast("Bus", self.beats_bus),
            self.gauges,
        )

    def set(self, table: str, **records: Any) -> None:
        self.tables[table].records.update(records)

    def show(self, queued: dict[str, int] | None = None) -> None:
        self.exporter.show(lambda: (0, queued or {}, {}))

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


def owned_by(controld: str) -> SimpleNamespace:
    return SimpleNamespace(controld=controld)


def test_units_of_dead_controlds_and_free_ones_have_no_owner() -> None:
    plant = Plant()
    plant.set("controlds", c1=None)
    plant.set("shards", s0=owned_by("c1"), s1=owned_by("c1"), s2=owned_by("dead"))
    plant.set("nodes", n1=SimpleNamespace(rack="r1"), n2=SimpleNamespace(rack="r2"))
    plant.set("racks", r1=owned_by("c1"))

    plant.show()

    assert plant.value("corefleet_controlds") == 1
    assert plant.value("corefleet_shards_configured") == 4
    assert plant.value("corefleet_unowned_units", kind="shard") == 2
    assert plant.value("corefleet_unowned_units", kind="rack") == 1


def test_each_connection_is_told_apart() -> None:
    plant = Plant()
    plant.show()
    assert plant.value("corefleet_nats_connected", use="tasks") == 1
    assert plant.value("corefleet_nats_connected", use="beats") == 0


def test_a_pool_whose_queue_is_empty_shows_zero() -> None:
    plant = Plant()
    plant.set("pools", p=None, q=None)
    plant.show({"p": 3})
    assert plant.value("corefleet_queued_tasks", pool="p") == 3
    assert plant.value("corefleet_queued_tasks", pool="q") == 0
    plant.show()
    assert plant.value("corefleet_queued_tasks", pool="p") == 0
    assert plant.value("corefleet_in_flight_tasks", pool="p") == 0


def test_a_pool_that_is_no_more_is_not_shown() -> None:
    plant = Plant()
    plant.set("pools", p=None)
    plant.show({"p": 3})
    plant.tables["pools"].records.clear()
    plant.show()
    assert plant.value("corefleet_queued_tasks", pool="p") is None


def test_the_clock_that_is_off_most_is_shown_after_a_round() -> None:
    plant = Plant()
    for node, sent_ms in (("n1", 999_998), ("n2", 1_000_700)):
        beat = Heartbeat(node=node, rack="r", epoch=1, number=1, sent_ms=sent_ms)
        for _ in range(16):
            plant.gauges.beat_meter.heard(beat, plant.now, 1_000_000)
    plant.show()
    assert plant.value("corefleet_fleet_clock_offset_max_seconds") == 0

    plant.now += OFFSET_ROUND_S
    plant.show()

    assert plant.value("corefleet_fleet_clock_offset_max_seconds") == pytest.approx(0.7)
