"""Metrics are exported as they were counted."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

import pytest

from corefleet.errors import InvalidInput, Unavailable
from corefleet.metrics import Metrics, MetricsServer, serve


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def server(metrics: Metrics) -> Iterator[MetricsServer]:
    server = serve(metrics, "127.0.0.1:0")
    yield server
    server.close()


def scrape(server: MetricsServer) -> list[str]:
    with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=10) as answer:
        return str(answer.read(), "utf-8").splitlines()


def test_what_was_counted_is_exported(metrics: Metrics, server: MetricsServer) -> None:
    steps = metrics.counter("corefleet_steps", "Steps.", ["pool", "kind"])
    running = metrics.gauge("corefleet_running_tasks", "Tasks that run.")
    append = metrics.histogram("corefleet_append_seconds", "Appends.", ["pool"])

    steps("support", "tool").inc()
    steps("support", "tool").inc(2)
    steps("support", "infer").inc()
    running().set(7)
    append("support").observe(0.003)

    lines = scrape(server)
    assert 'corefleet_steps_total{kind="tool",pool="support"} 3.0' in lines
    assert 'corefleet_steps_total{kind="infer",pool="support"} 1.0' in lines
    assert "corefleet_running_tasks 7.0" in lines
    assert 'corefleet_append_seconds_bucket{le="0.005",pool="support"} 1.0' in lines
    assert 'corefleet_append_seconds_bucket{le="0.002",pool="support"} 0.0' in lines
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)


def test_children_are_made_once(metrics: Metrics) -> None:
    steps = metrics.counter("corefleet_steps", "Steps.", ["pool"])

    assert steps("support") is steps("support")
    assert steps("support") is not steps("codegen")


def test_a_forgotten_child_is_not_exported(metrics: Metrics, server: MetricsServer) -> None:
    steps = metrics.counter("corefleet_steps", "Steps.", ["pool"])
    steps("support").inc()

    steps.forget("support")
    steps.forget("never there")

    assert not [line for line in scrape(server) if 'pool="support"' in line]
    steps("support").inc()
    assert 'corefleet_steps_total{pool="support"} 1.0' in scrape(server)


def test_a_port_in_use_is_named(metrics: Metrics, server: MetricsServer) -> None:
    with pytest.raises(Unavailable, match=f"at {server.address}: .*in use"):
        serve(metrics, server.address)


@pytest.mark.parametrize("address", ["", "9100", ":9100", "localhost:", "localhost:http"])
def test_an_address_must_name_host_and_port(metrics: Metrics, address: str) -> None:
    with pytest.raises(InvalidInput, match=r"^metrics: .*expected host:port"):
        serve(metrics, address)
