"""The probe of a node's own port: only the right node at the right epoch is alive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from controld.probe import probe

Serve = Callable[[bytes | None], Any]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Return a coroutine function that serves one fixed answer, None being silence."""
    async with AsyncExitStack() as stack:
        over = asyncio.Event()

        async def start(answer: bytes | None) -> str:
            async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                line = await reader.readline()
                if answer is None:
                    await over.wait()
                elif line == b"probe\n":
                    writer.write(answer)
                    await writer.drain()
                writer.close()

            server = await asyncio.start_server(handle, "127.0.0.1", 0)

            async def end() -> None:
                over.set()
                server.close()
                await server.wait_closed()

            stack.push_async_callback(end)
            return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

        yield start


@pytest.mark.parametrize(
    ("answer", "alive"),
    [
        (b"corefleet n1 7\n", True),
        (b"corefleet n2 7\n", False),
        (b"corefleet n1 8\n", False),
        (b"corefleet n1 7", False),
        (b"", False),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", False),
        (b"x" * 200_000, False),
    ],
)
async def test_only_the_right_answer_counts(serve: Serve, answer: bytes, alive: bool) -> None:
    found = await probe(await serve(answer), "n1", 7, 2.0)
    assert found == ("alive" if alive else "nobody")


async def test_silence_is_nobody_within_the_deadline(serve: Serve) -> None:
    address = await serve(None)
    async with asyncio.timeout(1.5):
        assert await probe(address, "n1", 7, 0.2) in ("nobody", "unable")


async def test_a_refused_connection_is_nobody(free_port: Callable[[], int]) -> None:
    assert await probe(f"127.0.0.1:{free_port()}", "n1", 7, 2.0) == "nobody"


@pytest.mark.parametrize("address", ["", "nowhere", "127.0.0.1:", "127.0.0.1:x"])
async def test_an_address_that_is_none_is_nobody(address: str) -> None:
    assert await probe(address, "n1", 7, 0.5) == "nobody"
