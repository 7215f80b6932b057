"""The second model, deliberately simple: tasks of a session run one after another.

Given which tasks of a session ended well, in the order of their creation, it says what each
must have put out and what the session's state must be. No attempts, no nodes, no time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tests.sim.agent import Script, result_of_step


@dataclass(frozen=True, slots=True)
class Ended:
    """A task and how it ended, in the order in which its session's tasks were created."""

    task: str
    request_id: str
    script: Script
    state: str


@dataclass(frozen=True, slots=True)
class Expected:
    """What one session must look like."""

    outputs: dict[str, str]
    """By task, of those that ended well."""
    value: bytes
    version: int
    last_task: str


def run_session(tasks: Iterable[Ended]) -> Expected:
    """Return what a session's tasks must have done."""
    outputs: dict[str, str] = {}
    value, version, last_task = b"", 0, ""
    for task in tasks:
        if task.state != "done":
            continue
        then = value
        for step in range(task.script.steps):
            then = result_of_step(then, task.request_id, step)
        outputs[task.task] = then.hex()
        if not task.script.keeps_state:
            value, version, last_task = then, version + 1, task.task
    return Expected(outputs, value, version, last_task)
