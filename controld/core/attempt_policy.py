"""When a task is tried again, how soon, and when no more.

Only what the task's own attempts caused counts against `max_attempts`: a worker that
gave the attempt back, no progress, and losses of its node beyond a few, since a task
may be what kills its nodes. Everything is bounded all the same.
"""

from __future__ import annotations

from msgspec.structs import replace

from controld.core.task import Cause
from corefleet.messages.records import PastAttempt, TaskRecord

FREE_LOSSES = 3
"""Lost nodes that no task answers for."""

EXTRA_ATTEMPTS = 64
"""Attempts beyond `max_attempts`, whatever ended them."""

_OWN_FAULTS = ("returned", "stuck")
_KEPT_OTHERS = 16
NODE_PREFIX = "node "
"""A returned attempt whose reason begins so is the node's doing."""

PREEMPTED_PREFIX = "preempted:"
DRAINING_PREFIX = "draining:"
"""Attempts that were asked to yield come back with these, and count against nobody."""

_YIELDED = ("preempted", "draining", "drained")


def returned_for(reason: str) -> tuple[Cause, str]:
    """Return the cause that a node's reason for giving an attempt back stands for, and the rest."""
    if reason.startswith(PREEMPTED_PREFIX):
        return "preempted", reason.removeprefix(PREEMPTED_PREFIX).strip()
    if reason.startswith(DRAINING_PREFIX):
        return "draining", reason.removeprefix(DRAINING_PREFIX).strip()
    return ("node" if reason.startswith(NODE_PREFIX) else "returned"), reason


def cause_of(past: PastAttempt) -> str:
    """Return the Cause spelled at the head of a past attempt's reason."""
    return past.reason.partition(":")[0]


def counted(past: tuple[PastAttempt, ...]) -> int:
    """Return how many past attempts count against `max_attempts`."""
    causes = [cause_of(attempt) for attempt in past]
    faults = sum(cause in _OWN_FAULTS for cause in causes)
    return faults + max(0, causes.count("lost") - FREE_LOSSES)


def exhausted(record: TaskRecord) -> str:
    """Return why the task is not tried again after its past attempts, '' when it is."""
    past = record.past
    used = counted(past)
    if used >= record.max_attempts:
        return f"{used} of {record.max_attempts} attempts failed; the last: {past[-1].reason}"
    most = record.max_attempts + EXTRA_ATTEMPTS
    if record.attempt - record.yields >= most:
        return f"given up after {record.attempt} attempts; the last: {past[-1].reason}"
    return ""


def given_up(record: TaskRecord, cause: Cause, reason: str, now_ms: int) -> TaskRecord:
    """Return the record with its current attempt among the past ones; old refusals make room."""
    yields = record.yields + (cause in _YIELDED)
    return replace(record, past=_with_past(record, cause, reason, now_ms), yields=yields)


def _with_past(
    record: TaskRecord, cause: Cause, reason: str, now_ms: int
) -> tuple[PastAttempt, ...]:
    now = PastAttempt(
        record.attempt,
        record.node,
        f"{cause}: {reason}",
        domain=record.domain,
        placed_ms=record.placed_ms,
        ended_ms=now_ms,
        why=record.why,
    )
    past = (*record.past, now)
    others = [attempt for attempt in past if cause_of(attempt) not in (*_OWN_FAULTS, "lost")]
    if len(others) <= _KEPT_OTHERS:
        return past
    oldest = others[0]
    return tuple(attempt for attempt in past if attempt is not oldest)


def pause_s(past: tuple[PastAttempt, ...]) -> float:
    """Return how long the next attempt waits: the longer, the more in a row ended alike."""
    cause = cause_of(past[-1])
    in_row = 0
    for attempt in reversed(past):
        if cause_of(attempt) != cause:
            break
        in_row += 1
    if cause in _OWN_FAULTS:
        return 0.0 if in_row <= 1 else float(min(0.2 * 2.0 ** (in_row - 2), 10.0))
    if cause == "lost" or cause in _YIELDED:
        return 0.0
    return 0.0 if in_row <= 3 else float(min(0.05 * 2.0 ** (in_row - 4), 5.0))


def goes_to_the_queue(cause: Cause) -> bool:
    """Return whether the place that is left is somebody else's, so that the task waits its turn."""
    return cause == "preempted"


def avoided_node(past: tuple[PastAttempt, ...]) -> str:
    """Return the node that the next attempt should rather not use, '' for none."""
    if past and cause_of(past[-1]) != "returned":
        return past[-1].node
    return ""
