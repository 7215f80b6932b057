"""What `agentctl trace` makes of a task's attempts and steps."""

from __future__ import annotations

from agentctl.history import history, rows, summary
from controld.api import render
from controld.api.trace import attempts
from corefleet.messages.records import Failure, PastAttempt, ResultRecord, Step, TaskRecord
from corefleet.rpc import tasks_pb2

TASK = "3-0123456789abcdefghjkmnpqrs"
LOST = PastAttempt(
    1, "n1", "lost: three missed beats", domain=1, placed_ms=1_040, ended_ms=1_900, why="best of 8"
)
STEPS = (
    Step(step=0, kind="infer", attempt=1, node="n1", started_ms=1_100, wall_us=200_000,
         cpu_us=1_000, tokens_in=5, tokens_out=7),
    Step(step=-1, kind="open", attempt=2, node="n2"),
    Step(step=1, kind="tool", name="look", attempt=2, node="n2", started_ms=2_000, wall_us=50_000),
)  # fmt: skip
RESULT = ResultRecord(
    task=TASK, pool="p", session="s", request_id="r", state="failed", attempt=2, node="n2",
    domain=0, why="home", placed_ms=1_900, past=(LOST,), created_ms=1_000, finished_ms=2_100,
    failure=Failure("agent_error", "broke"), steps=STEPS,
)  # fmt: skip


def trace_of(result: ResultRecord) -> tasks_pb2.TaskTrace:
    return tasks_pb2.TaskTrace(task=render.ended_task(result), attempts=attempts(result))


def test_attempts_and_steps_are_told_in_time_order_with_gaps() -> None:
    told = history(trace_of(RESULT))
    assert told["queue_wait_ms"] == 40
    assert [(a["attempt"], a["cause"], a["ended_ms"]) for a in told["attempts"]] == [
        (1, "lost", 1_900),
        (2, "failed", 2_100),
    ]
    assert told["attempts"][0]["reason"] == "three missed beats"
    assert [step["gap_ms"] for step in told["steps"]] == [100.0, 700.0]
    assert told["total"] == {
        "ms": 1_100, "attempts": 2, "steps": 2, "wall_ms": 250.0, "cpu_ms": 1.0,
        "gap_ms": 800.0, "tokens_in": 5, "tokens_out": 7,
    }  # fmt: skip
    assert [row[:4] for row in rows(told)] == [
        ("0.000", "submitted", "", ""),
        ("0.040", "placed", "1", "n1/1"),
        ("0.100", "step 0 infer", "1", "n1"),
        ("0.900", "left: lost", "1", "n1/1"),
        ("0.900", "placed", "2", "n2/0"),
        ("1.000", "step 1 tool look", "2", "n2"),
        ("1.100", "failed", "", ""),
    ]
    assert rows(told)[-1][-1] == "agent_error: broke"
    assert summary(told).startswith("failed after 1.100 s; queue wait 0.040 s; 2 attempts; 2 steps")


def test_a_live_task_has_an_attempt_that_goes_on() -> None:
    record = TaskRecord(
        task=TASK, pool="p", session="s", request_id="r", input="", state="placed", attempt=1,
        node="n1", domain=0, placed_ms=1_040, created_ms=1_000,
    )  # fmt: skip
    told = history(tasks_pb2.TaskTrace(task=render.live_task(record), attempts=attempts(record)))
    assert [(a["attempt"], a["ended_ms"], a["cause"]) for a in told["attempts"]] == [
        (1, None, None)
    ]
    assert (told["finished_ms"], told["total"]["ms"]) == (None, None)


def test_an_attempt_whose_loss_ended_the_task_is_told_once() -> None:
    """Dead letters keep the last attempt among the past ones."""
    last = RESULT.__class__(
        task=TASK, pool="p", session="s", request_id="r", state="failed", attempt=1, node="n1",
        past=(LOST,), created_ms=1_000, finished_ms=1_950,
        failure=Failure("attempts_exhausted", "1 of 1 attempts failed"),
    )  # fmt: skip
    assert [each.cause for each in attempts(last)] == ["lost"]


def test_records_of_older_programs_have_attempts_without_times() -> None:
    old = ResultRecord(
        task=TASK, pool="p", session="s", request_id="r", state="done", attempt=3, node="n2",
        past=(PastAttempt(2, "n1", "stuck: no progress"),), created_ms=1_000, finished_ms=1_500,
    )  # fmt: skip
    told = history(trace_of(old))
    assert [row[1] for row in rows(told)] == ["submitted", "done"]
    assert told["queue_wait_ms"] is None
    assert "1 more ended by nobody's fault and are not kept" in summary(told)
