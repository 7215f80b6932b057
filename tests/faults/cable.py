"""A cable that is slow: passes frames between two links, each a while after it came.

    python -m tests.faults.cable LINK LINK MILLISECONDS

Prints a line when it passes frames. Packets are carried with the kernel's own header
(PACKET_VNET_HDR, packet(7)), so that segments and checksums that the kernel had put off
stay put off.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys

_ALL_FRAMES = 0x0003
_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_LARGEST_BYTES = 128 * 1024
_BUFFER_BYTES = 16 * 1024 * 1024


async def carry(one: str, other: str, delay_s: float) -> None:
    """Pass frames both ways until cancelled."""
    loop = asyncio.get_running_loop()
    ends = [_tap(one), _tap(other)]
    for source, sink in (ends, reversed(ends)):
        loop.add_reader(source, _read, loop, source, sink, delay_s)
    print("ready", flush=True)  # noqa: T201 - the maker waits for it
    await loop.create_future()


def _read(
    loop: asyncio.AbstractEventLoop, source: socket.socket, sink: socket.socket, delay_s: float
) -> None:
    try:
        while True:
            loop.call_later(delay_s, _write, sink, source.recv(_LARGEST_BYTES))
    except BlockingIOError:
        pass


def _write(sink: socket.socket, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # a full queue or a link that is down loses frames
        sink.send(frame)


def _tap(link: str) -> socket.socket:
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    tap.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    tap.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    tap.bind((link, _ALL_FRAMES))
    tap.setblocking(False)
    return tap


if __name__ == "__main__":
    asyncio.run(carry(sys.argv[1], sys.argv[2], int(sys.argv[3]) / 1000))
