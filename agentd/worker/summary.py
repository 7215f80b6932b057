"""Committed steps as watchers are told of them: how they ended, in one short line. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from corefleet.agent import Inference
from corefleet.codec import decode
from corefleet.messages.records import Step
from corefleet.messages.wire import StepEnded

MAX_CHARACTERS = 160
_TOLD = frozenset({"infer", "tool", "remember", "send", "publish"})


def events_of(task: str, steps: tuple[Step, ...], at_ms: int) -> tuple[StepEnded, ...]:
    """Return one event a step, without its result.

    Intents and stages are left out: an intent is the same step as its tool, and stages
    are for the trace of the whole task.
    """
    return tuple(
        StepEnded(
            task=task,
            at_ms=at_ms,
            step=msgspec.structs.replace(step, result=b"", fingerprint=b""),
            summary=summary(step),
        )
        for step in steps
        if step.kind in _TOLD
    )


def summary(step: Step) -> str:
    """Return what came of a step, on one line of at most MAX_CHARACTERS."""
    if step.error:
        return _line(step.error)
    if step.kind == "infer":
        answer = decode(step.result, Inference)
        return _line(f"{answer.tool}({_json(answer.arguments)})" if answer.tool else answer.text)
    if not step.result:
        return ""
    value = decode(step.result, object)
    return _line(value if isinstance(value, str) else _json(value))


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError):  # a map whose keys are no strings
        return repr(value)


def _line(text: str) -> str:
    line = " ".join(text[: 2 * MAX_CHARACTERS].split())
    return line if len(line) <= MAX_CHARACTERS else f"{line[: MAX_CHARACTERS - 3]}..."
