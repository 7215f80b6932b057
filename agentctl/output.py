"""What agentctl prints: data on stdout as tables or JSON, everything else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import click
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from corefleet.rpc import tasks_pb2

STATE_NUMBERS = {
    "": tasks_pb2.TASK_STATE_UNSPECIFIED,
    "queued": tasks_pb2.TASK_STATE_QUEUED,
    "placed": tasks_pb2.TASK_STATE_PLACED,
    "running": tasks_pb2.TASK_STATE_RUNNING,
    "done": tasks_pb2.TASK_STATE_DONE,
    "failed": tasks_pb2.TASK_STATE_FAILED,
    "cancelled": tasks_pb2.TASK_STATE_CANCELLED,
}


def state_name(state: int) -> str:
    """Return the word for a TaskState."""
    return tasks_pb2.TaskState.Name(state).removeprefix("TASK_STATE_").lower()


def data(text: str) -> None:
    """Print one line of data."""
    click.echo(text)


def say(text: str) -> None:
    """Print one line for the person at the terminal."""
    click.echo(text, err=True)


def as_json(value: Any) -> None:
    """Print one JSON document on one line; protobuf messages keep their field names."""
    click.echo(json.dumps(plain(value), ensure_ascii=False, sort_keys=True))


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; on a pipe it is as wide as it needs to be."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*(str(cell) for cell in row))
    wide = None if sys.stdout.isatty() else 240
    Console(width=wide, soft_wrap=False).print(shown)


def event_json(event: tasks_pb2.TaskEvent) -> dict[str, Any]:
    """Return an event as plain data, with its kind as `event`."""
    what = event.WhichOneof("what") or "unknown"
    shown: dict[str, Any] = {"event": what, "task": event.task, "at_ms": event.at_ms}
    if what != "unknown":
        shown[what] = plain(getattr(event, what))
    return shown


def event_line(event: tasks_pb2.TaskEvent) -> str:
    """Return an event as one line for people; '' for those that need none."""
    match event.WhichOneof("what"):
        case "snapshot":
            task = event.snapshot
            where = f" on {task.node}/{task.domain}" if task.node else ""
            why = f": {task.reason}" if task.reason else ""
            return f"{state_name(task.state)}{where}{why}"
        case "waiting":
            return f"waits: {event.waiting.reason}"
        case "placed":
            placed = event.placed
            return f"placed on {placed.node}, domain {placed.domain}, attempt {placed.attempt}" + (
                f": {placed.why}" if placed.why else ""
            )
        case "step":
            return step_line(event.step)
        case "published":
            return f"published {event.published.topic}: {event.published.data}"
        case "requeued":
            return f"attempt {event.requeued.attempt} given up: {event.requeued.reason}"
        case "finished":
            return finished_line(event.finished)
        case _:
            return ""


def step_line(step: tasks_pb2.Step) -> str:
    """Return a step as one line: number, kind, node, time, what came of it."""
    name = f" {step.name}" if step.name else ""
    tokens = f", {step.tokens_out} tokens" if step.tokens_out else ""
    summary = f"  {step.summary}" if step.summary else ""
    took = f"({step.wall_us / 1e6:.2f} s{tokens})"
    return f"step {step.step} {step.kind}{name} on {step.node} {took}{summary}"


def finished_line(task: tasks_pb2.Task) -> str:
    """Return how a task ended as one line."""
    took = (task.finished_ms - task.created_ms) / 1000
    line = f"{state_name(task.state)} on {task.node or 'no node'} after {took:.2f} s"
    if task.attempt > 1:
        line += f", {task.attempt} attempts"
    if task.failure.code:
        line += f": {task.failure.code}: {task.failure.message}"
    return line


def plain(value: Any) -> Any:
    """Return `value` as what JSON knows; protobuf messages keep their field names."""
    if isinstance(value, Message):
        shown = MessageToDict(
            value, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        if isinstance(value, tasks_pb2.Task):
            shown["state"] = state_name(value.state)
        return shown
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
