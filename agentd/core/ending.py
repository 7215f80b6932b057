"""What is stored when a task ends: its result with a short trace, and the session's head. Pure."""

from __future__ import annotations

import msgspec

from corefleet.messages.links import FinishTask
from corefleet.messages.records import ResultRecord, SessionHead, Step
from corefleet.messages.wire import Assignment

_MOST_TRACE_ERROR = 200


def result_of(
    item: Assignment, finish: FinishTask, committed: tuple[Step, ...], now_ms: int
) -> ResultRecord:
    """Return how the task ended. Its trace has all steps, without what they resulted in."""
    record = item.record
    return ResultRecord(
        task=record.task,
        pool=record.pool,
        session=record.session,
        request_id=record.request_id,
        state="failed" if finish.failure is not None else "done",
        output=finish.output,
        failure=finish.failure,
        attempt=record.attempt,
        node=record.node,
        domain=record.domain,
        why=record.why,
        placed_ms=record.placed_ms,
        past=record.past,
        created_ms=record.created_ms,
        finished_ms=now_ms,
        steps=tuple(_short(step) for step in (*committed, *finish.steps)),
        digest=record.digest,
        tenant=record.tenant,
        submitted_by=record.submitted_by,
    )


def head_of(item: Assignment, finish: FinishTask) -> SessionHead | None:
    """Return the session's next head, at home here; None when the task changed nothing."""
    record, before = item.record, item.head
    state = finish.state
    if state is None:
        return None
    return SessionHead(
        pool=record.pool,
        session=record.session,
        version=before.version + 1 if before is not None else 1,
        last_task=record.task,
        home_node=record.node,
        home_domain=record.domain,
        state=state,
    )


def _short(step: Step) -> Step:
    if not step.result and not step.fingerprint and len(step.error) <= _MOST_TRACE_ERROR:
        return step
    return msgspec.structs.replace(
        step, result=b"", fingerprint=b"", error=step.error[:_MOST_TRACE_ERROR]
    )
