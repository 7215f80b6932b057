"""A TCP relay that stands between a client and a server, for tests of bad networks."""

from __future__ import annotations

import asyncio
import contextlib


class Relay:
    """Passes a server's connections on, until it is told to keep answers or to refuse."""

    def __init__(self, endpoint: str) -> None:
        self._target = endpoint.split(":")
        self._writers: list[asyncio.StreamWriter] = []
        self._pumps: set[asyncio.Task[None]] = set()
        self.withholds = False
        self._refuses = False

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.endpoint = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()
        self._server.close()
        await self._server.wait_closed()

    async def refuse(self) -> None:
        """Break all connections, and new ones as soon as they are made."""
        self._refuses = True
        for writer in self._writers:
            writer.close()
        if self._pumps:
            await asyncio.wait(self._pumps)

    def accept(self) -> None:
        self._refuses = False

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.close()
            return
        back_reader, back_writer = await asyncio.open_connection(*self._target)
        self._writers += [writer, back_writer]
        self._pumps.add(asyncio.create_task(self._pump(reader, back_writer, False)))
        self._pumps.add(asyncio.create_task(self._pump(back_reader, writer, True)))

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, answers: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                if not (answers and self.withholds):
                    sink.write(data)
                    await sink.drain()
        sink.close()
