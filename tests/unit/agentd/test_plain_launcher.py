"""The plain launcher with real processes: bound and verified, watched, and mortal."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from agentd.core.topology import Overrides
from agentd.hostfs import HostFs
from agentd.launch import ExitStatus, LaunchSpec, PlainLauncher
from agentd.launch.verify import wrong_binding
from agentd.probes import discover
from corefleet.errors import Incompatible, LaunchFailed
from tests.unit.agentd.machines import write_tree

TOPOLOGY = discover(HostFs(), Overrides())
DOMAIN = next(iter(TOPOLOGY.domains.values()))
CPU = DOMAIN.cpus[-1]
SLEEP = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")


def spec(*command: str, cpus: tuple[int, ...] = (CPU,), log: Path | None = None) -> LaunchSpec:
    return LaunchSpec(
        name="test", command=command or SLEEP, cpus=cpus, domain=DOMAIN.domain, log=log
    )


@pytest.fixture
async def launcher() -> PlainLauncher:
    return await PlainLauncher.find(HostFs(), DOMAIN.cpus, DOMAIN.domain, require_numa=False)


async def test_a_process_is_bound_as_asked_in_a_group_of_its_own(
    launcher: PlainLauncher, tmp_path: Path
) -> None:
    process = await launcher.start(spec(log=tmp_path / "log" / "it.log"))
    try:
        assert os.sched_getaffinity(process.pid) == {CPU}
        assert os.getpgid(process.pid) == process.pid
        assert psutil.Process(process.pid).cmdline() == list(SLEEP)
        if not launcher.unisolated:
            policies = HostFs().memory_policies(process.pid)
            assert policies
            assert set(policies) == {f"bind:{DOMAIN.domain}"}
    finally:
        process.kill()
        assert await process.wait() == ExitStatus(signal=signal.SIGKILL)


async def test_an_exit_is_noticed_at_once(launcher: PlainLauncher) -> None:
    process = await launcher.start(spec())
    before = time.monotonic()
    os.kill(process.pid, signal.SIGKILL)
    status = await process.wait()
    assert time.monotonic() - before < 2.0
    assert str(status) == "killed by SIGKILL"
    process.kill()
    process.terminate()


async def test_exit_codes_and_output_are_kept(launcher: PlainLauncher, tmp_path: Path) -> None:
    log = tmp_path / "it.log"
    code = "import time; time.sleep(0.2); print('bye'); raise SystemExit(3)"
    process = await launcher.start(spec(sys.executable, "-c", code, log=log))
    assert await process.wait() == ExitStatus(code=3)
    assert log.read_text() == "bye\n"


async def test_what_a_process_started_ends_with_it(launcher: PlainLauncher) -> None:
    code = (
        "import subprocess, sys, time; "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "time.sleep(600)"
    )
    process = await launcher.start(spec(sys.executable, "-c", code))
    parent = psutil.Process(process.pid)
    async with asyncio.timeout(10):
        while not (children := parent.children()):  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, 2)
    assert not alive


async def test_a_program_that_is_not_there_is_a_failure_with_its_name(
    launcher: PlainLauncher, tmp_path: Path
) -> None:
    with pytest.raises(LaunchFailed, match=r"ended at once.*no-such-program"):
        await launcher.start(spec("no-such-program", log=tmp_path / "it.log"))


async def test_cpus_that_are_not_there_are_a_failure(
    launcher: PlainLauncher, tmp_path: Path
) -> None:
    with pytest.raises(LaunchFailed, match="ended at once"):
        await launcher.start(spec(cpus=(4095,), log=tmp_path / "it.log"))


async def test_an_unbound_start_is_a_failure_and_leaves_nothing(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    widener = (
        "import os, sys, time; os.sched_setaffinity(0, range(os.cpu_count())); "
        f"open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )

    class Later(HostFs):
        """Lets the process run until it has widened its affinity."""

        def command_line(self, pid: int) -> tuple[str, ...] | None:
            return super().command_line(pid) if pid_file.exists() else ()

    if len(TOPOLOGY.online) < 2:
        pytest.skip("a machine of one CPU has nothing to widen to")
    launcher = await PlainLauncher.find(Later(), DOMAIN.cpus, DOMAIN.domain, require_numa=False)
    with pytest.raises(LaunchFailed, match=f"may run on CPUs .*; expected {CPU}"):
        await launcher.start(spec(sys.executable, "-c", widener))
    assert not psutil.pid_exists(int(pid_file.read_text()))


async def test_kill_9_of_the_starter_ends_what_it_started(tmp_path: Path) -> None:
    starter = (
        "import asyncio, sys\n"
        "from agentd.hostfs import HostFs\n"
        "from agentd.launch import LaunchSpec, PlainLauncher\n"
        "async def main():\n"
        f"    where = {DOMAIN.cpus!r}, {DOMAIN.domain}\n"
        "    launcher = await PlainLauncher.find(HostFs(), *where, False)\n"
        f"    spec = LaunchSpec(name='it', command={SLEEP!r}, cpus=({CPU},), "
        f"domain={DOMAIN.domain})\n"
        "    process = await launcher.start(spec)\n"
        "    print(process.pid, flush=True)\n"
        "    await process.wait()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", starter, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert process.stdout is not None
    child = psutil.Process(int(await process.stdout.readline()))
    process.kill()
    await process.communicate()
    _, alive = await asyncio.to_thread(psutil.wait_procs, [child], 2)
    assert not alive


async def test_without_numactl_the_error_names_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Incompatible, match="install the package numactl"):
        await PlainLauncher.find(HostFs(), DOMAIN.cpus, DOMAIN.domain, require_numa=False)


async def test_a_kernel_without_numa_is_said_and_can_be_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    numactl = tmp_path / "numactl"
    numactl.write_text("#!/bin/sh\necho 'No NUMA support available on this system.' >&2\nexit 1\n")
    numactl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    launcher = await PlainLauncher.find(HostFs(), (CPU,), DOMAIN.domain, require_numa=False)
    assert "No NUMA support" in launcher.unisolated[0]
    process = await launcher.start(spec())
    assert os.sched_getaffinity(process.pid) == {CPU}
    process.kill()
    await process.wait()
    with pytest.raises(Incompatible, match="`require` has numa-binding"):
        await PlainLauncher.find(HostFs(), (CPU,), DOMAIN.domain, require_numa=True)


@pytest.mark.parametrize(
    ("files", "wrong"),
    [
        ({"status": "Cpus_allowed_list:\t1\nMems_allowed_list:\t1\n"}, None),
        ({"status": "Cpus_allowed_list:\t0-1\nMems_allowed_list:\t1\n"}, "may run on CPUs 0-1"),
        (
            {
                "status": "Cpus_allowed_list:\t1\nMems_allowed_list:\t0-1\n",
                "numa_maps": "55e0 bind:1 file=/x\n7f00 bind=static:1 heap\n",
            },
            None,
        ),
        (
            {
                "status": "Cpus_allowed_list:\t1\nMems_allowed_list:\t0-1\n",
                "numa_maps": "55e0 bind:1 file=/x\n7f00 default heap\n",
            },
            "memory policy is default; expected bind:1",
        ),
        ({"status": "Cpus_allowed_list:\t1\nMems_allowed_list:\t0-1\n"}, "cannot be read"),
        ({}, "it is gone"),
    ],
)
def test_a_binding_is_read_from_the_kernel(
    tmp_path: Path, files: dict[str, str], wrong: str | None
) -> None:
    host = write_tree(tmp_path, {f"proc/7/{name}": text for name, text in files.items()})
    found = wrong_binding(host, 7, (1,), (1,), memory=True)
    assert (found is None) if wrong is None else (found is not None and wrong in found)
