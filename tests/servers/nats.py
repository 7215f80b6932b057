"""A real nats-server with JetStream for tests: started on a free port, killed, frozen, stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from corefleet.adapters.servers import find_nats_server
from corefleet.config import TlsConfig
from tests.servers.etcd import free_ports

READY = "Server is ready"
READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
STARTS = 3


class NatsServer:
    """One server. Methods block; in a test call them by asyncio.to_thread.

    `restart()` after `kill()` or `stop()` takes the same port and data. `arguments` are
    more arguments of nats-server; with `tls` it asks its clients for certificates.
    """

    def __init__(
        self, directory: Path, arguments: tuple[str, ...] = (), tls: TlsConfig | None = None
    ) -> None:
        self._directory = directory
        if tls is not None:
            # The server reads certificates again only where it has a file of configuration.
            config = directory / "nats.conf"
            config.write_text(
                f"tls {{ ca_file: {json.dumps(tls.ca)}, cert_file: {json.dumps(tls.cert)}, "
                f"key_file: {json.dumps(tls.key)}, verify: true }}\n"
            )
            arguments = ("-c", str(config), *arguments)
        self._arguments = arguments
        self._port = 0
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._lines: deque[str] = deque(maxlen=200)
        self._watched: list[tuple[str, Callable[[], None]]] = []

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        return self._running().pid

    def start(self) -> None:
        """Start on a free port and return when it serves; raises RuntimeError."""
        for _ in range(STARTS):
            self._port = free_ports(1)[0]
            if self._launch():
                return
        raise RuntimeError(f"nats-server does not start:\n{self.output()}")

    def restart(self) -> None:
        """Start on the same port and data and return when it serves; raises RuntimeError."""
        if not self._launch():
            raise RuntimeError(f"nats-server does not start again:\n{self.output()}")

    def kill(self) -> None:
        """Kill -9 and return when it is gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Stop politely and return when it is gone. Idempotent."""
        if self._process is not None:
            self._end(signal.SIGTERM)

    def reload(self) -> None:
        """Have it read its certificates again; `reloaded` is then in its output."""
        os.kill(self.pid, signal.SIGHUP)

    def freeze(self) -> None:
        """Stop the process from running, with its connections open."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def output(self) -> str:
        """Return the last lines that the server wrote."""
        return "".join(self._lines)

    def watch(self, words: str, seen: Callable[[], None]) -> None:
        """Call `seen`, in another thread, at each line of output from now on with `words`."""
        self._watched.append((words, seen))

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
        command = [
            *(str(find_nats_server()), "--addr", "127.0.0.1", "--port", str(self._port)),
            *self._stored(),
            *self._arguments,
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

    def _stored(self) -> tuple[str, ...]:
        return ("--jetstream", "--store_dir", str(self._directory / "data"))

    def _read(self, process: subprocess.Popen[str], ready: threading.Event) -> None:
        """Follow the output to its end, so that the server never waits for a full pipe."""
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._lines.append(line)
                for words, seen in list(self._watched):
                    if words in line:
                        seen()
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
            raise RuntimeError("nats-server is not running")
        return self._process
