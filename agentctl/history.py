"""A task's attempts and steps in time order, from its trace: plain data, and lines of a table."""

from __future__ import annotations

from typing import Any

from agentctl.output import state_name
from corefleet.rpc import tasks_pb2


def history(trace: tasks_pb2.TaskTrace) -> dict[str, Any]:
    """Return what `agentctl trace --json` prints; its help lists the keys."""
    task = trace.task
    attempts = [_attempt(each) for each in trace.attempts]
    steps = _steps(task)
    first = attempts[0] if attempts and attempts[0]["attempt"] == 1 else None
    placed_ms = first["placed_ms"] if first else None
    return {
        "task": task.task,
        "pool": task.pool,
        "session": task.session,
        "state": state_name(task.state),
        "reason": task.reason,
        "failure": {"code": task.failure.code, "message": task.failure.message}
        if task.failure.code
        else None,
        "created_ms": task.created_ms,
        "finished_ms": task.finished_ms or None,
        "queue_wait_ms": max(0, placed_ms - task.created_ms) if placed_ms else None,
        "attempts": attempts,
        "steps": steps,
        "total": {
            "ms": task.finished_ms - task.created_ms if task.finished_ms else None,
            "attempts": task.attempt,
            "steps": len(steps),
            "wall_ms": round(sum(step["wall_ms"] for step in steps), 3),
            "cpu_ms": round(sum(step["cpu_ms"] for step in steps), 3),
            "gap_ms": round(sum(step["gap_ms"] or 0.0 for step in steps), 3),
            "tokens_in": sum(step["tokens_in"] for step in steps),
            "tokens_out": sum(step["tokens_out"] for step in steps),
        },
    }


Row = tuple[str, ...]
"""One event by COLUMNS."""

COLUMNS = ("AT", "WHAT", "ATTEMPT", "NODE", "GAP", "WALL", "CPU", "TOKENS", "")


def rows(told: dict[str, Any]) -> list[Row]:
    """Return a history's events in time order; times are from the submission, in seconds."""
    start = told["created_ms"]
    timed: list[tuple[float, int, int, Row]] = [(start, 0, 0, ("0.000", "submitted", *[""] * 7))]
    for each in told["attempts"]:
        where = f"{each['node']}/{each['domain']}" if each["domain"] >= 0 else each["node"]
        number = each["attempt"]
        if each["placed_ms"]:
            at = each["placed_ms"]
            row = (_at(at, start), "placed", str(number), where, *[""] * 4, each["why"])
            timed.append((at, number, 1, row))
        if each["ended_ms"] and each["cause"] not in ("done", "failed", "cancelled"):
            at = each["ended_ms"]
            left = f"left: {each['cause']}"
            row = (_at(at, start), left, str(number), where, *[""] * 4, each["reason"])
            timed.append((at, number, 3, row))
    timed += [
        (step["started_ms"] or start, step["attempt"], 2, _step_row(step, start))
        for step in told["steps"]
    ]
    timed.sort(key=lambda each: each[:3])
    shown = [row for *_, row in timed]
    if told["finished_ms"]:
        failure = told["failure"]
        why = f"{failure['code']}: {failure['message']}" if failure else ""
        shown.append((_at(told["finished_ms"], start), told["state"], *[""] * 6, why))
    return shown


def summary(told: dict[str, Any]) -> str:
    """Return the totals as one line."""
    total = told["total"]
    wait = told["queue_wait_ms"]
    parts = [
        f"{told['state']}" + (f" after {total['ms'] / 1000:.3f} s" if total["ms"] else ""),
        "queue wait " + (f"{wait / 1000:.3f} s" if wait is not None else "not known"),
        f"{total['attempts']} attempt{'' if total['attempts'] == 1 else 's'}",
        (
            f"{total['steps']} steps: {total['wall_ms'] / 1000:.3f} s, "
            f"CPU {total['cpu_ms'] / 1000:.3f} s, gaps {total['gap_ms'] / 1000:.3f} s"
        ),
        f"tokens {total['tokens_in']} in, {total['tokens_out']} out",
    ]
    missing = total["attempts"] - len(told["attempts"])
    if missing > 0:
        parts.append(f"{missing} more ended by nobody's fault and are not kept")
    return "; ".join(parts)


def _attempt(found: tasks_pb2.Attempt) -> dict[str, Any]:
    return {
        "attempt": found.attempt,
        "node": found.node,
        "domain": found.domain,
        "placed_ms": found.placed_ms or None,
        "why": found.why,
        "ended_ms": found.ended_ms or None,
        "cause": found.cause or None,
        "reason": found.reason,
    }


def _steps(task: tasks_pb2.Task) -> list[dict[str, Any]]:
    """Return the steps by start; a gap is the time since all before had ended."""
    told = []
    ended = float(task.created_ms)
    for step in sorted(task.steps, key=lambda step: (step.started_ms, step.step)):
        wall_ms = step.wall_us / 1000
        gap = None
        if step.started_ms:
            gap = round(max(0.0, step.started_ms - ended), 3)
            ended = max(ended, step.started_ms + wall_ms)
        told.append(
            {
                "step": step.step,
                "kind": step.kind,
                "name": step.name,
                "attempt": step.attempt,
                "node": step.node,
                "started_ms": step.started_ms or None,
                "gap_ms": gap,
                "wall_ms": wall_ms,
                "cpu_ms": step.cpu_us / 1000,
                "tokens_in": step.tokens_in,
                "tokens_out": step.tokens_out,
                "summary": step.summary,
            }
        )
    return told


def _step_row(step: dict[str, Any], start: int) -> Row:
    name = f" {step['name']}" if step["name"] else ""
    tokens = f"{step['tokens_in']}+{step['tokens_out']}"
    return (
        _at(step["started_ms"], start) if step["started_ms"] else "?",
        f"step {step['step']} {step['kind']}{name}",
        str(step["attempt"]),
        step["node"],
        f"{step['gap_ms'] / 1000:.3f}" if step["gap_ms"] is not None else "?",
        f"{step['wall_ms'] / 1000:.3f}",
        f"{step['cpu_ms'] / 1000:.3f}",
        tokens if tokens != "0+0" else "",
        step["summary"].replace("\n", " "),
    )


def _at(at_ms: int, start_ms: int) -> str:
    return f"{(at_ms - start_ms) / 1000:.3f}"
