"""systemd's watchdog is fed by a loop that turns, while beats go out."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentd import watchdog as watchdog_module
from agentd.watchdog import Watchdog
from corefleet.notify import Notifier


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.setblocking(False)
        yield listening


async def heard(systemd: socket.socket) -> str:
    async with asyncio.timeout(5):
        return (await asyncio.get_running_loop().sock_recv(systemd, 4096)).decode()


def silent(systemd: socket.socket) -> bool:
    try:
        systemd.recv(4096)
    except BlockingIOError:
        return True
    return False


async def test_a_service_says_that_it_is_ready_and_what_it_does(systemd: socket.socket) -> None:
    notifier = Notifier(systemd.getsockname())
    notifier.ready("registered at epoch 3")
    assert await heard(systemd) == "READY=1\nSTATUS=registered at epoch 3"
    notifier.status("draining")
    assert await heard(systemd) == "STATUS=draining"
    notifier.stopping("ending")
    assert await heard(systemd) == "STOPPING=1\nSTATUS=ending"


async def test_without_systemd_nothing_is_said_and_a_dead_socket_ends_nothing(
    tmp_path: Path,
) -> None:
    Notifier().ready("alone")
    Notifier(str(tmp_path / "nobody")).alive()


async def test_the_watchdog_is_fed_only_while_beats_go_out(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog_module, "LEAST_PAUSE_S", 0.001)
    sent = 0
    asked = asyncio.Event()

    def count() -> int:
        asked.set()
        return sent

    watchdog = Watchdog(Notifier(systemd.getsockname(), watchdog_s=0.001), count)
    watchdog.start()
    assert await heard(systemd) == "WATCHDOG=1", "before it is registered nothing need go out"
    watchdog.expect()
    asked.clear()
    await asked.wait()
    while not silent(systemd):
        pass
    for _ in range(5):
        asked.clear()
        await asked.wait()
    assert silent(systemd)
    sent = 5
    assert await heard(systemd) == "WATCHDOG=1"
    watchdog.close()


async def test_without_a_limit_nothing_is_fed(systemd: socket.socket) -> None:
    watchdog = Watchdog(Notifier(systemd.getsockname()), lambda: 1)
    watchdog.start()
    assert silent(systemd)
    watchdog.close()
