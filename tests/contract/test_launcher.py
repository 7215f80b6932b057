"""The contract of launchers, held by each of them with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

from agentd.core.cpulist import format_list
from agentd.hostfs import HostFs
from agentd.launch import ExitStatus, Launcher, LaunchSpec, Process, SystemdLauncher
from corefleet.errors import LaunchFailed
from tests.contract.launcher_backends import BACKENDS, DOMAIN, PATIENCE_S, Backend, spec
from tests.unit.agentd.launch.scripted_systemd import until

pytestmark = pytest.mark.timeout(300)

Start = Callable[[LaunchSpec], Awaitable[Process]]

SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


@pytest.fixture(params=list(BACKENDS))
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    async with AsyncExitStack() as stack:
        yield BACKENDS[request.param](tmp_path, stack)


@pytest.fixture
async def launcher(backend: Backend) -> Launcher:
    return await backend.launcher()


@pytest.fixture
async def start(launcher: Launcher) -> AsyncIterator[Start]:
    started: list[Process] = []

    async def begin(given: LaunchSpec) -> Process:
        process = await launcher.start(given)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        await process.wait()


async def nothing_is_left(backend: Backend) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await backend.left():  # noqa: ASYNC110 - systemd's list has no event
            await asyncio.sleep(0.01)


async def test_a_process_is_the_command_bound_to_cpus_and_memory(
    start: Start, launcher: Launcher
) -> None:
    given = spec(*SLEEP)
    process = await start(given)
    assert process.spec == given
    assert process.name == given.name
    assert psutil.Process(process.pid).cmdline() == list(SLEEP)
    assert os.sched_getaffinity(process.pid) == set(given.cpus)
    assert await process.drift() is None
    if not any("memory is not bound" in line for line in launcher.unisolated):
        host = HostFs()
        policies = host.memory_policies(process.pid) or ()
        mems = host.status_field(process.pid, "Mems_allowed_list")
        assert mems == str(DOMAIN.domain) or set(policies) == {f"bind:{DOMAIN.domain}"}


@pytest.mark.parametrize("word", ["$HOME", "%n %%", "a b\"c'", "\\x20", "é", "${X}", "$$"])
async def test_the_command_is_taken_literally(start: Start, word: str) -> None:
    command = (*SLEEP, word)
    process = await start(spec(*command))
    assert psutil.Process(process.pid).cmdline() == list(command)


async def test_what_the_spec_adds_to_the_environment_is_there(start: Start) -> None:
    process = await start(spec(*SLEEP, environment={"CF_X": "a $HOME %n b"}))
    assert psutil.Process(process.pid).environ()["CF_X"] == "a $HOME %n b"


async def test_an_exit_code_is_told(start: Start, tmp_path: Path) -> None:
    go = tmp_path / "go"
    code = (
        "import os, time\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "raise SystemExit(3)"
    )
    process = await start(spec(sys.executable, "-c", code))
    waiting = [asyncio.create_task(process.wait()) for _ in range(2)]
    go.touch()
    assert await asyncio.gather(*waiting) == [ExitStatus(code=3)] * 2
    assert await process.drift() is None
    process.terminate()
    process.kill()


async def test_the_signal_that_killed_it_is_told(start: Start, backend: Backend) -> None:
    process = await start(spec(*SLEEP))
    os.kill(process.pid, signal.SIGSEGV)
    assert await process.wait() == ExitStatus(signal=signal.SIGSEGV)
    await nothing_is_left(backend)


async def test_terminate_asks_with_sigterm(start: Start) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "time.sleep(600)"
    )
    process = await start(spec(sys.executable, "-c", code))
    handles = 1 << (signal.SIGTERM - 1)
    await until(lambda: _caught_signals(process.pid) & handles, PATIENCE_S)
    process.terminate()
    assert await process.wait() == ExitStatus(code=7)


@pytest.mark.parametrize("how", ["kill", "death"])
async def test_what_it_started_ends_with_it(start: Start, how: str) -> None:
    code = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "time.sleep(600)"
    )
    process = await start(spec(sys.executable, "-c", code))
    parent = psutil.Process(process.pid)
    await until(parent.children, PATIENCE_S)
    children = parent.children()
    if how == "kill":
        process.kill()
    else:
        os.kill(process.pid, signal.SIGKILL)
    assert await process.wait() == ExitStatus(signal=signal.SIGKILL)
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, PATIENCE_S)
    assert not alive


async def test_the_last_line_of_a_log_is_kept(
    start: Start, launcher: Launcher, tmp_path: Path
) -> None:
    if isinstance(launcher, SystemdLauncher):
        pytest.skip("its output goes to the journal")
    code = "import time; time.sleep(0.3); print('one'); print('two')"
    process = await start(spec(sys.executable, "-c", code, log=tmp_path / "log"))
    await process.wait()
    assert process.last_words() == "two"


@pytest.mark.parametrize(
    ("command", "cpus", "says"),
    [
        (("/no/such/program",), DOMAIN.cpus[-1:], "ended at once: exit code 1"),
        (SLEEP, (4095,), "ended at once|did not start|expected 4095"),
        ((sys.executable, "-c", "raise SystemExit(5)"), DOMAIN.cpus[-1:], None),
    ],
)
async def test_a_start_that_fails_leaves_nothing(
    launcher: Launcher,
    backend: Backend,
    command: tuple[str, ...],
    cpus: tuple[int, ...],
    says: str | None,
) -> None:
    given = spec(*command, cpus=cpus)
    if says is not None:
        with pytest.raises(LaunchFailed, match=says):
            await launcher.start(given)
    else:
        # It may have been the command, bound, for a moment.
        with contextlib.suppress(LaunchFailed):
            process = await launcher.start(given)
            assert await process.wait() == ExitStatus(code=5)
    await nothing_is_left(backend)
    ours = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == list(command)]
    assert not ours


async def test_drift_is_noticed_and_repaired(start: Start) -> None:
    if len(DOMAIN.cpus) < 2:
        pytest.skip("a domain of one CPU cannot be narrowed")
    process = await start(spec(*SLEEP, cpus=DOMAIN.cpus))
    assert await process.drift() is None
    os.sched_setaffinity(process.pid, DOMAIN.cpus[:1])
    wrong = await process.drift()
    assert wrong is not None
    assert f"expected {format_list(DOMAIN.cpus)}" in wrong
    await process.rebind()
    assert await process.drift() is None
    assert os.sched_getaffinity(process.pid) == set(DOMAIN.cpus)


async def test_every_thread_is_bound_again(start: Start) -> None:
    if len(DOMAIN.cpus) < 2:
        pytest.skip("a domain of one CPU cannot be narrowed")
    code = (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "time.sleep(600)"
    )
    process = await start(spec(sys.executable, "-c", code, cpus=DOMAIN.cpus))
    await until(lambda: psutil.Process(process.pid).num_threads() == 2, PATIENCE_S)
    threads = [thread.id for thread in psutil.Process(process.pid).threads()]
    for thread in threads:
        os.sched_setaffinity(thread, DOMAIN.cpus[:1])
    await process.rebind()
    assert all(os.sched_getaffinity(thread) == set(DOMAIN.cpus) for thread in threads)


async def test_those_that_outlive_agentd_are_adopted(
    start: Start, launcher: Launcher, backend: Backend
) -> None:
    given = spec(*SLEEP, version="v1", environment={"A": "b"}, log=Path("/x"), memory_max=1 << 28)
    process = await start(given)
    assert await launcher.adopt() == () or launcher.outlives
    if not launcher.outlives:
        return
    await launcher.close()
    assert psutil.pid_exists(process.pid)
    heir = await backend.launcher()
    (adopted,) = await heir.adopt()
    assert (adopted.pid, adopted.spec) == (process.pid, given)
    assert await adopted.drift() is None
    adopted.kill()
    assert await adopted.wait() == ExitStatus(signal=signal.SIGKILL)
    await nothing_is_left(backend)
    assert await (await backend.launcher()).adopt() == ()


async def test_batch_is_squeezed_or_the_launcher_says_it_cannot(
    start: Start, launcher: Launcher
) -> None:
    process = await start(spec(*SLEEP, service_class="batch"))
    if not isinstance(launcher, SystemdLauncher):
        with pytest.raises(LaunchFailed, match="cannot be squeezed"):
            await launcher.squeeze(DOMAIN.domain, 0.5)
        await launcher.squeeze(DOMAIN.domain, None)
        return
    await launcher.squeeze(DOMAIN.domain, 0.5)
    async with asyncio.timeout(PATIENCE_S):
        while wrong := await process.drift():
            assert "cpu.max" in wrong
            await asyncio.sleep(0.05)
    await launcher.squeeze(DOMAIN.domain, None)
    async with asyncio.timeout(PATIENCE_S):
        while await process.drift():  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.05)


async def test_closing_twice_is_no_matter(launcher: Launcher) -> None:
    await launcher.close()
    await launcher.close()


def _caught_signals(pid: int) -> int:
    return int(HostFs().status_field(pid, "SigCgt") or "0", 16)
