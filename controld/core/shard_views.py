"""What a shard's core can say of itself: reasons, lists, explanations, invariants."""

from __future__ import annotations

from controld.core.attempts import request_of
from controld.core.placement import explain, waiting_reason
from controld.core.shard_state import ShardState
from controld.core.task import Task
from corefleet.messages.wire import ExplainAnswer, ListTasks, TaskLine, TaskList


def reason(state: ShardState, task: Task) -> str:
    """Return why a task waits, '' when it does not."""
    if task.state == "moving" and task.leaving is not None:
        return f"leaves {task.record.node}: {task.leaving.reason}"
    if task.state == "offered":
        return f"waits for the answer of {task.record.node}"
    if task.state == "running" and task.asked_ms:
        asked_s = (state.wall_ms - task.asked_ms) / 1000
        return f"asked {asked_s:.1f} s ago to yield at its next step boundary"
    if task.state != "queued":
        return ""
    if not state.live:
        return "the shard's new owner reads its records"
    first = state.queue.session_of(task).order[0]
    if first is not task:
        return f"waits for task {first.id} of the same session"
    if task.delayed:
        if task.record.past:
            return f"backs off after attempt {task.record.attempt}: {task.record.past[-1].reason}"
        return "backs off: its placement could not be written"
    pool = task.record.pool
    limit = state.limits.reason(pool, task.record.tenant)
    if limit:
        return limit
    why = waiting_reason(pool, state.fleet.offers(pool))
    return why or f"waits for its turn in pool {pool}"


def list_tasks(state: ShardState, query: ListTasks) -> TaskList:
    """Return the live tasks that match, oldest known first, up to the limit."""
    if query.pool and query.session:
        session = state.queue.sessions.get((query.pool, query.session))
        tasks = list(session.order) if session else []
    else:
        tasks = list(state.tasks.values())
    lines: list[TaskLine] = []
    for task in tasks:
        record = task.record
        if query.pool and record.pool != query.pool:
            continue
        if query.session and record.session != query.session:
            continue
        if query.node and not _is_at(task, query.node):
            continue
        if query.state and query.state not in (record.state, task.state):
            continue
        if len(lines) >= query.limit:
            break
        lines.append(
            TaskLine(
                record=record,
                reason=reason(state, task),
                state=task.state,
                asked_ms=task.asked_ms,
            )
        )
    draining = bool(query.node) and state.fleet.is_draining(query.node)
    return TaskList(tasks=tuple(lines), draining=draining)


def _is_at(task: Task, node: str) -> bool:
    """Whether an attempt is at `node`, on its way there, or not yet taken from there."""
    record = task.record
    return task.node == node or (record.state == "placed" and record.node == node)


def explain_task(state: ShardState, name: str) -> ExplainAnswer:
    """Return where a task is, why, and how all candidates look now."""
    task = state.tasks.get(name)
    if task is None:
        return ExplainAnswer(found=False)
    record = task.record
    placed = record.state == "placed"
    return ExplainAnswer(
        found=True,
        chosen=f"{record.node}/{record.domain}" if placed else "",
        why=record.why if placed else reason(state, task),
        candidates=explain(state.fleet, request_of(state, record)),
    )


def check(state: ShardState) -> list[str]:
    """Return the invariants that do not hold. Looks at all tasks."""
    broken = []
    queued: dict[str, int] = {}
    for session in state.queue.sessions.values():
        busy = [task for task in session.order if task.occupies]
        if len(busy) != session.busy:
            broken.append(f"session {session.key}: counts {session.busy} busy, has {len(busy)}")
        leaving = ("moving", "ending")
        settled = [task for task in busy if task.state not in leaving and task.doomed is None]
        if state.live and len(settled) > 1:
            names = ", ".join(task.id for task in settled)
            broken.append(f"session {session.key}: more than one live attempt: {names}")
        if state.live and settled and settled[0] is not session.order[0]:
            broken.append(f"session {session.key}: {settled[0].id} passed {session.order[0].id}")
        seqs = [task.seq for task in session.order]
        if seqs != sorted(set(seqs)):
            broken.append(f"session {session.key}: not in create order: {seqs}")
        if not session.order:
            broken.append(f"session {session.key}: empty")
    in_sessions = sum(len(session.order) for session in state.queue.sessions.values())
    if in_sessions != len(state.tasks):
        broken.append(f"{in_sessions} tasks in sessions, {len(state.tasks)} known")
    for task in state.tasks.values():
        broken += _check_task(state, task)
        if task.state == "queued":
            queued[task.record.pool] = queued.get(task.record.pool, 0) + 1
    counted = {pool: count for pool, count in state.queue.counts.items() if count}
    if counted != queued:
        broken.append(f"queue counts {counted}, tasks say {queued}")
    return broken


def _check_task(state: ShardState, task: Task) -> list[str]:
    broken = []
    where = f"task {task.id} ({task.state})"
    session = state.queue.session_of(task)
    first = session.order[0] is task and not session.busy
    may_start = first and task.state == "queued" and not task.delayed
    if state.live and task.ready != may_start:
        broken.append(f"{where}: ready is {task.ready}")
    if task.record.state == "queued" and task.state not in ("queued", "placing", "ending"):
        broken.append(f"{where}: its record says queued")
    if task.record.state == "placed" and task.state in ("queued", "placing"):
        broken.append(f"{where}: its record says placed")
    if task.state == "placing" and task.write is None:
        broken.append(f"{where}: no write under way")
    if task.state == "moving" and task.write is None and not task.timer:
        broken.append(f"{where}: nothing will move it on")
    if task.delayed and task.state == "queued" and not task.timer:
        broken.append(f"{where}: nothing will wake it")
    if task.state in ("queued", "ending") and task.write is not None:
        broken.append(f"{where}: a write is under way")
    if task.state == "queued" and (task.node or task.slot is not None):
        broken.append(f"{where}: holds a place on {task.node}")
    if task.node and task not in state.inventory.on(task.node):
        broken.append(f"{where}: not in the inventory of {task.node}")
    if task.wish is not None and task.write is None:
        broken.append(f"{where}: is to be ended and nothing hinders it")
    return broken
