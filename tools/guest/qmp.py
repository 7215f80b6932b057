"""QEMU's machine protocol: JSON lines over a Unix socket.

https://www.qemu.org/docs/master/interop/qmp-spec.html
"""

from __future__ import annotations

import json
import socket
import time
from collections import deque
from typing import Any

from tools.guest.errors import GuestError

_REPLY_LIMIT_S = 30.0


class Monitor:
    """One connection to a QEMU; used by one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = b""
        self._events: deque[dict[str, Any]] = deque(maxlen=1000)
        self._next(time.monotonic() + _REPLY_LIMIT_S)  # the greeting
        self.execute("qmp_capabilities")

    def close(self) -> None:
        self._socket.close()

    def execute(self, command: str, **arguments: Any) -> Any:
        """Run a command and return what it returns; raises GuestError."""
        request = {"execute": command, "arguments": arguments}
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise GuestError(f"QEMU is gone: {error}") from error
        deadline = time.monotonic() + _REPLY_LIMIT_S
        while True:
            message = self._next(deadline)
            if "error" in message:
                raise GuestError(f"QEMU refused {command}: {message['error']['desc']}")
            if "return" in message:
                return message["return"]
            self._events.append(message)

    def wait_migrated(self, timeout_s: float) -> None:
        """Return when a migration has completed (events must be switched on)."""
        deadline = time.monotonic() + timeout_s
        while True:
            message = self._events.popleft() if self._events else self._next(deadline)
            if message.get("event") != "MIGRATION":
                continue
            status = message["data"]["status"]
            if status == "completed":
                return
            if status == "failed":
                raise GuestError("QEMU could not save or load its state")

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                data = self._socket.recv(65536)
            except TimeoutError as error:
                raise GuestError("QEMU did not answer in time") from error
            except OSError as error:
                raise GuestError(f"QEMU is gone: {error}") from error
            if not data:
                raise GuestError("QEMU ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message
