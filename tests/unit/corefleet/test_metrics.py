"""Metrics are exported as they were counted."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from prometheus_client import generate_latest

from corefleet.config import TlsConfig
from corefleet.errors import InvalidInput, Unavailable
from corefleet.identity import Identity
from corefleet.metrics import Metrics, MetricsServer, Paced, serve
from corefleet.tls import TlsFiles
from tests.servers.authority import Authority


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


NAGIOS = Identity("monitor", "m1")


@pytest.fixture
def secure(metrics: Metrics, tmp_path: Path) -> Iterator[tuple[MetricsServer, Authority]]:
    authority = Authority()
    named = authority.write(tmp_path / "server", Identity("agentd", "n1"))
    server = serve(metrics, "127.0.0.1:0", TlsFiles.of(named))
    yield server, authority
    server.close()


def scrape_secure(server: MetricsServer, files: TlsConfig | None) -> bytes:
    context = None if files is None else TlsFiles(files.ca, files.cert, files.key).client_context()
    with urllib.request.urlopen(
        f"http{'s' if files else ''}://{server.address}/metrics", timeout=10, context=context
    ) as answer:
        return bytes(answer.read())


def test_metrics_are_for_those_with_a_certificate(
    secure: tuple[MetricsServer, Authority], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, authority = secure
    reasons: SimpleQueue[str] = SimpleQueue()

    def warned(_: str, *, peer: str, reason: str) -> None:
        reasons.put(reason)

    monkeypatch.setattr("corefleet.metrics._log", SimpleNamespace(warning=warned))
    monitor = authority.write(tmp_path / "monitor", NAGIOS)
    assert b"process_resident_memory_bytes" in scrape_secure(server, monitor)
    strange = Authority("foreign").write(tmp_path / "strange", NAGIOS, trusted=[authority])
    with pytest.raises(OSError, match=r"(?i)unknown.ca|reset|eof"):
        scrape_secure(server, strange)
    assert "its certificate is refused" in reasons.get(timeout=10)
    with pytest.raises((OSError, HTTPException)):
        scrape_secure(server, None)
    assert reasons.get(timeout=10) == "it does not speak TLS"


def test_a_client_that_does_not_shake_hands_holds_up_nobody(
    secure: tuple[MetricsServer, Authority], tmp_path: Path
) -> None:
    server, authority = secure
    monitor = authority.write(tmp_path / "monitor", NAGIOS)
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port))):
        assert scrape_secure(server, monitor)


def test_build_and_version_are_told(server: MetricsServer) -> None:
    assert any(line.startswith("corefleet_build_info{") for line in scrape(server))


def test_a_scrape_lets_go_of_the_interpreter_after_every_few_samples() -> None:
    metrics = Metrics()
    pauses: list[float] = []
    pools = metrics.gauge("corefleet_pools", "Many.", ["pool"])
    for number in range(500):
        pools(f"p{number}").set(number)

    text = generate_latest(Paced(metrics, pauses.append)).decode()

    families = text.count("# TYPE")
    assert len(pauses) == families + 500 // 50
    assert min(pauses) > 0.0
    assert text.count("corefleet_pools{") == 500
    assert text.count("# HELP corefleet_pools ") == 1


def test_what_a_scrape_cost_is_in_the_next_one(metrics: Metrics, server: MetricsServer) -> None:
    scrape(server)
    lines = dict(line.rsplit(" ", 1) for line in scrape(server) if not line.startswith("#"))

    assert float(lines["corefleet_scrapes_total"]) == 1.0
    cpu_s = float(lines["corefleet_scrape_cpu_seconds_total"])
    assert 0.0 < float(lines["corefleet_scrape_slice_seconds"]) <= cpu_s


def test_some_families_can_be_asked_for_by_name(metrics: Metrics, server: MetricsServer) -> None:
    metrics.gauge("corefleet_one", "One.")().set(1)
    metrics.gauge("corefleet_two", "Two.")().set(2)
    url = f"http://{server.address}/metrics?name[]=corefleet_two"

    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()

    assert "corefleet_two 2.0" in text
    assert "corefleet_one" not in text


def test_no_series_tell_when_a_counter_was_made(metrics: Metrics, server: MetricsServer) -> None:
    metrics.counter("corefleet_steps", "Steps.", ["pool"])("support").inc()

    assert not [line for line in scrape(server) if "_created" in line]
