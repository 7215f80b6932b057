"""Real controlds for tests: started as processes of their own, killed, stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from types import TracebackType

_READY_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 15.0


def controld_toml(
    name: str, nats: str, etcd: str, *, shards: int = 16, streams: int = 2, lease_ttl_s: float = 1.0
) -> str:
    """Return a configuration for tests: any free port, short times, few shards."""
    return f"""
id = "{name}"
listen = "127.0.0.1:0"
insecure = true
lease_ttl_s = {lease_ttl_s}

[nats]
servers = ["{nats}"]

[etcd]
endpoints = ["{etcd}"]

[log]
level = "debug"
format = "json"

[cluster]
shards = {shards}
streams = {streams}
"""


class ControldServer:
    """One controld. Methods block; in a test call them by asyncio.to_thread."""

    def __init__(self, directory: Path, name: str, config: str) -> None:
        self.name = name
        self._config = directory / f"{name}.toml"
        self._config.write_text(config)
        self._process: subprocess.Popen[str] | None = None
        self._readers: list[threading.Thread] = []
        self._lines: deque[str] = deque(maxlen=2000)
        self.address = ""

    def start(self, *arguments: str) -> None:
        """Start and return when it serves; raises RuntimeError."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "controld", "--config", str(self._config), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        ready = threading.Event()
        self._readers = [
            threading.Thread(target=self._read_ready, args=(self._process, ready)),
            threading.Thread(target=self._read_log, args=(self._process,)),
        ]
        for reader in self._readers:
            reader.start()
        if not ready.wait(_READY_TIMEOUT_S) or not self.address:
            self._end(signal.SIGKILL)
            raise RuntimeError(f"controld {self.name} does not start:\n{self.output()}")

    def kill(self) -> None:
        """Kill -9 and return when it is gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """Stop politely; return its exit code."""
        return self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """Stop the process from running, with its connections open."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Kill -9 if it runs. Idempotent."""
        if self._process is not None:
            self._end(signal.SIGKILL)

    @property
    def pid(self) -> int:
        return self._running().pid

    def output(self) -> str:
        """Return the last lines of its log."""
        return "".join(self._lines)

    def events(self) -> list[dict[str, object]]:
        """Return the last lines of its log, parsed."""
        return [json.loads(line) for line in list(self._lines) if line.startswith("{")]

    def __enter__(self) -> ControldServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def _read_ready(self, process: subprocess.Popen[str], ready: threading.Event) -> None:
        assert process.stdout is not None
        with process.stdout:
            line = process.stdout.readline()
            if line:
                self.address = str(json.loads(line)["listen"])
            ready.set()
            for line in process.stdout:
                self._lines.append(line)

    def _read_log(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                self._lines.append(line)

    def _end(self, number: signal.Signals) -> int:
        process = self._running()
        process.send_signal(number)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for reader in self._readers:
            reader.join()
        self._process = None
        return process.returncode

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise RuntimeError(f"controld {self.name} is not running")
        return self._process
