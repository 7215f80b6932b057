"""A real etcd for tests: started on free ports, killed, frozen, restarted, stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self

from agentctl.local.processes import free_port
from corefleet.adapters.servers import find_etcd
from corefleet.config import TlsConfig

READY = "ready to serve client requests"
READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
STARTS = 3


def free_ports(count: int) -> list[int]:
    """Return TCP ports of the loopback address that nobody listens on.

    None that outgoing connections are given: a server that is started again must find
    its port still free.
    """
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)


class EtcdServer:
    """One member on its own. Methods block; in a test call them by asyncio.to_thread.

    `restart()` after `kill()` or `stop()` takes the same ports and data. `heartbeat_ms`
    20 makes the shortest lease 1 s. With `tls` it asks its clients for certificates.
    """

    def __init__(
        self, directory: Path, heartbeat_ms: int = 20, tls: TlsConfig | None = None
    ) -> None:
        self._directory = directory
        self._tls = tls
        self._heartbeat_ms = heartbeat_ms
        self._ports: list[int] = []
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._lines: deque[str] = deque(maxlen=200)

    @property
    def endpoint(self) -> str:
        """host:port of the client interface."""
        return f"127.0.0.1:{self._ports[0]}"

    @property
    def pid(self) -> int:
        return self._running().pid

    def start(self) -> None:
        """Start on free ports and return when it serves; raises RuntimeError."""
        for _ in range(STARTS):
            self._ports = free_ports(2)
            if self._launch():
                return
        raise RuntimeError(f"etcd does not start:\n{self.output()}")

    def restart(self) -> None:
        """Start on the same ports and data and return when it serves; raises RuntimeError."""
        if not self._launch():
            raise RuntimeError(f"etcd does not start again:\n{self.output()}")

    def kill(self) -> None:
        """Kill -9 and return when it is gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Stop politely and return when it is gone. Idempotent."""
        if self._process is not None:
            self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """Stop the process from running, with its connections open."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def output(self) -> str:
        """Return the last lines that the server wrote."""
        return "".join(self._lines)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._end(signal.SIGKILL)

    def _launch(self) -> bool:
        client, peer = (f"http://127.0.0.1:{port}" for port in self._ports)
        secure: tuple[str, ...] = ()
        if self._tls is not None:
            client = client.replace("http:", "https:")
            secure = ("--client-cert-auth", "--trusted-ca-file", self._tls.ca)
            secure += ("--cert-file", self._tls.cert, "--key-file", self._tls.key)
        command = [
            *(str(find_etcd()), "--name", "test", "--data-dir", str(self._directory / "data")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"test={peer}"),
            *("--heartbeat-interval", str(self._heartbeat_ms)),
            *("--election-timeout", str(self._heartbeat_ms * 10)),
            *secure,
        ]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        ready = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(self._process, ready))
        self._reader.start()
        if not ready.wait(READY_TIMEOUT_S) or self._process.poll() is not None:
            self._end(signal.SIGKILL)
            return False
        return True

    def _read(self, process: subprocess.Popen[str], ready: threading.Event) -> None:
        """Follow the output to its end, so that the server never waits for a full pipe."""
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._lines.append(line)
                if READY in line:
                    ready.set()
        process.wait()
        ready.set()

    def _end(self, number: signal.Signals) -> None:
        process = self._running()
        process.send_signal(number)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._reader is not None:
            self._reader.join()
        self._process = self._reader = None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise RuntimeError("etcd is not running")
        return self._process
