"""Records and events as API messages."""

from __future__ import annotations

import msgspec
import pytest

from controld.api import render
from corefleet.messages.records import Failure, ResultRecord, Step, TaskRecord
from corefleet.messages.wire import (
    AgentPublished,
    StepEnded,
    TaskEvent,
    TaskFinished,
    TaskPlaced,
    TaskRequeued,
    TaskWaiting,
    TokenText,
)
from corefleet.rpc import tasks_pb2

TASK = "3-0123456789abcdefghjkmnpqrs"
RECORD = TaskRecord(
    task=TASK, pool="p", session="s", request_id="r", input="hi", state="placed", attempt=2,
    node="n1", domain=1, created_ms=5, why="home",
)  # fmt: skip
RESULT = ResultRecord(
    task=TASK, pool="p", session="s", request_id="r", state="failed", output="",
    failure=Failure("deadline", "too late"), attempt=2, node="n1", domain=1, created_ms=5,
    finished_ms=9, steps=(Step(step=0, kind="infer", tokens_out=4),),
)  # fmt: skip


def test_a_placed_record_runs_once_its_attempt_is_in_the_journal() -> None:
    assert render.live_task(RECORD).state == tasks_pb2.TASK_STATE_PLACED
    assert render.live_task(RECORD, journaled=1).state == tasks_pb2.TASK_STATE_PLACED
    assert render.live_task(RECORD, journaled=2).state == tasks_pb2.TASK_STATE_RUNNING


def test_entries_that_are_no_steps_are_left_out() -> None:
    steps = (Step(step=0, kind="open"), Step(step=0, kind="intent"), Step(step=0, kind="tool"))
    assert [step.kind for step in render.live_task(RECORD, steps).steps] == ["tool"]


def test_the_owners_reason_goes_before_the_placements() -> None:
    assert render.live_task(RECORD).reason == "home"
    assert render.live_task(RECORD, reason="no node").reason == "no node"


def test_an_ended_task_says_how() -> None:
    task = render.ended_task(RESULT)
    assert task.state == tasks_pb2.TASK_STATE_FAILED
    assert (task.failure.code, task.failure.message) == ("deadline", "too late")
    assert (task.created_ms, task.finished_ms, task.domain) == (5, 9, 1)
    assert [step.tokens_out for step in task.steps] == [4]


@pytest.mark.parametrize(
    ("step", "summary"),
    [
        (Step(step=0, kind="tool", result=msgspec.msgpack.encode("four")), "four"),
        (Step(step=0, kind="tool", result=msgspec.msgpack.encode({"a": 4})), '{"a":4}'),
        (Step(step=0, kind="tool", result=msgspec.msgpack.encode({1: b"x"})), '{"1":"eA=="}'),
        (Step(step=0, kind="tool", result=b"\xc1"), "1 bytes"),
        (Step(step=0, kind="tool", error="boom"), "boom"),
        (Step(step=0, kind="tool", result=msgspec.msgpack.encode("x" * 500)), "x" * 200 + "..."),
        (Step(step=0, kind="open"), ""),
    ],
)
def test_a_step_is_summed_up_in_short(step: Step, summary: str) -> None:
    assert render.step(step).summary == summary


EVENTS: list[tuple[TaskEvent, str]] = [
    (TaskWaiting(task=TASK, reason="no node"), "waiting"),
    (TaskPlaced(task=TASK, attempt=1, node="n", domain=0, why="home"), "placed"),
    (TaskRequeued(task=TASK, attempt=1, node="n", reason="lost"), "requeued"),
    (StepEnded(task=TASK, step=Step(step=1, kind="tool"), summary="4"), "step"),
    (TokenText(task=TASK, step=1, text="a"), "token"),
    (AgentPublished(task=TASK, step=1, topic="t", data="{}"), "published"),
    (TaskFinished(task=TASK, result=RESULT), "finished"),
]


@pytest.mark.parametrize(("event", "what"), EVENTS)
def test_every_event_has_its_form(event: TaskEvent, what: str) -> None:
    made = render.event(event)
    assert made.WhichOneof("what") == what
    assert made.task == TASK
