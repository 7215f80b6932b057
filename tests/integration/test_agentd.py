"""A real agentd with real workers and a real NATS server, and a control plane by script."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import pytest

from agentd.hostfs import HostFs
from corefleet.messages.records import PoolSpec, Step
from corefleet.messages.wire import (
    AgentPublished,
    HeldAttempt,
    InventoryQuery,
    TaskFinished,
)
from tests.integration.scripted_control import ScriptedControl
from tests.servers.nats import NatsServer

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent

ECHO = PoolSpec(name="echo", agent="node_agents:Echo", python_path=(str(HERE),), slots=2, spares=0)
PATIENT = PoolSpec(name="patient", agent="node_agents:Patient", python_path=(str(HERE),), slots=3)


@dataclass
class RunningNode:
    """An agentd process that said it is ready."""

    process: asyncio.subprocess.Process
    ready: dict[str, object]

    @property
    def tree(self) -> list[psutil.Process]:
        """The daemon's own processes."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def running(self, module: str) -> list[psutil.Process]:
        return [child for child in self.tree if module in child.cmdline()]

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await self.process.wait()


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
async def control(nats: NatsServer) -> AsyncIterator[ScriptedControl]:
    control = await ScriptedControl.start(nats.url, (ECHO, PATIENT))
    yield control
    await control.close()


async def spawn(config: str, directory: Path, *arguments: str) -> asyncio.subprocess.Process:
    path = directory / "agentd.toml"
    path.write_text(config)
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agentd", "--config", str(path), *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )


def config_for(url: str, directory: Path) -> str:
    return (
        f'node_id = "n1"\ninsecure = true\ndata_dir = "{directory / "data"}"\n'
        f'[nats]\nservers = ["{url}"]\n[log]\nformat = "json"\n'
    )


@asynccontextmanager
async def running(nats: NatsServer, directory: Path) -> AsyncIterator[RunningNode]:
    process = await spawn(config_for(nats.url, directory), directory)
    assert process.stdout is not None
    assert process.stderr is not None
    said = asyncio.create_task(process.stderr.read())
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 30.0)
        if not line:
            pytest.fail(f"agentd ended: {(await said).decode()}")
        yield RunningNode(process, msgspec.json.decode(line))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        print((await said).decode())  # noqa: T201 - shown when the test fails


@pytest.fixture
async def node(
    nats: NatsServer, control: ScriptedControl, tmp_path: Path
) -> AsyncIterator[RunningNode]:
    async with running(nats, tmp_path) as node:
        yield node


async def gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return those that are still there after two seconds."""
    return (await asyncio.to_thread(psutil.wait_procs, processes, 2.0))[1]


async def test_a_task_runs_from_assignment_to_its_stored_result(
    control: ScriptedControl, node: RunningNode
) -> None:
    assert node.ready["ready"] == "agentd"
    assert node.ready["epoch"] == 1
    item = await control.placed("echo", "s1", "hello", "n1")
    (answer,) = await control.assign(item)
    assert answer.accepted
    finished = await control.event(item.record.task, TaskFinished)
    assert finished.result == await control.result(item)
    assert finished.result.state == "done"
    assert finished.result.output == "hello"
    again = await control.placed("echo", "s1", "more", "n1")
    assert again.head is not None
    assert again.head.version == 1
    assert again.head.last_task == item.record.task
    assert (again.head.home_node, again.head.home_domain) == ("n1", 0)
    assert again.head.state.history[-1].text == "hello"
    assert (await control.assign(again))[0].accepted
    await control.event(again.record.task, TaskFinished)


async def test_the_node_beats_with_its_slots_and_answers_probes(
    control: ScriptedControl, node: RunningNode
) -> None:
    beat = await control.until(
        lambda: next((b for b in control.beats if all(s.total for s in b.slots) and b.slots), None),
        "a beat with slots",
    )
    assert beat.epoch == 1
    assert {(slot.pool, slot.total) for slot in beat.slots} == {("echo", 2), ("patient", 3)}
    assert beat.loop_age_s < 0.3
    later = await control.until(
        lambda: next((b for b in control.beats if b.number >= beat.number + 5), None), "more beats"
    )
    assert later.sent_ms - beat.sent_ms < 2000
    host, port = str(node.ready["probe"]).split(":")
    assert control.registrations[0].probe_address == f"{host}:{port}"
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"probe\n")
    assert await reader.readline() == b"corefleet n1 1\n"
    writer.close()
    await writer.wait_closed()


async def test_offers_are_refused_with_the_reason_and_answered_the_same_twice(
    control: ScriptedControl, node: RunningNode, tmp_path: Path
) -> None:
    held = [await control.placed("patient", f"s{n}", str(tmp_path / f"g{n}"), "n1") for n in "123"]
    assert all(answer.accepted for answer in await control.assign(*held))
    full = await control.placed("patient", "s4", "x", "n1")
    unknown = await control.placed("nobody", "s1", "x", "n1")
    elsewhere = await control.placed("echo", "s1", "x", "n1", domain=7)
    answers = await control.assign(full, unknown, elsewhere)
    assert [answer.accepted for answer in answers] == [False] * 3
    assert "slots" in answers[0].reason
    assert "nobody" in answers[1].reason
    assert "domain 7" in answers[2].reason
    assert await control.assign(full, unknown, elsewhere) == answers
    assert (await control.assign(held[0]))[0].accepted
    late = await control.placed("echo", "s9", "x", "n1", owner_epoch=5)
    assert (await control.assign(late))[0].accepted
    stale = await control.placed("echo", "s9", "x", "n1", owner_epoch=4)
    assert "owner epoch 4" in (await control.assign(stale))[0].reason


async def test_a_dropped_attempt_frees_its_slot_and_never_comes_back(
    control: ScriptedControl, node: RunningNode, tmp_path: Path
) -> None:
    item = await control.placed("patient", "s1", str(tmp_path / "gate"), "n1")
    await control.assign(item)
    await control.event(item.record.task, AgentPublished)
    control.drop(item, "a test says so")
    held = (HeldAttempt(item.record.task, 1),)
    shard = int(item.record.task.split("-")[0], 16)
    answer = await control.inventory("n1", InventoryQuery(shard=shard, owner_epoch=1, held=held))
    while not answer.absent:
        answer = await control.inventory(
            "n1", InventoryQuery(shard=shard, owner_epoch=1, held=held)
        )
    assert answer.absent == held
    assert not (await control.assign(item))[0].accepted
    next_one = await control.again(item, "n1")
    assert (await control.assign(next_one))[0].accepted
    (tmp_path / "gate").touch()
    finished = await control.event(item.record.task, TaskFinished)
    assert finished.result.attempt == 2
    steps: tuple[Step, ...] = finished.result.steps
    assert [step.attempt for step in steps if step.kind == "publish"] == [1]


async def test_a_killed_workers_attempt_goes_on_at_the_next_worker(
    control: ScriptedControl, node: RunningNode, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    item = await control.placed("patient", "s1", str(gate), "n1")
    await control.assign(item)
    await control.event(item.record.task, AgentPublished)
    first = int(gate.with_suffix(".pids").read_text())
    os.kill(first, signal.SIGKILL)
    gate.touch()
    finished = await control.event(item.record.task, TaskFinished)
    assert finished.result.state == "done"
    assert finished.result.attempt == 1
    pids = [int(line) for line in gate.with_suffix(".pids").read_text().split()]
    assert len(pids) == 2
    assert pids[0] == first != pids[1]
    assert [step.kind for step in finished.result.steps].count("publish") == 1


async def test_processes_are_bound_and_say_so_in_ps(
    control: ScriptedControl, node: RunningNode
) -> None:
    workers = node.running("agentd.worker")
    assert len(workers) == 3  # one of echo; one of patient, and its spare
    for worker in workers:
        command = worker.cmdline()
        assert command[command.index("--domain") + 1] == "0"
        assert "--cpus" in command
        assert os.getpgid(worker.pid) == worker.pid


async def test_sigterm_gives_back_what_runs_and_leaves_no_process(
    control: ScriptedControl, node: RunningNode, tmp_path: Path
) -> None:
    item = await control.placed("patient", "s1", str(tmp_path / "gate"), "n1")
    await control.assign(item)
    await control.event(item.record.task, AgentPublished)
    tree = node.tree
    assert await node.stop() == 0
    assert not await gone(tree)
    returned = await control.until(lambda: next(iter(control.returned), None), "a return")
    assert (returned.task, returned.attempt) == (item.record.task, 1)
    assert returned.node == "n1"


async def test_kill_9_leaves_no_process(control: ScriptedControl, node: RunningNode) -> None:
    tree = node.tree
    assert len(tree) == 4
    node.process.kill()
    await node.process.wait()
    assert not await gone(tree)


async def test_a_node_declared_lost_drops_all_and_comes_back_with_a_new_epoch(
    control: ScriptedControl, node: RunningNode, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    item = await control.placed("patient", "s1", str(gate), "n1")
    await control.assign(item)
    await control.event(item.record.task, AgentPublished)
    control.declare_lost("n1", 1)
    await control.until(lambda: len(control.registrations) == 2, "a second registration")
    assert control.registrations[-1].domains[0].slots == {"echo": 2, "patient": 3}
    await control.until(lambda: any(beat.epoch == 2 for beat in control.beats), "a new beat")
    assert not (await control.assign(item))[0].accepted
    gate.touch()
    next_one = await control.again(item, "n1")
    assert (await control.assign(next_one))[0].accepted
    finished = await control.event(item.record.task, TaskFinished)
    assert finished.result.attempt == 2


async def test_changed_pools_start_and_stop_workers(
    control: ScriptedControl, node: RunningNode
) -> None:
    other = msgspec.structs.replace(ECHO, name="other")
    control.change_pools(other)
    item = await control.placed("other", "s1", "hi", "n1")

    def offered() -> bool:
        slots = control.beats[-1].slots if control.beats else ()
        return [(slot.pool, slot.total) for slot in slots] == [("other", 2)]

    await control.until(offered, "the new pool's slots")
    assert (await control.assign(item))[0].accepted
    await control.event(item.record.task, TaskFinished)


async def test_a_restart_of_nats_costs_no_task(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    server = NatsServer(tmp_path)
    await asyncio.to_thread(server.start)
    try:
        control = await ScriptedControl.start(server.url, (PATIENT,))
        async with running(server, tmp_path) as node:
            item = await control.placed("patient", "s1", str(gate), "n1")
            await control.assign(item)
            await control.event(item.record.task, AgentPublished)
            await asyncio.to_thread(server.kill)
            gate.touch()
            await asyncio.to_thread(server.restart)
            result = await control.result(item)
            assert await node.stop() == 0
        await control.close()
    finally:
        await asyncio.to_thread(server.stop)
    assert (result.state, result.attempt, result.output) == ("done", 1, "opened")


async def test_metrics_tell_of_attempts_and_slots(
    nats: NatsServer, control: ScriptedControl, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    address = f"127.0.0.1:{free_port()}"
    config = f'metrics = "{address}"\n' + config_for(nats.url, tmp_path)
    process = await spawn(config, tmp_path)
    assert process.stdout is not None
    await process.stdout.readline()
    item = await control.placed("echo", "s1", "hello", "n1")
    await control.assign(item)
    await control.event(item.record.task, TaskFinished)

    def scrape() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
            return str(answer.read().decode())

    text = await asyncio.to_thread(scrape)
    process.terminate()
    await process.communicate()
    assert 'corefleet_attempts_total{outcome="finished",pool="echo"} 1.0' in text
    assert 'corefleet_slots{domain="0",pool="echo"} 2.0' in text


async def test_sigterm_before_any_controld_answered_ends_it_cleanly(
    nats: NatsServer, tmp_path: Path
) -> None:
    process = await spawn(config_for(nats.url, tmp_path), tmp_path)
    assert process.stderr is not None
    async with asyncio.timeout(20):
        while b"Not registered yet" not in await process.stderr.readline():
            pass
    tree = psutil.Process(process.pid).children(recursive=True)
    assert len(tree) == 1
    process.terminate()
    out, _ = await process.communicate()
    assert process.returncode == 0
    assert not out
    assert not await gone(tree)


async def test_discover_prints_the_machine() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agentd", "discover", "--json"),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    assert msgspec.json.decode(out)["domains"]


async def test_a_dead_heartbeat_program_is_replaced(
    control: ScriptedControl, node: RunningNode
) -> None:
    (heart,) = node.running("agentd.heartbeat")
    await control.until(lambda: control.beats, "a beat")
    heart.kill()
    last = control.beats[-1].number
    assert not await gone([heart])
    await control.until(lambda: control.beats[-1].number > last + 2, "beats of another program")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("cpus = '0-x'\n", "cpus: '0-x' is not valid"),
        ("node_idd = 'x'\n", "did you mean `node_id`?"),
        ("domains = [63]\n", "expected some of this machine's: 0"),
        ("require = ['gold']\n", "expected some of: numa"),
        ("[bandwidth]\nhigh = 1.5\n", "bandwidth.high: 1.5"),
        ("[plan]\nsystem_cpus = 'x'\n", "plan.system_cpus"),
        ("cpus = ''\nnode_id = 'a.b'\n", "node_id"),
    ],
)
async def test_a_wrong_configuration_is_one_line_and_exit_code_2(
    tmp_path: Path, change: str, said: str
) -> None:
    head = f'data_dir = "{tmp_path}"\ninsecure = true\n' + (
        "" if "node_id =" in change else 'node_id = "n1"\n'
    )
    process = await spawn(head + change, tmp_path)
    out, err = await process.communicate()
    assert process.returncode == 2
    assert said in err.decode()
    assert err.decode().count("\n") == 1
    assert not out


async def test_nats_that_is_not_there_is_exit_code_4(tmp_path: Path) -> None:
    config = config_for("nats://127.0.0.1:1", tmp_path)
    process = await spawn(config, tmp_path, "--start-timeout", "0.5")
    _, err = await process.communicate()
    assert process.returncode == 4
    assert "NATS" in err.decode().splitlines()[-1]


async def test_a_probe_port_in_use_is_exit_code_5(nats: NatsServer, tmp_path: Path) -> None:
    port = nats.url.rpartition(":")[2]
    config = f'probe_listen = "127.0.0.1:{port}"\n' + config_for(nats.url, tmp_path)
    process = await spawn(config, tmp_path)
    _, err = await process.communicate()
    assert process.returncode == 5
    assert f"127.0.0.1:{port}" in err.decode().splitlines()[-1]


async def test_a_model_that_is_not_there_is_a_warning_and_its_pools_are_not_offered(
    nats: NatsServer, tmp_path: Path
) -> None:
    models = tmp_path / "models.toml"
    models.write_text(
        f'[tiny]\nsize_bytes = 1\nsha256 = "{"0" * 64}"\nfile = "tiny.gguf"\n'
        '[[tiny.sources]]\nkind = "path"\npath = "/nowhere"\n'
    )
    declared = PoolSpec(name="declared", model="tiny")
    control = await ScriptedControl.start(nats.url, (ECHO, declared))
    try:
        config = f'models = "{models}"\nmodel_dir = "{tmp_path}"\n'
        process = await spawn(config + config_for(nats.url, tmp_path), tmp_path)
        assert process.stdout is not None
        await process.stdout.readline()
        item = await control.placed("declared", "s1", "x", "n1")
        (answer,) = await control.assign(item)
        process.terminate()
        await process.communicate()
    finally:
        await control.close()
    assert answer.reason == "pool declared is not offered here"
    assert any("tiny.gguf" in line for line in control.registrations[0].warnings)


@pytest.mark.skipif(
    HostFs().exists("sys/fs/cgroup/cgroup.controllers") and HostFs().exists("run/systemd/system"),
    reason="this machine has what is missing elsewhere: systemd and cgroup v2 alone",
)
async def test_an_isolation_that_this_machine_cannot_give_is_refused(
    nats: NatsServer, tmp_path: Path
) -> None:
    head = f'launcher = "systemd"\n{config_for(nats.url, tmp_path)}'
    process = await spawn(head, tmp_path)
    _, err = await process.communicate()
    assert process.returncode == 3
    assert b"cgroup v2 is needed" in err or b"systemd" in err
    assert b"Traceback" not in err
    process = await spawn(f'require = ["systemd"]\n{config_for(nats.url, tmp_path)}', tmp_path)
    _, err = await process.communicate()
    assert process.returncode == 3
    assert b"`require` has systemd, but" in err
