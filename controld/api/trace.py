"""A task's attempts, as its record or its result tells them."""

from __future__ import annotations

from controld.core.attempt_policy import cause_of
from corefleet.messages.records import PastAttempt, ResultRecord, TaskRecord
from corefleet.rpc import tasks_pb2


def attempts(found: TaskRecord | ResultRecord) -> list[tasks_pb2.Attempt]:
    """Return all attempts that are told of, oldest first; the last may go on."""
    told = [_past(past) for past in found.past]
    if found.node and found.attempt not in [each.attempt for each in told]:
        told.append(_last(found))
    return told


def _past(past: PastAttempt) -> tasks_pb2.Attempt:
    cause = cause_of(past)
    return tasks_pb2.Attempt(
        attempt=past.attempt,
        node=past.node,
        domain=past.domain,
        placed_ms=past.placed_ms,
        why=past.why,
        ended_ms=past.ended_ms,
        cause=cause,
        reason=past.reason.removeprefix(f"{cause}:").strip(),
    )


def _last(found: TaskRecord | ResultRecord) -> tasks_pb2.Attempt:
    made = tasks_pb2.Attempt(
        attempt=found.attempt,
        node=found.node,
        domain=found.domain,
        placed_ms=found.placed_ms,
        why=found.why,
    )
    if isinstance(found, ResultRecord):
        made.ended_ms = found.finished_ms
        made.cause = found.state
        if found.failure is not None:
            made.reason = f"{found.failure.code}: {found.failure.message}"
    return made
