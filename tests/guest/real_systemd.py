"""What only a real systemd and kernel can show of the launcher; tests/guest/test_launcher.py runs
it in the guest, with the launchers' contract. Collected only where it is named.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from agentd.core.cpulist import format_list
from agentd.launch import ExitStatus, Launcher, SystemdLauncher
from agentd.launch.systemd import SystemdProcess
from corefleet.errors import LaunchFailed
from tests.contract.launcher_backends import DOMAIN, MODELS, PATIENCE_S, Backend, spec
from tests.contract.test_launcher import SLEEP, Start, backend, launcher, nothing_is_left, start
from tests.unit.agentd.launch.scripted_systemd import until

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.parametrize("backend", ["systemd"], indirect=True),
]

__all__ = ["backend", "launcher", "start"]

_MIB = 1 << 20
_LIMIT = 32 * _MIB
_SQUEEZED_CPUS = 0.2
_BURN_S = 2.0


async def test_an_oom_kill_is_told_apart_from_a_kill_and_hits_nobody_else(
    start: Start, backend: Backend
) -> None:
    neighbour = await start(spec(*SLEEP, memory_max=_LIMIT))
    hog = await start(spec(sys.executable, "-c", _hog(), memory_max=_LIMIT))
    assert await hog.wait() == ExitStatus(signal=signal.SIGKILL, oom=True)
    assert await neighbour.drift() is None
    os.kill(neighbour.pid, signal.SIGKILL)
    assert await neighbour.wait() == ExitStatus(signal=signal.SIGKILL)
    await nothing_is_left(backend)


async def test_a_child_killed_for_memory_does_not_end_its_parent(start: Start) -> None:
    code = (
        "import subprocess, sys, time\n"
        f"hog = subprocess.run([sys.executable, '-c', {_hog()!r}])\n"
        "sys.exit(5 if hog.returncode == -9 else 6)"
    )
    process = await start(spec(sys.executable, "-c", code, memory_max=_LIMIT))
    status = await process.wait()
    assert (status.code, status.signal) == (5, None)


async def test_a_squeezed_batch_process_gets_its_share_of_a_cpu(
    start: Start, launcher: Launcher, tmp_path: Path
) -> None:
    go, told = tmp_path / "go", tmp_path / "told"
    code = (
        "import os, time\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        f"end, used = time.monotonic() + {_BURN_S}, time.process_time()\n"
        "while time.monotonic() < end: pass\n"
        f"open({str(told)!r}, 'w').write(str(time.process_time() - used))"
    )
    process = await start(spec(sys.executable, "-c", code, service_class="batch"))
    await launcher.squeeze(DOMAIN.domain, _SQUEEZED_CPUS)
    async with asyncio.timeout(PATIENCE_S):
        while await process.drift():  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.05)
    go.touch()
    assert await process.wait() == ExitStatus(code=0)
    # A period of the quota may be used up at once at each end.
    assert 0 < float(told.read_text()) / _BURN_S <= 1.5 * _SQUEEZED_CPUS
    await launcher.squeeze(DOMAIN.domain, None)


async def test_a_binding_that_somebody_changed_in_systemd_is_noticed_and_repaired(
    start: Start,
) -> None:
    process = await start(spec(*SLEEP))
    assert isinstance(process, SystemdProcess)
    other = DOMAIN.cpus[0]
    assert process.spec.cpus != (other,)
    changed = await asyncio.create_subprocess_exec(
        *("systemctl", "set-property", "--runtime", process.unit, f"AllowedCPUs={other}")
    )
    assert await changed.wait() == 0
    async with asyncio.timeout(PATIENCE_S):
        while (wrong := await process.drift()) is None:  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.05)
    assert f"expected {format_list(process.spec.cpus)}" in wrong
    await process.rebind()
    assert await process.drift() is None
    assert os.sched_getaffinity(process.pid) == set(process.spec.cpus)


async def test_a_node_that_is_not_there_is_a_failed_start(
    launcher: Launcher, backend: Backend
) -> None:
    with pytest.raises(LaunchFailed):
        await launcher.start(spec(*SLEEP, memory_nodes=(63,)))
    await nothing_is_left(backend)
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == list(SLEEP)]


@pytest.mark.parametrize(("kind", "sees"), [("engine", ["replica"]), ("worker", [])])
async def test_replicas_cannot_be_changed_by_the_units_of_the_node(
    start: Start, tmp_path: Path, kind: str, sees: list[str]
) -> None:
    replica = tmp_path / MODELS / "replica"
    replica.parent.mkdir()
    replica.write_text("right")
    replica.chmod(0o444)
    told = tmp_path / "told"
    code = (
        "import os, time\n"
        "seen, did = [], []\n"
        f"attempts = (lambda: seen.extend(os.listdir({str(replica.parent)!r})),"
        f" lambda: os.chmod({str(replica)!r}, 0o666), lambda: os.remove({str(replica)!r}))\n"
        "for number, attempt in enumerate(attempts):\n"
        "    try: attempt(); did.append(number)\n"
        "    except OSError: pass\n"
        f"open({str(told)!r}, 'w').write(repr((seen, did)))\n"
        "time.sleep(600)"
    )
    process = await start(spec(sys.executable, "-c", code, kind=kind))
    await until(lambda: told.exists() and told.read_text(), PATIENCE_S)
    process.kill()
    assert told.read_text() == repr((sees, [0] if sees else []))
    assert (replica.read_text(), replica.stat().st_mode & 0o777) == ("right", 0o444)


async def test_what_the_manager_of_the_machine_lacks_is_said(launcher: Launcher) -> None:
    assert isinstance(launcher, SystemdLauncher)
    assert launcher.outlives
    assert launcher.unisolated == ()


def _hog() -> str:
    """Return a program that takes twice the limit, page by page, and never ends by itself."""
    return f"import time\nheld = bytearray(b'x') * {2 * _LIMIT}\ntime.sleep(600)"
