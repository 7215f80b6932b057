"""A shard's core made anew from records, and how it differs from the one that lived on."""

from __future__ import annotations

from collections import Counter
from random import Random

from controld.core.limits import Limits
from controld.core.shard import ShardCore
from controld.core.shard_io import Event, HeadStored, RecordStored
from controld.core.shard_state import ShardState
from controld.core.task import Task
from corefleet.messages.records import SessionHead, TaskRecord
from tests.unit.controld.core.sim_node import POOLS
from tests.unit.controld.core.stream_sim import Sim

Counts = dict[tuple[str, str], int]


def made_from(
    sim: Sim, records: list[tuple[TaskRecord, int]], heads: list[tuple[SessionHead, int]]
) -> tuple[ShardCore, Limits]:
    """Return a core that was shown these, in the stream's order, and decides nothing."""
    limits = Limits()
    core = ShardCore(0, "rebuilt", sim.owner + 1, sim.new_fleet(), Random(0), limits=limits)
    entries: list[tuple[int, Event]] = [(at, RecordStored(record, at)) for record, at in records]
    entries += [(at, HeadStored(head, at)) for head, at in heads]
    for _, event in sorted(entries, key=lambda entry: entry[0]):
        core.handle(event, sim.now, sim.wall_ms)
    return core, limits


def from_the_stream(sim: Sim) -> list[str]:
    """Compare with one made from all that the stream holds; only when nothing is under way."""
    rebuilt, limits = made_from(sim, list(sim.records.values()), list(sim.heads.values()))
    return _compare(sim, rebuilt, limits)


def from_what_is_known(sim: Sim) -> list[str]:
    """Compare with one made from the records as the owner knows them at this very moment.

    What is under way is not in the records yet: a task being placed is still queued there,
    one that is being moved or ended still has its place.
    """
    state = sim.core._state
    records = [(task.record, task.revision) for task in state.tasks.values()]
    rebuilt, limits = made_from(sim, records, list(state.heads.values()))
    return _compare(sim, rebuilt, limits)


def over_limits(sim: Sim) -> list[str]:
    """Return the limits that more records' places exceed than the pools allow."""
    placed = [record for record, _ in sim.records.values() if record.state == "placed"]
    pools = Counter(record.pool for record in placed)
    tenants = Counter((record.pool, record.tenant) for record in placed)
    found = [
        f"pool {pool}: {count} placed"
        for pool, count in pools.items()
        if 0 < POOLS[pool].max_in_flight < count
    ]
    found += [
        f"pool {pool}, tenant {tenant}: {count} placed"
        for (pool, tenant), count in tenants.items()
        if 0 < POOLS[pool].max_in_flight_per_tenant < count
    ]
    return found


def _compare(sim: Sim, rebuilt: ShardCore, limits: Limits) -> list[str]:
    found = [f"rebuilt: {line}" for line in rebuilt.check()]
    live, made = sim.core._state, rebuilt._state
    for what, ours, theirs in (
        ("states", _states(live), _states(made)),
        ("queue", _queue(live), rebuilt.queue_content()),
        ("session order", _order(live), _order(made)),
        ("in flight", _in_flight(live, sim.limits), limits.counts()),
    ):
        if ours != theirs:
            found.append(f"{what}: live {ours}, rebuilt {theirs}")
    return found


def _still_queued(task: Task) -> bool:
    """Whether the task's record says queued, whatever is under way."""
    return task.state in ("queued", "placing") or (
        task.state == "ending" and task.record.state == "queued"
    )


def _states(state: ShardState) -> dict[str, str]:
    return {
        name: "queued" if _still_queued(task) else "placed" for name, task in state.tasks.items()
    }


def _queue(state: ShardState) -> dict[str, list[str]]:
    found: dict[str, list[Task]] = {}
    for task in state.tasks.values():
        if _still_queued(task):
            found.setdefault(task.record.pool, []).append(task)
    return {
        pool: [task.id for task in sorted(tasks, key=lambda task: task.seq)]
        for pool, tasks in found.items()
    }


def _order(state: ShardState) -> dict[tuple[str, str], list[str]]:
    return {
        key: [task.id for task in session.order] for key, session in state.queue.sessions.items()
    }


def _in_flight(state: ShardState, limits: Limits) -> Counts:
    counts = limits.counts()
    for task in state.tasks.values():
        if task.state == "placing":
            for tenant in {"", task.record.tenant}:
                counts[task.record.pool, tenant] -= 1
    return {key: count for key, count in counts.items() if count}
