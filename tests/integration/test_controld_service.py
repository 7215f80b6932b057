"""controld as a service of systemd: what it tells the socket that systemd gives it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

from tests.integration.control_plane import ControlPlane
from tests.servers.controld import controld_toml


async def test_controld_says_when_it_serves_lives_and_ends(
    plane: ControlPlane, tmp_path: Path
) -> None:
    config = tmp_path / "controld.toml"
    config.write_text(controld_toml("c7", plane.nats.url, plane.etcd.endpoint))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "controld", "--config", str(config)),
            env={
                **os.environ,
                "NOTIFY_SOCKET": str(tmp_path / "notify"),
                "WATCHDOG_USEC": "400000",
            },
            stdout=asyncio.subprocess.DEVNULL,
        )

        async def told(what: str) -> None:
            loop = asyncio.get_running_loop()
            while what not in (await loop.sock_recv(systemd, 4096)).decode():
                pass

        try:
            async with asyncio.timeout(60):
                await told("READY=1")
                for _ in range(3):
                    await told("WATCHDOG=1")
                process.send_signal(signal.SIGTERM)
                await told("STOPPING=1")
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_a_configuration_is_checked_without_starting_anything(tmp_path: Path) -> None:
    async def check(program: str, text: str) -> int | None:
        path = tmp_path / f"{program}.toml"
        path.write_text(text)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", program, "--config", str(path), "--check-config"),
            stderr=asyncio.subprocess.DEVNULL,
        )
        return await asyncio.wait_for(process.wait(), 60)

    assert await check("controld", 'id = "c1"\ninsecure = true\n') == 0
    assert await check("controld", 'id = "c1"\nlease_ttl = 3\n') == 2
    assert await check("agentd", f'insecure = true\nnode_id = "n1"\ndata_dir = "{tmp_path}"\n') == 0
    assert await check("agentd", f'node_id = "n 1"\ndata_dir = "{tmp_path}"\n') == 2
