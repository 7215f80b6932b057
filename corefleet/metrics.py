"""Prometheus metrics: families made once at the start, children cached, served by a thread.

    metrics = Metrics()
    steps = metrics.counter("corefleet_steps", "Steps that were committed.", ["pool"])
    steps("support").inc()

Rendering a scrape takes tens of milliseconds in a large process, so it happens in the
server's thread and never on an event loop.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Generic, TypeVar
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import start_http_server
from prometheus_client.process_collector import ProcessCollector

from corefleet.errors import InvalidInput, Unavailable

M = TypeVar("M", Counter, Gauge, Histogram)

LATENCY_BUCKETS_S = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
)


class Family(Generic[M]):
    """A metric with its children by label values; calling it returns a child.

    A child is looked up in a plain dict: prometheus_client's own `labels` costs several
    times as much as the increment. Keep label values few: names of pools and domains,
    never of tasks or sessions.
    """

    __slots__ = ("_known", "_parent")

    def __init__(self, parent: M) -> None:
        self._parent: M = parent
        self._known: dict[tuple[str, ...], M] = {}

    def __call__(self, *values: str) -> M:
        """Return the child for `values`, in the order of the family's labels."""
        child = self._known.get(values)
        if child is None:
            child = self._parent.labels(*values) if values else self._parent
            self._known[values] = child
        return child

    def value(self, *values: str) -> float:
        """Return where the counter or gauge for `values` stands. Takes some microseconds."""
        for metric in self(*values).collect():
            return float(metric.samples[0].value)
        return 0.0

    def known(self) -> set[tuple[str, ...]]:
        """Return the label values of all children."""
        return set(self._known)

    def forget(self, *values: str) -> None:
        """Stop exporting a child, e.g. of a pool that is gone."""
        if self._known.pop(values, None) is not None and values:
            self._parent.remove(*values)


class Metrics:
    """The metrics of one process, with those of the process itself."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

    def counter(self, name: str, what: str, labels: Sequence[str] = ()) -> Family[Counter]:
        """Make a counter; `_total` is added to its name when exported."""
        return Family(Counter(name, what, labels, registry=self.registry))

    def gauge(self, name: str, what: str, labels: Sequence[str] = ()) -> Family[Gauge]:
        """Make a gauge; its unit ends the name."""
        return Family(Gauge(name, what, labels, registry=self.registry))

    def histogram(
        self,
        name: str,
        what: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = LATENCY_BUCKETS_S,
    ) -> Family[Histogram]:
        """Make a histogram; its unit, seconds or bytes, ends the name."""
        return Family(Histogram(name, what, labels, registry=self.registry, buckets=buckets))


class MetricsServer:
    """The HTTP endpoint of a process's metrics, on a thread of its own."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread

    @property
    def address(self) -> str:
        """host:port that is listened on."""
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def close(self) -> None:
        """Stop serving. Idempotent; takes up to half a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(metrics: Metrics, address: str) -> MetricsServer:
    """Serve `metrics` at `address`, host:port; port 0 takes a free one.

    Raises InvalidInput when the address is none, Unavailable when it cannot be had.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidInput("metrics", address, "host:port, e.g. 127.0.0.1:9100")
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), metrics.registry)
    except (OSError, OverflowError) as error:
        raise Unavailable(f"metrics cannot be served at {address}: {error}") from error
    return MetricsServer(server, thread)
