"""Messages over Unix sockets: agentd with its workers, workers with an engine.

Framing: a 4-byte big-endian length, then one MessagePack array of messages
(those that were ready together). Each message is a tagged map; `type` names it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from corefleet.messages.records import (
    Failure,
    PoolSpec,
    SessionHead,
    SessionState,
    Step,
    TaskRecord,
    Turn,
)
from corefleet.messages.wire import Assignment, TaskEvent

LINK_VERSION = 1
MAX_FRAME_BYTES = 16 * 1024 * 1024


class Frame(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag_field="type"):
    """Base of all messages on a link."""


# worker -> agentd


class WorkerHello(Frame, frozen=True, tag="hello"):
    """First message of a worker; agentd answers with Welcome or closes with Stop."""

    version: int
    worker: str
    pid: int
    held: tuple[Assignment, ...] = ()
    """What it runs for an agentd that is no more; then the answer is WelcomeBack."""


class AppendSteps(Frame, frozen=True, tag="append"):
    """Journal these steps; answered by StepsAppended or AttemptOver. One at a time a task."""

    task: str
    attempt: int
    steps: tuple[Step, ...]
    events: tuple[TaskEvent, ...] = ()
    """Published once the append is acknowledged."""


class FinishTask(Frame, frozen=True, tag="finish"):
    """End the attempt well or badly; answered by AttemptOver when it is durable."""

    task: str
    attempt: int
    output: str = ""
    failure: Failure | None = None
    steps: tuple[Step, ...] = ()
    """Steps that ended with the task and were not appended before."""
    state: SessionState | None = None
    """The session's new state; None leaves it as it was."""
    events: tuple[TaskEvent, ...] = ()
    """Published before the task's end, once that is durable."""


class ReturnTask(Frame, frozen=True, tag="return"):
    """Give the attempt back: it can go on elsewhere, or later."""

    task: str
    attempt: int
    reason: str


class EmitEvents(Frame, frozen=True, tag="emit"):
    """Events that need no journal: tokens."""

    task: str
    attempt: int
    events: tuple[TaskEvent, ...]


class SendMessage(Frame, frozen=True, tag="send"):
    """Submit a task to another session; answered by MessageSent with the same `call`."""

    call: int
    pool: str
    session: str
    request_id: str
    input: str


class WorkerAlive(Frame, frozen=True, tag="alive"):
    """Answer to Ping: the worker's loop turns."""

    number: int
    cpu_us: int = 0


# agentd -> worker


class Welcome(Frame, frozen=True, tag="welcome"):
    """What the worker runs, and where its engine listens ('' when the pool has no model)."""

    node: str
    domain: int
    pool: PoolSpec
    engine_socket: str = ""
    active: bool = True
    """False: a spare, which warms up and waits for its first RunTask."""
    orphan_s: float = 0.0
    """How long the worker goes on without agentd and looks for the next one; 0: not at all."""


class WelcomeBack(Frame, frozen=True, tag="back"):
    """The worker is known; each attempt that it holds is answered by RunResumed or AttemptOver."""


class RunResumed(Frame, frozen=True, tag="resumed"):
    """This agentd carries the attempt on: send again what was not answered."""

    task: str
    attempt: int


class RunTask(Frame, frozen=True, tag="run"):
    """Run this attempt; `journal` holds the committed steps of earlier attempts."""

    record: TaskRecord
    head: SessionHead | None = None
    journal: tuple[Step, ...] = ()
    revision: int = 0
    create_seq: int = 0
    head_revision: int = 0
    """With `revision` and `create_seq` what the next agentd needs to carry the attempt on."""


class StepsAppended(Frame, frozen=True, tag="appended"):
    task: str
    attempt: int


class AttemptOver(Frame, frozen=True, tag="over"):
    """Stop working on this attempt. `outcome` says why."""

    task: str
    attempt: int
    outcome: Literal["finished", "returned", "dropped"]
    reason: str = ""


class YieldTask(Frame, frozen=True, tag="yield"):
    """Give the attempt back (ReturnTask with `reason`) once its step under way is journaled."""

    task: str
    attempt: int
    reason: str


class MessageSent(Frame, frozen=True, tag="sent"):
    call: int
    task: str = ""
    error: str = ""


class Ping(Frame, frozen=True, tag="ping"):
    number: int


class Stop(Frame, frozen=True, tag="stop"):
    """Finish or give back what runs, then exit, within `grace_s`."""

    reason: str
    grace_s: float = 5.0


WorkerToAgentd = (
    WorkerHello | AppendSteps | FinishTask | ReturnTask | EmitEvents | SendMessage | WorkerAlive
)
AgentdToWorker = (
    Welcome
    | WelcomeBack
    | RunTask
    | RunResumed
    | StepsAppended
    | AttemptOver
    | YieldTask
    | MessageSent
    | Ping
    | Stop
)


# worker -> engine


class ToolDefinition(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool as the model is told of it."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON Schema of the arguments object."""


class Generate(Frame, frozen=True, tag="generate"):
    """Generate one assistant message. Answered by Generated... and GenerateDone."""

    call: int
    session: str
    system: str
    turns: tuple[Turn, ...]
    """The conversation; `text` is never parsed for control tokens."""
    tools: tuple[ToolDefinition, ...] = ()
    tool_choice: Literal["auto", "required", "none"] = "auto"
    """With tools and `required`, the answer is one valid call; `auto` leaves the choice."""
    json_schema: dict[str, Any] | None = None
    """Without tools: the answer is JSON that this bounded schema accepts."""
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    stream: bool = True
    deadline_s: float = 0.0
    """Seconds from receipt after which the generation fails; 0 is never."""


class CancelGenerate(Frame, frozen=True, tag="cancel"):
    call: int


class EnginePing(Frame, frozen=True, tag="ping"):
    number: int


# engine -> worker


class Generated(Frame, frozen=True, tag="text"):
    """Text that was generated since the last one; whole UTF-8 characters only."""

    call: int
    text: str


class GenerateDone(Frame, frozen=True, tag="done"):
    """The end of a generation."""

    call: int
    text: str
    tool: str = ""
    """Set when the model calls a tool; `arguments` is then JSON text its schema accepts."""
    arguments: str = ""
    finish: Literal["stop", "length", "tool", "cancelled", "deadline"] = "stop"
    tokens_in: int = 0
    tokens_out: int = 0
    cached_tokens: int = 0


class GenerateFailed(Frame, frozen=True, tag="failed"):
    """`retry` says whether the same request can succeed later."""

    call: int
    reason: str
    retry: bool = False


class EngineAlive(Frame, frozen=True, tag="alive"):
    """Answer to EnginePing, from the decode thread: it turns."""

    number: int
    running: int = 0
    waiting: int = 0
    steps: int = 0
    """Decode steps since the start."""


WorkerToEngine = Generate | CancelGenerate | EnginePing
EngineToWorker = Generated | GenerateDone | GenerateFailed | EngineAlive
