"""Stored records and wire messages as the API's protobuf messages."""

from __future__ import annotations

import msgspec

from controld.core.drains import NodeDrain
from controld.core.fleet import NodeStatus
from corefleet.config import pool_text
from corefleet.messages.records import (
    Drain,
    Failure,
    PoolSpec,
    ResultRecord,
    Step,
    TaskRecord,
)
from corefleet.messages.wire import (
    AgentPublished,
    ExplainAnswer,
    StepEnded,
    TaskEvent,
    TaskFinished,
    TaskLine,
    TaskPlaced,
    TaskRequeued,
    TaskWaiting,
    TokenText,
)
from corefleet.rpc import fleet_pb2, tasks_pb2

_SUMMARY_CHARS = 200
_INNER = ("open", "intent")
"""Kinds of journal entries that are no step of their own to anybody outside."""

_NOT_ASKED = "not asked to yield yet"

STATES: dict[str, tasks_pb2.TaskState] = {
    "queued": tasks_pb2.TASK_STATE_QUEUED,
    "placed": tasks_pb2.TASK_STATE_PLACED,
    "running": tasks_pb2.TASK_STATE_RUNNING,
    "done": tasks_pb2.TASK_STATE_DONE,
    "failed": tasks_pb2.TASK_STATE_FAILED,
    "cancelled": tasks_pb2.TASK_STATE_CANCELLED,
}


def ended_task(result: ResultRecord) -> tasks_pb2.Task:
    """Return the task that ended as `result` says."""
    made = tasks_pb2.Task()
    _fill_ended(made, result)
    return made


def _fill_ended(made: tasks_pb2.Task, result: ResultRecord) -> None:
    """Write into a message that is part of another one: copying it costs more than making it."""
    made.task = result.task
    made.pool = result.pool
    made.session = result.session
    made.request_id = result.request_id
    made.state = STATES[result.state]
    made.attempt = result.attempt
    made.node = result.node
    made.domain = result.domain
    made.created_ms = result.created_ms
    made.finished_ms = result.finished_ms
    made.output = result.output
    made.reason = result.why
    made.submitted_by = result.submitted_by
    if result.failure is not None:
        made.failure.code = result.failure.code
        made.failure.message = result.failure.message
    if result.steps:
        made.steps.extend(step(each) for each in result.steps if each.kind not in _INNER)


def live_task(
    record: TaskRecord, steps: tuple[Step, ...] = (), reason: str = "", journaled: int = 0
) -> tasks_pb2.Task:
    """Return a task that has not ended.

    A record says only `placed`; that `journaled`, the newest attempt in the journal, is
    the placed one shows that it runs.
    """
    state: str = record.state
    if state == "placed" and journaled == record.attempt:
        state = "running"
    return tasks_pb2.Task(
        task=record.task,
        pool=record.pool,
        session=record.session,
        request_id=record.request_id,
        state=STATES[state],
        attempt=record.attempt,
        node=record.node,
        domain=record.domain,
        created_ms=record.created_ms,
        failure=failure(record.failure),
        reason=reason or record.why,
        steps=[step(each) for each in steps if each.kind not in _INNER],
        submitted_by=record.submitted_by,
    )


def failure(found: Failure | None) -> tasks_pb2.Failure | None:
    """Return why a task did not end well, None when it did."""
    return tasks_pb2.Failure(code=found.code, message=found.message) if found else None


def step(found: Step, summary: str = "") -> tasks_pb2.Step:
    """Return a committed step; without a `summary` its result is shown in short."""
    return tasks_pb2.Step(
        step=found.step,
        kind=found.kind,
        name=found.name,
        attempt=found.attempt,
        node=found.node,
        started_ms=found.started_ms,
        wall_us=found.wall_us,
        tokens_in=found.tokens_in,
        tokens_out=found.tokens_out,
        summary=summary or _summary(found),
        cpu_us=found.cpu_us,
    )


def event(found: TaskEvent) -> tasks_pb2.TaskEvent:
    """Return one event of a task."""
    made = tasks_pb2.TaskEvent()
    fill_event(made, found)
    return made


def fill_event(made: tasks_pb2.TaskEvent, found: TaskEvent) -> None:
    """Write one event of a task into a message that is part of another one."""
    made.task = found.task
    made.at_ms = found.at_ms
    match found:
        case TaskFinished():
            _fill_ended(made.finished, found.result)
        case TokenText():
            made.token.step = found.step
            made.token.text = found.text
        case StepEnded():
            made.step.CopyFrom(step(found.step, found.summary))
        case TaskPlaced():
            made.placed.attempt = found.attempt
            made.placed.node = found.node
            made.placed.domain = found.domain
            made.placed.why = found.why
        case TaskWaiting():
            made.waiting.reason = found.reason
        case TaskRequeued():
            made.requeued.attempt = found.attempt
            made.requeued.node = found.node
            made.requeued.reason = found.reason
        case AgentPublished():
            made.published.step = found.step
            made.published.topic = found.topic
            made.published.data = found.data


def pool(spec: PoolSpec, revision: int) -> fleet_pb2.Pool:
    """Return a pool; `spec_toml` leaves out what has its default."""
    return fleet_pb2.Pool(
        name=spec.name,
        spec_toml=pool_text(spec),
        revision=revision,
        model=spec.model,
        agent=spec.agent,
        pool_class=spec.pool_class,
        tools=[tool.name for tool in spec.tools],
        slots=spec.slots,
    )


def _summary(found: Step) -> str:
    if found.error:
        return found.error[:_SUMMARY_CHARS]
    if not found.result:
        return ""
    try:
        value = msgspec.msgpack.decode(found.result)
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    except (msgspec.DecodeError, TypeError):
        return f"{len(found.result)} bytes"
    return text if len(text) <= _SUMMARY_CHARS else f"{text[:_SUMMARY_CHARS]}..."


def node(status: NodeStatus) -> fleet_pb2.Node:
    """Return a node as registered and as last heard of."""
    registration, load = status.registration, status.load
    made = fleet_pb2.Node(
        node=registration.node,
        rack=registration.rack,
        epoch=registration.epoch,
        state=status.state,
        arch=registration.arch,
        load=fleet_pb2.Load(
            cpu=load.cpu,
            memory_bandwidth=load.memory_bandwidth,
            memory=load.memory,
            network=load.network,
            storage=load.storage,
        ),
        running=status.running,
        queued=status.queued,
        beat_age_ms=int(status.beat_age_s * 1000),
        version=registration.version,
        warnings=registration.warnings,
        isolation=registration.isolation,
    )
    for domain in registration.domains:
        made.domains.add(
            domain=domain.domain,
            cpus=domain.cpus,
            memory_bytes=domain.memory_bytes,
            slots=[
                fleet_pb2.Slots(pool=each.pool, total=each.total, used=max(0, each.used))
                for each in sorted(status.slots, key=lambda use: use.pool)
                if each.domain == domain.domain
            ],
        )
    return made


def drain(found: NodeDrain, waits: bool = False) -> fleet_pb2.Drain:
    """Return a drain as it was decided."""
    return fleet_pb2.Drain(
        node=found.node,
        reason=found.reason,
        by=found.by,
        at_ms=found.since_ms,
        deadline_ms=found.deadline_ms,
        waits=waits,
    )


def drain_record(found: Drain) -> fleet_pb2.Drain:
    """Return a drain as it is stored."""
    return fleet_pb2.Drain(
        node=found.node,
        reason=found.reason,
        by=found.by,
        at_ms=found.at_ms,
        deadline_ms=found.deadline_ms,
    )


def drained_attempt(line: TaskLine, now_ms: int) -> fleet_pb2.DrainedAttempt:
    """Return an attempt that is still on a node that is drained."""
    record = line.record
    return fleet_pb2.DrainedAttempt(
        task=record.task,
        pool=record.pool,
        session=record.session,
        state=line.state or record.state,
        attempt=record.attempt,
        domain=record.domain,
        asked_ms_ago=max(0, now_ms - line.asked_ms) if line.asked_ms else 0,
        reason=line.reason or _NOT_ASKED,
    )


def explanation(task: str, answer: ExplainAnswer) -> fleet_pb2.ExplainReply:
    """Return why a task was, or would be, placed where it is."""
    return fleet_pb2.ExplainReply(
        task=task,
        chosen=answer.chosen,
        why=answer.why,
        candidates=[
            fleet_pb2.Candidate(
                node=each.node,
                domain=each.domain,
                eligible=each.eligible,
                score=each.score,
                line=each.line,
            )
            for each in answer.candidates
        ],
    )
