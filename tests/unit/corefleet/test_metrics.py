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

from corefleet.config import TlsConfig
from corefleet.errors import InvalidInput, Unavailable
from corefleet.identity import Identity
from corefleet.metrics import Metrics, MetricsServer, serve
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
