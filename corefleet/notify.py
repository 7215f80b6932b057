"""What systemd is told of a service: ready, its status, and that it is alive.

The protocol is one datagram of lines to a Unix socket: sd_notify(3), whose manual page holds
implementations without a library; an abstract socket's name begins with `@`.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

import structlog

from corefleet.config import notify_settings

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Notifier:
    """Tells systemd; does nothing without a socket. `watchdog_s`: its limit, 0 for none."""

    path: str = ""
    watchdog_s: float = 0.0

    @classmethod
    def from_environment(cls) -> Notifier:
        """Return the notifier of this service, as systemd started it."""
        return cls(*notify_settings())

    def ready(self, status: str) -> None:
        """The service does its work from now on."""
        self._tell(f"READY=1\nSTATUS={status}")

    def status(self, text: str) -> None:
        """`systemctl status` shows `text`, one line."""
        self._tell(f"STATUS={text}")

    def alive(self) -> None:
        """Feed the watchdog."""
        self._tell("WATCHDOG=1")

    def stopping(self, status: str) -> None:
        """The service ends."""
        self._tell(f"STOPPING=1\nSTATUS={status}")

    def _tell(self, lines: str) -> None:
        if not self.path:
            return
        address = f"\0{self.path[1:]}" if self.path.startswith("@") else self.path
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as out:
                out.sendto(lines.encode(), address)
        except OSError as error:
            # systemd being away must not end a service; its watchdog judges that for itself.
            _log.warning("systemd was not told", lines=lines, reason=str(error))
