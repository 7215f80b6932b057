"""Prometheus metrics: families made once at the start, children cached, served by a thread.

    metrics = Metrics()
    steps = metrics.counter("corefleet_steps", "Steps that were committed.", ["pool"])
    steps("support").inc()

Rendering a scrape takes milliseconds, so it happens in the server's thread and never on an
event loop. That thread holds the interpreter's lock while it renders: it lets go of it after
every few samples (Paced), or the loop would stand still as long.
"""

from __future__ import annotations

import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import structlog
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    disable_created_metrics,
    make_wsgi_app,
)
from prometheus_client.core import Metric
from prometheus_client.exposition import ThreadingWSGIServer, start_http_server
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from corefleet.errors import InvalidInput, Unavailable
from corefleet.tls import TlsFiles
from corefleet.tls_trouble import why_refused

_log = structlog.get_logger(__name__)

_PATIENCE_S = 10.0
"""How long a client may take for its handshake, and for each piece of its request."""

M = TypeVar("M", Counter, Gauge, Histogram)

LATENCY_BUCKETS_S = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
)

_SAMPLES_A_SLICE = 50
"""Rendered between two pauses: a fifth of a millisecond."""
_PAUSE_S = 0.0002
"""Long enough for a thread that waits for the interpreter's lock to get it."""


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

    def __init__(self, version: str = "unknown") -> None:
        # A second series for each counter and histogram, which nothing here reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.labels: dict[str, tuple[str, ...]] = {}
        """Label names of the families made here, by the family's name without `_total`."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        Info("corefleet_build", "What runs here.", registry=self.registry).info(
            {"version": version, "python": platform.python_version()}
        )
        self.scrapes = self.counter("corefleet_scrapes", "Scrapes of this endpoint.")
        self.scrape_cpu_s = self.counter(
            "corefleet_scrape_cpu_seconds", "CPU time that rendering scrapes took."
        )
        self.scrape_slice_s = self.gauge(
            "corefleet_scrape_slice_seconds",
            "Most CPU time at a stretch that the last scrape kept from the event loop.",
        )

    def counter(self, name: str, what: str, labels: Sequence[str] = ()) -> Family[Counter]:
        """Make a counter; `_total` is added to its name when exported."""
        self.labels[name] = tuple(labels)
        return Family(Counter(name, what, labels, registry=self.registry))

    def gauge(self, name: str, what: str, labels: Sequence[str] = ()) -> Family[Gauge]:
        """Make a gauge; its unit ends the name."""
        self.labels[name] = tuple(labels)
        return Family(Gauge(name, what, labels, registry=self.registry))

    def histogram(
        self,
        name: str,
        what: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = LATENCY_BUCKETS_S,
    ) -> Family[Histogram]:
        """Make a histogram; its unit, seconds or bytes, ends the name."""
        self.labels[name] = tuple(labels)
        return Family(Histogram(name, what, labels, registry=self.registry, buckets=buckets))


class Paced(Collector):
    """A registry's metrics, with a pause after every few samples that a renderer takes.

    Give it to an exposition function in the registry's stead. One scrape at a time: of
    several, each would lengthen the others' hold on the interpreter's lock.
    """

    def __init__(self, metrics: Metrics, pause: Callable[[float], None] = time.sleep) -> None:
        self._metrics = metrics
        self._pause = pause
        self._rendering = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """Yield all families; their samples pause, too."""
        return self._paced(self._metrics.registry)

    def restricted_registry(self, names: Iterable[str]) -> Collector:
        """Return what a scrape with `?name[]=` parameters asks for."""
        return self._metrics.registry.restricted_registry(names)

    def _paced(self, registry: Collector) -> Iterator[Metric]:
        with self._rendering:
            slices = _Slices(self._pause)
            began_s = time.thread_time()
            for metric in registry.collect():
                metric.samples = _PacedSamples(metric.samples, slices)
                yield metric
                slices.end()
            self._metrics.scrapes().inc()
            self._metrics.scrape_cpu_s().inc(time.thread_time() - began_s)
            self._metrics.scrape_slice_s().set(slices.longest_s)


class _Slices:
    """CPU time of the rendering thread between its pauses."""

    def __init__(self, pause: Callable[[float], None]) -> None:
        self._pause = pause
        self._began_s = time.thread_time()
        self.longest_s = 0.0

    def end(self) -> None:
        """Let go of the interpreter's lock; another slice begins."""
        self.longest_s = max(self.longest_s, time.thread_time() - self._began_s)
        self._pause(_PAUSE_S)
        self._began_s = time.thread_time()


class _PacedSamples(list[Sample]):
    """Samples of one family that pause while they are gone through."""

    def __init__(self, samples: Iterable[Sample], slices: _Slices) -> None:
        super().__init__(samples)
        self._slices = slices

    def __iter__(self) -> Iterator[Sample]:
        for number, sample in enumerate(super().__iter__(), 1):
            yield sample
            if number % _SAMPLES_A_SLICE == 0:
                self._slices.end()


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


class _Silent(WSGIRequestHandler):
    """Logs no requests."""

    def log_message(self, format: str, *args: Any) -> None:
        return


class _SecureServer(ThreadingWSGIServer):
    """Shakes hands in the thread of each connection: who is slow at it holds up nobody."""

    files: TlsFiles

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(_PATIENCE_S)
        with self.files.server_context().wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if isinstance(error, OSError):
            _log.warning("metrics not served", peer=client_address[0], reason=why_refused(error))
        else:
            super().handle_error(request, client_address)


def serve(metrics: Metrics, address: str, tls: TlsFiles | None = None) -> MetricsServer:
    """Serve `metrics` at `address`, host:port; port 0 takes a free one.

    With `tls` by HTTPS, to clients whose certificate it believes.

    Raises InvalidInput when the address is none, Unavailable when it cannot be had.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidInput("metrics", address, "host:port, e.g. 127.0.0.1:9100")
    try:
        if tls is None:
            server, thread = start_http_server(int(port), host.strip("[]"), Paced(metrics))
        else:
            server, thread = _start_secure(int(port), host.strip("[]"), Paced(metrics), tls)
    except (OSError, OverflowError) as error:
        raise Unavailable(f"metrics cannot be served at {address}: {error}") from error
    return MetricsServer(server, thread)


def _start_secure(
    port: int, host: str, registry: Collector, tls: TlsFiles
) -> tuple[WSGIServer, threading.Thread]:
    """Do what prometheus_client's start_http_server does.

    Its own TLS shakes hands in the thread that accepts, and keeps its first certificate.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    kind = type("Server", (_SecureServer,), {"address_family": family, "files": tls})
    server: WSGIServer = make_server(
        host, port, make_wsgi_app(registry), kind, handler_class=_Silent
    )
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return server, thread
