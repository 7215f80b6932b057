"""agentd as a service of a real systemd, on four NUMA nodes: docs/architecture.md, node rules."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
import pytest_asyncio

from tests.guest.node import (
    EVENT_LIMIT_S,
    GATED,
    HOG,
    NODE,
    START_LIMIT_S,
    GuestNode,
)
from tests.integration.scripted_control import ScriptedControl
from tests.servers.nats import NatsServer
from tools.guest.guest import Guest

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600, func_only=True)]

DOMAINS = {0, 1, 2, 3}


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(guest: Guest, nats: NatsServer) -> AsyncIterator[GuestNode]:
    """The services run and offer the pool in every domain."""
    control = await ScriptedControl.start(nats.url, (GATED, HOG))
    made = GuestNode(guest, control)
    try:
        await made.install(int(nats.url.rpartition(":")[2]))
        await made.slots(DOMAINS)
        yield made
    finally:
        print(await asyncio.to_thread(guest.journal, "agentd"))  # noqa: T201 - for a failure
        await control.close()


def pages(numa_maps: str) -> dict[int, int]:
    """Return how many pages of its own lie on each node: those of files are everybody's."""
    found: dict[int, int] = {}
    for line in numa_maps.splitlines():
        if "anon=" in line and "file=" not in line:
            for number, count in re.findall(r" N(\d+)=(\d+)", line):
                found[int(number)] = found.get(int(number), 0) + int(count)
    return found


async def test_rule_3_every_worker_and_its_pages_are_on_its_node(node: GuestNode) -> None:
    begun = await asyncio.gather(*(node.begin(domain, "bound") for domain in sorted(DOMAINS)))
    for domain, (_, pid) in enumerate(begun):
        status = await node.do(f"cat /proc/{pid}/status")
        assert f"Cpus_allowed_list:\t{domain}\n" in status + "\n"
        assert f"Mems_allowed_list:\t{domain}\n" in status + "\n"
        where = pages(await node.do(f"cat /proc/{pid}/numa_maps"))
        assert set(where) == {domain}, where
        assert where[domain] >= 24 * 256
        command = await node.do(f"tr '\\0' ' ' </proc/{pid}/cmdline")
        assert f"--domain {domain} --cpus {domain}" in command
    await node.open("bound")
    for item, pid in begun:
        await node.finished(item, pid)


async def test_rule_4_slices_and_units_carry_the_limits_of_the_plan(node: GuestNode) -> None:
    for domain, pid in (await node.workers()).items():
        group = await node.group(pid)
        assert f"/corefleet-online-d{domain}.slice/" in group
        assert await node.do(f"cat {group}/cpuset.cpus.effective") == str(domain)
        assert await node.do(f"cat {group}/cpuset.mems.effective") == str(domain)
        assert await node.do(f"cat {group}/memory.max") == str(GATED.worker_memory_bytes)
        assert int(await node.do(f"cat {group}/pids.max")) > 0
        assert int(await node.do(f"cat /proc/{pid}/oom_score_adj")) > 0
    assert int(await node.do(f"cat /proc/{await node.main_pid()}/oom_score_adj")) < 0


async def test_the_journal_has_the_fields_that_operators_filter_by(node: GuestNode) -> None:
    item, pid = await node.begin(2, "journal")
    match = f"NODE={NODE} POOL=gated DOMAIN=2 TASK={item.record.task}"
    lines = await node.do(f"journalctl -b -o json --no-pager {match}")
    entries = [msgspec.json.decode(line) for line in lines.splitlines()]
    assert any("inside a task" in str(entry["MESSAGE"]) for entry in entries)
    assert {entry["_PID"] for entry in entries} == {str(pid)}
    assert await node.do(
        f"journalctl -b -q -n 1 --no-pager _SYSTEMD_UNIT=agentd.service NODE={NODE}"
    )
    await node.open("journal")
    await node.finished(item, pid)


@pytest.mark.parametrize("how", ["kill -9", "systemctl restart"])
async def test_rule_1_a_restart_of_agentd_is_not_node_death(node: GuestNode, how: str) -> None:
    gate = how.replace(" ", "").replace("-", "")
    before = await node.workers()
    begun = [await node.begin(domain, gate) for domain in (0, 3)]
    assert {pid for _, pid in begun} <= set(before.values())
    agentd, heart = await node.main_pid(), await node.main_pid("corefleet-heartbeat")
    registered = len(node.control.registrations)
    if how == "kill -9":
        await node.do(f"kill -9 {agentd}")
    else:
        await node.do("systemctl restart agentd", START_LIMIT_S)
    await node.control.until(
        lambda: len(node.control.registrations) > registered, "registration", START_LIMIT_S
    )
    assert node.control.registrations[-1].epoch == node.control.registrations[0].epoch
    await node.slots(DOMAINS)
    assert await node.workers() == before
    assert await node.main_pid() != agentd
    assert await node.main_pid("corefleet-heartbeat") == heart
    await node.open(gate)
    for item, pid in begun:
        await node.finished(item, pid)


async def test_rule_9_a_frozen_agentd_is_killed_by_its_watchdog_and_its_tasks_go_on(
    node: GuestNode,
) -> None:
    item, pid = await node.begin(1, "frozen")
    agentd = await node.main_pid()
    registered = len(node.control.registrations)
    seen = len(node.control.beats)
    await node.do(f"kill -STOP {agentd}")
    await node.journal_has("agentd", r"Watchdog timeout", 60.0)
    await node.control.until(
        lambda: len(node.control.registrations) > registered, "registration", START_LIMIT_S
    )
    ages = [beat.loop_age_s for beat in node.control.beats[seen:]]
    assert max(ages) > 10.0, "the heartbeat told how long agentd was frozen"
    await node.slots(DOMAINS)
    await node.open("frozen")
    await node.finished(item, pid)


async def test_rule_4_daemon_reload_changes_nothing_that_counts(node: GuestNode) -> None:
    item, pid = await node.begin(2, "reload")
    group = await node.group(pid)
    before = await node.do(f"cat {group}/cpuset.cpus.effective {group}/memory.max")
    await node.do("systemctl daemon-reload")
    assert await node.do(f"cat {group}/cpuset.cpus.effective {group}/memory.max") == before
    await node.open("reload")
    await node.finished(item, pid)


async def test_a_limit_that_somebody_changed_is_set_again_and_shown(node: GuestNode) -> None:
    pid = (await node.workers())[0]
    group = await node.group(pid)
    await node.do(f"echo 99999744 >{group}/memory.max")
    await node.journal_has("agentd", r"Bound again")
    assert await node.do(f"cat {group}/memory.max") == str(GATED.worker_memory_bytes)
    assert (await node.workers())[0] == pid
    await node.control.until(
        lambda: any("bound again" in line for line in node.control.registrations[-1].isolation),
        "the repair in what the node registers",
        EVENT_LIMIT_S,
    )


async def test_a_cpu_that_goes_offline_takes_its_worker_and_comes_back(node: GuestNode) -> None:
    item, _ = await node.begin(3, "offline")
    await node.do("echo 0 >/sys/devices/system/cpu/cpu3/online")
    try:
        returned = await node.control.until(
            lambda: next((r for r in node.control.returned if r.task == item.record.task), None),
            "the task is given back",
            EVENT_LIMIT_S,
        )
        assert returned.attempt == item.record.attempt
        await node.slots(DOMAINS - {3})
    finally:
        await node.do("echo 1 >/sys/devices/system/cpu/cpu3/online")
    await node.slots(DOMAINS)
    more, pid = await node.begin(3, "online")
    await node.open("online")
    await node.finished(more, pid)


async def test_what_is_active_is_registered_and_why_nothing_better(node: GuestNode) -> None:
    lines = "\n".join(node.control.registrations[-1].isolation)
    assert "launcher: systemd units" in lines
    assert re.search(r"batch is limited by cpu\.max, sensed by \w+", lines)
    assert "not by resctrl: " in lines


async def test_rule_7_a_worker_out_of_memory_dies_alone_and_is_told_apart(
    node: GuestNode,
) -> None:
    agentd = await node.main_pid()
    others = await node.workers()
    text = await node.do("cat /etc/corefleet/agentd.toml")
    labels = f"{text}\n[labels]\nhog = 'yes'\n"
    await asyncio.to_thread(node.guest.put, "/etc/corefleet/agentd.toml", labels)
    await node.do("systemctl restart agentd", START_LIMIT_S)
    agentd = await node.main_pid()
    await node.slots(DOMAINS, "hog")
    item = await node.control.placed("hog", "hog", "", NODE, domain=1)
    (answer,) = await node.control.assign(item)
    assert answer.accepted
    # On a slow machine the kernel holds it back for longer than agentd waits for an answer.
    await node.journal_has("agentd", r"Process ended .*(kernel: out of|out of memory, held back)")
    assert await node.main_pid() == agentd
    assert await node.workers() == others
    node.control.drop(item, "the test has seen what it wanted")
