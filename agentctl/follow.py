"""Follow a task's events on a terminal or as JSON lines."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable

from agentctl.boundary import FAILED
from agentctl.output import as_json, data, event_json, event_line, say
from corefleet.rpc import tasks_pb2

Seen = Callable[[tasks_pb2.TaskEvent], None]


async def follow(
    events: AsyncIterator[tasks_pb2.TaskEvent],
    *,
    json_out: bool,
    tokens: bool,
    seen: Seen = lambda event: None,
) -> int:
    """Print events until the task ends; return 0 when it is done, 1 otherwise.

    `seen` is called with each event before it is printed.
    """
    open_line = False
    async for event in events:
        seen(event)
        if json_out:
            as_json(event_json(event))
        elif event.WhichOneof("what") == "token":
            if tokens:
                sys.stderr.write(event.token.text)
                sys.stderr.flush()
                open_line = True
            continue
        elif line := event_line(event):
            if open_line:
                say("")
                open_line = False
            say(f"  {line}")
        if event.WhichOneof("what") == "finished":
            if not json_out and event.finished.output:
                data(event.finished.output)
            return 0 if event.finished.state == tasks_pb2.TASK_STATE_DONE else FAILED
    say("the events ended before the task did; `agentctl get` shows how it stands")
    return FAILED
