"""The TCP port that answers liveness probes, in agentd's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from corefleet.errors import InvalidInput, Unavailable

_PATIENCE_S = 2.0
_MOST_BYTES = 256


class PortInUse(Unavailable):
    """The address cannot be listened on."""


class ProbePort:
    """Answers each line with `corefleet <node> <epoch>`; `epoch` is asked each time."""

    def __init__(self, node: str, epoch: Callable[[], int]) -> None:
        self._node = node
        self._epoch = epoch
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, asyncio.Event] = {}
        self.address = ""

    async def start(self, listen: str) -> None:
        """Listen at `listen`, host:port. Raises InvalidInput, PortInUse."""
        host, _, port = listen.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise InvalidInput("probe_listen", listen, "host:port, e.g. 127.0.0.1:4711")
        try:
            self._server = await asyncio.start_server(
                self._serve, host.strip("[]"), int(port), limit=_MOST_BYTES
            )
        except OSError as error:
            raise PortInUse(f"probe_listen: cannot listen at {listen}: {error}") from error
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stop answering. Idempotent."""
        if self._server is not None:
            self._server.close()
            for writer, ended in tuple(self._open.items()):
                writer.transport.abort()
                await ended.wait()
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended = self._open[writer] = asyncio.Event()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while (await reader.readline()).endswith(b"\n"):
                    writer.write(f"corefleet {self._node} {self._epoch()}\n".encode())
                    await writer.drain()
        except (OSError, ValueError, TimeoutError):
            # A prober that vanishes, dawdles or babbles is cut off: nothing is owed to it.
            return
        finally:
            writer.close()
            del self._open[writer]
            ended.set()
