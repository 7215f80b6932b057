"""The systemd launcher against a manager that answers as a test tells it to."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from agentd.core.cpulist import format_list
from agentd.core.topology import Overrides
from agentd.hostfs import HostFs
from agentd.launch import (
    Deadlines,
    ExitStatus,
    LaunchSpec,
    SystemdLauncher,
    SystemdSettings,
)
from agentd.probes import discover
from corefleet.errors import Incompatible, InvalidInput, LaunchFailed
from tests.unit.agentd.launch.scripted_systemd import (
    PrivateBus,
    Script,
    ScriptedSystemd,
    until,
    write,
)

TOPOLOGY = discover(HostFs(), Overrides())
DOMAIN = next(iter(TOPOLOGY.domains.values()))
SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")
SLICE = f"corefleet-online-d{DOMAIN.domain}.slice"
SLICE_GROUP = f"sys/fs/cgroup/corefleet.slice/corefleet-online.slice/{SLICE}"
LONG = Deadlines(call_s=20.0, job_s=20.0, verdict_s=20.0, applied_s=5.0)


def spec(*command: str, **changes: object) -> LaunchSpec:
    values: dict[str, object] = {
        "name": "it",
        "command": command or SLEEP,
        "cpus": DOMAIN.cpus[-1:],
        "domain": DOMAIN.domain,
        "pool": "support",
        "unit": "support",
    }
    return LaunchSpec(**{**values, **changes})  # type: ignore[arg-type]


class Node:
    """A machine with a scripted systemd, and agentds that come and go."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self.bus = PrivateBus(directory)
        self.systemd = ScriptedSystemd(directory / "tree")
        self.state = directory / "units"
        self._stack = stack

    @property
    def script(self) -> Script:
        return self.systemd.script

    async def up(self) -> None:
        await self.bus.start()
        self._stack.push_async_callback(self.bus.stop)
        await self.systemd.connect(self.bus.address)
        self._stack.push_async_callback(self.systemd.close)

    async def launcher(
        self, deadlines: Deadlines = LONG, node: str = "n1", **changes: object
    ) -> SystemdLauncher:
        settings = SystemdSettings(
            node=node,
            cpus={DOMAIN.domain: DOMAIN.cpus},
            batch_cpus={DOMAIN.domain: 1.0},
            numa=TOPOLOGY.numa,
        )
        settings = replace(settings, **changes)  # type: ignore[arg-type]
        launcher = await SystemdLauncher.find(
            self.systemd.host(), self.state, settings, self.bus.address, deadlines
        )
        self._stack.push_async_callback(launcher.close)
        return launcher

    def kept(self) -> list[str]:
        return [file.name for file in self.state.iterdir()]

    async def is_clean(self) -> None:
        """Wait until no unit and no kept spec is left."""
        await until(lambda: not (self.systemd.services() or self.kept()))


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with AsyncExitStack() as stack:
        node = Node(tmp_path, stack)
        await node.up()
        yield node


async def test_no_bus_is_no_systemd(tmp_path: Path) -> None:
    write(tmp_path, "sys/fs/cgroup/cgroup.controllers", "cpuset cpu memory pids")
    settings = SystemdSettings(node="n", cpus={}, batch_cpus={})
    address = f"unix:path={tmp_path}/no-such-bus"
    with pytest.raises(Incompatible, match=r"no systemd to start units with: .*no-such-bus"):
        await SystemdLauncher.find(HostFs(tmp_path), tmp_path, settings, address)


async def test_a_bus_without_systemd_is_no_systemd(node: Node) -> None:
    await node.systemd.disconnect()
    with pytest.raises(Incompatible, match="no systemd to start units with"):
        await node.launcher()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "is not mounted"),
        ({"sys/fs/cgroup/unified/cgroup.controllers": ""}, "is v1 or hybrid"),
        ({"sys/fs/cgroup/cgroup.controllers": "cpu io memory pids"}, "lacks .* cpuset"),
    ],
)
async def test_rule_10_other_control_groups_are_refused(
    tmp_path: Path, files: dict[str, str], says: str
) -> None:
    for path, text in files.items():
        write(tmp_path, path, text)
    settings = SystemdSettings(node="n", cpus={}, batch_cpus={})
    with pytest.raises(Incompatible, match=says):
        await SystemdLauncher.find(HostFs(tmp_path), tmp_path, settings)


async def test_rule_10_an_old_systemd_is_refused(node: Node) -> None:
    node.script.version = "248.13"
    with pytest.raises(Incompatible, match="systemd 248 is too old"):
        await node.launcher()


async def test_rule_10_a_property_that_this_build_lacks_is_left_out_and_said(node: Node) -> None:
    node.script.unknown = {"RestrictAddressFamilies", "LockPersonality"}
    launcher = await node.launcher()
    assert not any("socket" in line for line in launcher.unisolated)
    process = await launcher.start(spec())
    lost = [line for line in launcher.unisolated if "systemd 252 does not know" in line]
    assert len(lost) == 2
    assert len(node.systemd.services()) == len(node.kept()) == 1
    process.kill()
    await process.wait()
    await node.is_clean()


async def test_a_property_that_binds_is_never_left_out(node: Node) -> None:
    launcher = await node.launcher()
    await launcher.squeeze(DOMAIN.domain, None)
    node.script.unknown = {"AllowedCPUs"}
    with pytest.raises(LaunchFailed, match="Cannot set property AllowedCPUs"):
        await launcher.start(spec(service_class="batch"))
    await node.is_clean()


async def test_rule_4_units_lie_in_the_slice_of_their_class_and_domain(node: Node) -> None:
    launcher = await node.launcher()
    process = await launcher.start(spec(service_class="batch"))
    batch = node.systemd.units[f"corefleet-batch-d{DOMAIN.domain}.slice"]
    assert batch.properties["CPUQuotaPerSecUSec"] == 1_000_000
    assert batch.properties["AllowedCPUs"]
    (unit,) = node.systemd.services()
    assert node.systemd.units[unit].properties["Slice"] == batch.name
    process.kill()
    await process.wait()


async def test_rule_4_a_slice_that_is_there_is_set_up_again(node: Node) -> None:
    first = await node.launcher()
    (await first.start(spec())).kill()
    slice_ = node.systemd.units[SLICE]
    slice_.properties["AllowedCPUs"] = b""
    process = await (await node.launcher()).start(spec())
    assert slice_.properties["AllowedCPUs"] != b""
    process.kill()
    await process.wait()


async def test_rule_4_squeezing_goes_through_systemd(node: Node) -> None:
    launcher = await node.launcher()
    await launcher.squeeze(DOMAIN.domain, 0.25)
    batch = node.systemd.units[f"corefleet-batch-d{DOMAIN.domain}.slice"]
    assert batch.properties["CPUQuotaPerSecUSec"] == 250_000
    await launcher.squeeze(DOMAIN.domain, None)
    assert batch.properties["CPUQuotaPerSecUSec"] == (1 << 64) - 1
    with pytest.raises(InvalidInput, match="more than 0"):
        await launcher.squeeze(DOMAIN.domain, 0.0)
    with pytest.raises(LaunchFailed, match=r"d77\.slice: domain: 77"):
        await launcher.squeeze(77, 1.0)


async def test_a_job_that_fails_is_told_with_how(node: Node) -> None:
    launcher = await node.launcher()
    node.script.job_result = "failed"
    with pytest.raises(LaunchFailed, match=r"it: corefleet-w-support.* did not start: job failed"):
        await launcher.start(spec())
    await node.is_clean()
    assert node.systemd.started[-1].popen is not None
    assert not psutil.pid_exists(node.systemd.started[-1].popen.pid)


async def test_a_job_that_never_ends_is_given_up(node: Node) -> None:
    launcher = await node.launcher(replace(LONG, job_s=0.5))
    node.script.no_job_end = True
    with pytest.raises(LaunchFailed, match=r"took more than 0\.5 s"):
        await launcher.start(spec())
    await node.is_clean()


async def test_a_call_without_answer_is_given_up(node: Node) -> None:
    launcher = await node.launcher(replace(LONG, call_s=0.5))
    node.script.silent = {"SetUnitProperties"}
    process = await launcher.start(spec())
    with pytest.raises(LaunchFailed, match=r"SetUnitProperties: no answer within 0\.5 s"):
        await process.rebind()
    node.script.silent = set()
    process.kill()
    await process.wait()


async def test_an_unbound_start_is_a_failure_and_leaves_nothing(node: Node) -> None:
    launcher = await node.launcher()
    node.script.raw_limits = False
    with pytest.raises(LaunchFailed, match=r"not bound: .*cpuset\.cpus\.effective cannot be read"):
        await launcher.start(spec())
    await node.is_clean()


async def test_rule_3_a_node_that_is_gone_is_told_as_that(node: Node) -> None:
    launcher = await node.launcher()
    await launcher.squeeze(DOMAIN.domain, None)
    process = await launcher.start(spec())
    write(node.systemd.tree, f"{SLICE_GROUP}/cpuset.mems.effective", "7\n")
    with pytest.raises(LaunchFailed, match=r"node gone: .*without domain"):
        await launcher.start(spec("/no/such/program"))
    process.kill()
    await process.wait()


async def test_rule_3_a_node_that_systemd_cannot_bind_to_is_gone(node: Node) -> None:
    launcher = await node.launcher()
    write(node.systemd.tree, f"{SLICE_GROUP}/cpuset.mems.effective", "7\n")
    node.script.job_result = "failed"
    node.script.raw_limits = False
    with pytest.raises(LaunchFailed, match=r"node gone: .*without domain .*job failed"):
        await launcher.start(spec())
    await node.is_clean()


async def test_rule_7_death_is_seen_before_systemd_reaps(node: Node) -> None:
    launcher = await node.launcher()
    process = await launcher.start(spec())
    node.script.reaps.clear()
    asked = node.systemd.calls.count("GetAll")
    os.kill(process.pid, signal.SIGSEGV)
    await until(lambda: node.systemd.calls.count("GetAll") >= asked + 2)
    node.script.reaps.set()
    assert await process.wait() == ExitStatus(signal=signal.SIGSEGV)
    await node.is_clean()
    assert node.systemd.calls.count("ResetFailedUnit") == 1


async def test_rule_7_an_end_that_nobody_explains_is_lost(node: Node) -> None:
    launcher = await node.launcher(replace(LONG, verdict_s=0.3))
    process = await launcher.start(spec())
    node.script.reaps.clear()
    process.kill()
    assert await process.wait() == ExitStatus(lost=True)
    node.script.reaps.set()
    await node.is_clean()


async def test_rule_7_a_kill_for_memory_is_told_apart_from_a_kill(node: Node) -> None:
    launcher = await node.launcher()
    write(node.systemd.tree, f"{SLICE_GROUP}/memory.events", "oom 3\noom_kill 3\n")
    first, second, third = [await launcher.start(spec()) for _ in range(3)]
    write(node.systemd.tree, f"{SLICE_GROUP}/memory.events", "oom 4\noom_kill 4\n")
    os.kill(first.pid, signal.SIGKILL)
    assert await first.wait() == ExitStatus(signal=signal.SIGKILL, oom=True)
    os.kill(second.pid, signal.SIGKILL)
    assert await second.wait() == ExitStatus(signal=signal.SIGKILL)
    write(node.systemd.tree, f"{SLICE_GROUP}/memory.events", "oom 5\noom_kill 5\n")
    third.kill()
    assert await third.wait() == ExitStatus(signal=signal.SIGKILL)


async def test_rule_7_systemds_own_word_for_it_counts(node: Node) -> None:
    launcher = await node.launcher()
    process = await launcher.start(spec())
    node.script.result = "oom-kill"
    os.kill(process.pid, signal.SIGTERM)
    assert (await process.wait()).oom


async def test_rule_7_a_name_is_never_used_twice(node: Node) -> None:
    launcher = await node.launcher()
    for _ in range(2):
        process = await launcher.start(spec())
        process.kill()
        await process.wait()
    names = [unit.name for unit in node.systemd.started if unit.name.endswith(".service")]
    assert len(set(names)) == 2
    assert all(name.startswith(f"corefleet-w-support-d{DOMAIN.domain}-") for name in names)


async def test_rule_1_a_bus_that_comes_back_is_used_again(node: Node) -> None:
    launcher = await node.launcher()
    process = await launcher.start(spec())
    held = node.systemd.calls.count("RefUnit")
    await node.systemd.disconnect()
    await node.bus.stop()
    with pytest.raises(LaunchFailed, match="bus"):
        await launcher.start(spec())
    await node.bus.start()
    await node.systemd.connect(node.bus.address)
    await until(lambda: node.systemd.calls.count("RefUnit") > held)
    os.kill(process.pid, signal.SIGSEGV)
    assert await process.wait() == ExitStatus(signal=signal.SIGSEGV)
    second = await launcher.start(spec())
    second.kill()
    await second.wait()
    await node.is_clean()


async def test_a_bus_that_hangs_up_during_a_start_fails_it(node: Node) -> None:
    launcher = await node.launcher()
    await launcher.squeeze(DOMAIN.domain, None)
    node.script.no_job_end = True
    starting = asyncio.create_task(launcher.start(spec()))
    await until(node.systemd.services)
    await node.bus.stop()
    with pytest.raises(LaunchFailed):
        await starting
    await node.systemd.disconnect()
    node.script.no_job_end = False
    await node.bus.start()
    await node.systemd.connect(node.bus.address)
    # What could not be removed then is removed now.
    await node.is_clean()


async def test_rule_1_units_with_an_unreadable_spec_are_stopped(node: Node) -> None:
    first = await node.launcher()
    process = await first.start(spec())
    await first.close()
    (file,) = node.state.iterdir()
    file.write_text("{")
    assert await (await node.launcher()).adopt() == ()
    await node.is_clean()
    assert not psutil.pid_exists(process.pid)


async def test_rule_1_units_of_another_node_are_left_alone(node: Node) -> None:
    first = await node.launcher(node="n2")
    process = await first.start(spec())
    await first.close()
    other = node.state
    node.state = other.with_name("others")
    assert await (await node.launcher()).adopt() == ()
    assert psutil.pid_exists(process.pid)
    assert len(node.systemd.services()) == 1


async def test_rule_1_what_ended_unseen_is_cleaned_up(node: Node) -> None:
    first = await node.launcher()
    process = await first.start(spec())
    await first.close()
    (unit,) = node.systemd.services()
    os.kill(process.pid, signal.SIGKILL)
    await until(lambda: node.systemd.units[unit].ended is not None)
    (node.state / "corefleet-w-gone-d0-00.service.json").write_text("{}")
    assert await (await node.launcher()).adopt() == ()
    await node.is_clean()


async def test_rule_1_an_adopted_process_that_drifted_is_adopted_and_says_so(node: Node) -> None:
    if len(DOMAIN.cpus) < 2:
        pytest.skip("a domain of one CPU cannot be narrowed")
    first = await node.launcher()
    process = await first.start(spec(cpus=DOMAIN.cpus))
    await first.close()
    os.sched_setaffinity(process.pid, DOMAIN.cpus[:1])
    (adopted,) = await (await node.launcher()).adopt()
    assert await adopted.drift() is not None
    await adopted.rebind()
    assert await adopted.drift() is None
    adopted.kill()
    await adopted.wait()


async def test_limits_that_somebody_wrote_are_drift_and_set_again(node: Node) -> None:
    launcher = await node.launcher()
    process = await launcher.start(spec(memory_max=1 << 28))
    (unit,) = node.systemd.services()
    node.systemd.group_file(unit, "memory.max").write_text("max\n")
    wrong = await process.drift()
    assert wrong is not None
    assert "memory.max is 'max'; expected 268435456" in wrong
    await process.rebind()
    assert await process.drift() is None
    process.kill()
    await process.wait()


async def test_rule_6_the_system_can_be_kept_on_its_cpus(node: Node) -> None:
    launcher = await node.launcher()
    node.systemd.load("system.slice")
    node.systemd.load("init.scope")
    await launcher.confine_system((0, 9))
    properties = node.systemd.units["system.slice"].properties
    assert properties["AllowedCPUs"] == b"\x01\x02"
    assert node.systemd.units["init.scope"].properties == properties
    confined = node.systemd.group_file("system.slice", "cpuset.cpus")
    assert confined.read_text() == "0,9\n"
    await launcher.release_system()
    assert confined.read_text().strip() == format_list(TOPOLOGY.possible)
    assert properties["AllowedCPUs"] == b""


async def test_processes_live_on_when_agentd_closes(node: Node) -> None:
    launcher = await node.launcher()
    process = await launcher.start(spec())
    await launcher.close()
    assert psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE
    with pytest.raises(LaunchFailed, match="closed"):
        await launcher.start(spec())
