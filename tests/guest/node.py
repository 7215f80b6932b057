"""A node in the guest: agentd and its heartbeat as services, a control plane on the host."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import msgspec

from corefleet.messages.records import PoolSpec
from corefleet.messages.wire import AgentPublished, Assignment, TaskFinished
from tests.integration.scripted_control import ScriptedControl
from tools.guest.guest import Guest
from tools.guest.layout import HOST_ADDRESS

ROOT = Path(__file__).parents[2]
AGENTS = "/opt/agents"
GATES = "/run/gates"
NODE = "g1"
START_LIMIT_S = 240.0
EVENT_LIMIT_S = 90.0
_MIB = 1 << 20

GATED = PoolSpec(
    name="gated",
    agent="guest_agents:Gated",
    python_path=(AGENTS,),
    slots=2,
    spares=0,
    worker_memory_bytes=160 * _MIB,
)
HOG = PoolSpec(
    name="hog",
    agent="guest_agents:Hog",
    python_path=(AGENTS,),
    slots=1,
    spares=0,
    labels={"hog": "yes"},
    worker_memory_bytes=128 * _MIB,
)


def config(port: int, extra: str = "") -> str:
    """Return agentd.toml: that of production, with a NATS server on the host."""
    text = (ROOT / "configs" / "agentd.production.toml").read_text()
    kept = text.partition("models =")[0].replace("node-0001", NODE).replace("rack-01", "rack0")
    return (
        f'{kept}\ninsecure = "any-address"\n{extra}\n[nats]\nservers = ["nats://{HOST_ADDRESS}:{port}"]\n'
        "connect_timeout_s = 10.0\n"
        "[bandwidth]\ninterval_s = 2.0\ncanary_every_s = 10.0\n"
        "[plan]\nworker_memory_floor_bytes = 33554432\n"
    )


class GuestNode:
    """The services of one node in a guest, and what a test asks of them."""

    def __init__(self, guest: Guest, control: ScriptedControl) -> None:
        self.guest = guest
        self.control = control

    async def do(self, command: str, timeout_s: float = 60.0) -> str:
        """Run a command in the guest; return what it prints."""
        return await asyncio.to_thread(self.guest.must, command, timeout_s)

    async def journal_has(self, unit: str, pattern: str, timeout_s: float = EVENT_LIMIT_S) -> str:
        """Return the first match in a unit's journal, waiting for it."""
        found = await asyncio.to_thread(self.guest.wait_for_journal, unit, pattern, timeout_s)
        return found[0]

    async def install(self, port: int, extra: str = "") -> None:
        """Put units, configuration and agents in place, and start the services."""
        guest = self.guest
        for unit in (ROOT / "systemd").iterdir():
            await asyncio.to_thread(guest.put, f"/etc/systemd/system/{unit.name}", unit.read_text())
        agents = (Path(__file__).parent / "guest_agents.py").read_text()
        await asyncio.to_thread(guest.put, f"{AGENTS}/guest_agents.py", agents)
        await asyncio.to_thread(guest.put, "/etc/corefleet/agentd.toml", config(port, extra))
        await self.do(f"mkdir -p {GATES} && systemctl daemon-reload")
        await self.do("systemctl start corefleet-heartbeat agentd", START_LIMIT_S)

    async def slots(self, domains: set[int], pool: str = "gated") -> None:
        """Return once the newest beat offers `pool` in exactly `domains`."""
        control = self.control

        def offered() -> bool:
            beat = control.beats[-1] if control.beats else None
            slots = beat.slots if beat is not None else ()
            return {use.domain for use in slots if use.pool == pool and use.total} == domains

        await control.until(offered, f"{pool} in domains {sorted(domains)}", START_LIMIT_S)

    async def begin(self, domain: int, gate: str, pool: str = "gated") -> tuple[Assignment, int]:
        """Start a task in `domain`; return it and its worker's process id in the guest."""
        item = await self.control.placed(
            pool, f"{gate}-{domain}", f"{GATES}/{gate}", NODE, domain=domain
        )
        (answer,) = await self.control.assign(item)
        assert answer.accepted, answer
        return item, await self.began(item)

    async def began(self, item: Assignment) -> int:
        """Return the process id that the task's first event tells."""
        told: AgentPublished = await self.control.event(
            item.record.task, AgentPublished, EVENT_LIMIT_S
        )
        return int(msgspec.json.decode(told.data))

    async def open(self, gate: str) -> None:
        await self.do(f"touch {GATES}/{gate}")

    async def finished(self, item: Assignment, pid: int) -> None:
        """The task ends well, by the worker that began it, in its first attempt."""
        told = await self.control.event(item.record.task, TaskFinished, EVENT_LIMIT_S)
        assert (told.result.state, told.result.output) == ("done", str(pid)), told.result
        assert told.result.attempt == item.record.attempt
        assert told.result == await self.control.result(item)

    async def workers(self, pool: str = "gated") -> dict[int, int]:
        """Return the process id of each domain's worker of `pool`."""
        units = await self.do(
            "systemctl list-units --no-legend --plain --state=running "
            f"'corefleet-w*-{pool}-d*.service' | cut -d' ' -f1"
        )
        found = {}
        for unit in units.split():
            domain = re.search(rf"-{re.escape(pool)}-d(\d+)-", unit)
            assert domain is not None, unit
            found[int(domain[1])] = int(await self.do(f"systemctl show -P MainPID '{unit}'"))
        return found

    async def main_pid(self, unit: str = "agentd") -> int:
        return int(await self.do(f"systemctl show -P MainPID {unit}"))

    async def group(self, pid: int) -> str:
        """Return the control group's directory of a process."""
        line = await self.do(f"cat /proc/{pid}/cgroup")
        return f"/sys/fs/cgroup{line.partition('::')[2]}"
