"""agentd is killed and started again while its workers run: they are adopted, nothing is lost."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from corefleet.messages.records import PoolSpec
from corefleet.messages.wire import (
    AgentPublished,
    Assignment,
    HeldAttempt,
    InventoryQuery,
    StepEnded,
    TaskFinished,
)
from tests.integration.scripted_control import ScriptedControl
from tests.servers.nats import NatsServer

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
POOL = PoolSpec(
    name="diligent",
    agent="node_agents:Diligent",
    python_path=(str(HERE),),
    slots=4,
    workers=1,
    spares=0,
)


class Unit:
    """A node as systemd would keep it: its heartbeat a process of its own, agentd restarted."""

    def __init__(self, url: str, directory: Path, run: Path) -> None:
        self.directory = directory
        self.run = run
        self.config = directory / "agentd.toml"
        socket = run / "beat.sock"
        self.config.write_text(
            f'node_id = "n1"\ndata_dir = "{directory / "data"}"\n'
            f'insecure = true\nrun_dir = "{run}"\nheartbeat_socket = "{socket}"\n'
            f'[nats]\nservers = ["{url}"]\n[log]\nformat = "json"\n'
        )
        self._socket = socket
        self._log = (directory / "node.log").open("ab")
        self.agentd: asyncio.subprocess.Process | None = None
        self._heart: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        if self._heart is None:
            self._heart = await self._spawn("agentd.heartbeat", "--socket", str(self._socket))
        self.agentd = await self._spawn("tests.integration.outliving", str(self.config))
        assert self.agentd.stdout is not None
        line = await asyncio.wait_for(self.agentd.stdout.readline(), 30.0)
        assert line, (self.directory / "node.log").read_text()

    async def end(self, number: signal.Signals) -> None:
        assert self.agentd is not None
        self.agentd.send_signal(number)
        await self.agentd.wait()

    def workers(self) -> list[psutil.Process]:
        pids = (self.run / "kept" / "units").glob("*.json")
        return [psutil.Process(int(p.stem)) for p in pids if psutil.pid_exists(int(p.stem))]

    async def close(self) -> None:
        for process in (self.agentd, self._heart):
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
        workers = self.workers()
        for worker in workers:
            worker.kill()
        await asyncio.to_thread(psutil.wait_procs, workers, 5.0)
        self._log.close()
        print((self.directory / "node.log").read_text())  # noqa: T201 - shown when a test fails

    async def _spawn(self, module: str, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
        )


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
async def control(nats: NatsServer) -> AsyncIterator[ScriptedControl]:
    control = await ScriptedControl.start(nats.url, (POOL,))
    yield control
    await control.close()


@pytest.fixture
async def unit(nats: NatsServer, control: ScriptedControl, tmp_path: Path) -> AsyncIterator[Unit]:
    with tempfile.TemporaryDirectory(prefix="cf-") as run:  # short enough for sockets
        unit = Unit(nats.url, tmp_path, Path(run))
        try:
            await unit.start()
            yield unit
        finally:
            await unit.close()


async def begun(control: ScriptedControl, unit: Unit, *gates: str) -> tuple[Assignment, list[Path]]:
    """Return a task that waits at its first gate."""
    slots = [use for beat in control.beats for use in beat.slots]
    if not any(use.total for use in slots):
        await control.until(
            lambda: any(use.total for beat in control.beats for use in beat.slots), "slots"
        )
    paths = [unit.directory / f"{gate}" for gate in gates]
    item = await control.placed("diligent", gates[0], "\n".join(map(str, paths)), "n1")
    (answer,) = await control.assign(item)
    assert answer.accepted, answer
    await waits(control, item, 0)
    return item, paths


async def waits(control: ScriptedControl, item: Assignment, gate: int) -> None:
    def found() -> bool:
        return any(
            isinstance(event, AgentPublished)
            and event.task == item.record.task
            and msgspec.json.decode(event.data) == str(gate)
            for event in control.events
        )

    await control.until(found, f"waiting at gate {gate}")


def pids(path: Path) -> set[int]:
    return {int(line) for line in path.with_suffix(".pids").read_text().split()}


async def finished(control: ScriptedControl, item: Assignment, gates: list[Path]) -> None:
    """The task ends once, by the worker that began it, with each gate passed once."""
    told = await control.event(item.record.task, TaskFinished)
    assert told.result.state == "done"
    assert told.result.output == f"{len(gates)} gates"
    assert told.result == await control.result(item)
    remembered = [step for step in told.result.steps if step.kind == "remember"]
    assert len(remembered) == len(gates)
    assert len({pid for gate in gates for pid in pids(gate)}) == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_a_restart_of_agentd_is_not_node_death(
    control: ScriptedControl, unit: Unit, how: signal.Signals
) -> None:
    item, gates = await begun(control, unit, "a", "b")
    before = {worker.pid for worker in unit.workers()}
    await unit.end(how)
    await unit.start()
    assert {worker.pid for worker in unit.workers()} == before
    assert [r.epoch for r in control.registrations] == [1, 1]
    query = InventoryQuery(
        shard=0, owner_epoch=1, held=(HeldAttempt(item.record.task, item.record.attempt),)
    )
    assert (await control.inventory("n1", query)).absent == ()
    gates[0].touch()
    await waits(control, item, 1)
    gates[1].touch()
    await finished(control, item, gates)


async def test_steps_made_without_agentd_are_journaled_by_the_next_one(
    control: ScriptedControl, unit: Unit
) -> None:
    item, gates = await begun(control, unit, "c", "d")
    await unit.end(signal.SIGKILL)
    gates[0].touch()
    while not gates[1].with_suffix(".pids").exists():  # noqa: ASYNC110 - agentd is dead: no other sign
        await asyncio.sleep(0.01)
    await unit.start()
    await waits(control, item, 1)
    ended = [e for e in control.events if isinstance(e, StepEnded) and e.task == item.record.task]
    # One whose acknowledgement died with agentd may be told twice.
    assert {e.step.step for e in ended} == {0, 1, 2}
    gates[1].touch()
    await finished(control, item, gates)


async def test_a_task_that_ends_without_agentd_is_finished_by_the_next_one(
    control: ScriptedControl, unit: Unit
) -> None:
    item, gates = await begun(control, unit, "e")
    await unit.end(signal.SIGKILL)
    gates[0].touch()
    await unit.start()
    await finished(control, item, gates)
    more, others = await begun(control, unit, "f")
    others[0].touch()
    await finished(control, more, others)


async def test_heartbeats_go_on_without_agentd_and_tell_its_age(
    control: ScriptedControl, unit: Unit
) -> None:
    await begun(control, unit, "g")
    await unit.end(signal.SIGKILL)
    seen = len(control.beats)
    await control.until(
        lambda: [b for b in control.beats[seen:] if b.loop_age_s > 0.5], "beats without agentd"
    )
    assert {beat.epoch for beat in control.beats[seen:]} == {1}
    assert not any(beat.restart_grace_s for beat in control.beats)
    await unit.start()
    await unit.end(signal.SIGTERM)
    await control.until(
        lambda: [b for b in control.beats if b.restart_grace_s >= 10], "an announced restart"
    )


async def test_what_belongs_to_a_lost_epoch_is_dropped_and_not_run_twice(
    control: ScriptedControl, unit: Unit
) -> None:
    item, gates = await begun(control, unit, "h")
    before = {worker.pid for worker in unit.workers()}
    await unit.end(signal.SIGKILL)
    control.resumes = False
    await unit.start()
    assert [r.epoch for r in control.registrations] == [1, 2]
    again = await control.again(item, "n1")
    assert (await control.assign(again))[0].accepted
    gates[0].touch()
    told = await control.event(item.record.task, TaskFinished)
    assert told.result.attempt == 2
    assert told.result == await control.result(again)
    assert {worker.pid for worker in unit.workers()} == before


async def test_workers_of_an_older_plan_are_replaced_after_they_gave_back(
    control: ScriptedControl, unit: Unit
) -> None:
    item, _ = await begun(control, unit, "i")
    before = {worker.pid for worker in unit.workers()}
    await unit.end(signal.SIGKILL)
    control.pools = (msgspec.structs.replace(POOL, max_steps=17),)
    await unit.start()
    returned = await control.until(
        lambda: next((r for r in control.returned if r.task == item.record.task), None), "return"
    )
    assert returned.attempt == item.record.attempt
    await control.until(
        lambda: not before & {worker.pid for worker in unit.workers()},
        "the old worker's end",
    )
