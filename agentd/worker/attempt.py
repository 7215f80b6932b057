"""One attempt of a task: drives its agent and ends it, well, badly, or not at all."""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import dataclass
from pathlib import Path
from time import time_ns

import structlog

from agentd.worker.commit import Commit
from agentd.worker.pool import LoadedPool
from agentd.worker.state import window
from agentd.worker.summary import events_of
from agentd.worker.turn import LiveTurn, Services
from corefleet import errors
from corefleet.errors import InferFailed, InvalidInput, ToolFailed
from corefleet.messages.links import FinishTask, ReturnTask, RunTask
from corefleet.messages.records import Failure, FailureCode, SessionState, Turn
from corefleet.messages.wire import Assignment

MAX_OUTPUT_BYTES = 256 * 1024
_MAX_MESSAGE = 2000
_RUNTIME = tuple(str(Path(file).parent) for file in (__file__, errors.__file__, asyncio.__file__))
"""Where the lines of a traceback are not the agent's."""


@dataclass(frozen=True, slots=True)
class Returned:
    """The attempt ends, the task does not."""

    reason: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """Whoever holds the task now, it is not this attempt: nothing more is said of it."""

    reason: str


class Attempt:
    """Runs one RunTask from `start` to the end of `task`."""

    def __init__(self, run: RunTask, pool: LoadedPool, services: Services) -> None:
        record = run.record
        self.key = (record.task, record.attempt)
        self.commit = Commit(record.task, record.attempt, services.send)
        self.turn = LiveTurn(run, pool, services, self.commit, self)
        self._run = run
        self._pool = pool
        self._services = services
        self._verdict: Failure | Returned | Dropped | None = None
        self._in_agent = False
        self._agent_ended = False
        self.task: asyncio.Task[None] | None = None

    @property
    def assignment(self) -> Assignment:
        """What another agentd needs to carry this attempt on."""
        run = self._run
        return Assignment(
            record=run.record,
            revision=run.revision,
            create_seq=run.create_seq,
            head=run.head,
            head_revision=run.head_revision,
        )

    @property
    def over(self) -> bool:
        """See turn.Ending."""
        return self._verdict is not None or not self._in_agent

    def start(self) -> asyncio.Task[None]:
        """Begin; the task ends when agentd was told how the attempt ended."""
        self.task = asyncio.get_running_loop().create_task(self._execute())
        return self.task

    def fail(self, failure: Failure) -> None:
        """See turn.Ending."""
        self._conclude(failure)

    def give_back(self, reason: str) -> None:
        """See turn.Ending."""
        self._conclude(Returned(reason))

    def stop(self, reason: str) -> None:
        """Give the attempt back at its next step, unless the agent has ended."""
        if not self._agent_ended:
            self.turn.stop(reason)

    def drop(self, reason: str) -> None:
        """Stop at once: the agent is cancelled and agentd is told nothing."""
        self._verdict = Dropped(reason)
        if self.task is not None:
            self.task.cancel()

    def _conclude(self, verdict: Failure | Returned) -> None:
        """Interrupt the agent, from outside of its task: a task cannot cancel itself cleanly."""
        if self._verdict is None:
            self._verdict = verdict
            asyncio.get_running_loop().call_soon(self._interrupt)

    def _interrupt(self) -> None:
        if self._in_agent and self.task is not None:
            self.task.cancel()

    async def _execute(self) -> None:
        task, number = self.key
        structlog.contextvars.bind_contextvars(task=task, attempt=number)
        try:
            output = await self._agent()
            await self._end_branches()
            await self._tell(output)
        except asyncio.CancelledError:
            if not isinstance(self._verdict, Dropped):
                raise
            await self._end_branches()

    async def _agent(self) -> str:
        """Run the agent; what it returns counts unless there is a verdict."""
        self.turn.order.enter()
        self._in_agent = True
        output = ""
        try:
            output = await self._pool.agent.run(self.turn)
            self._check(output)
        except asyncio.CancelledError as error:
            if self._verdict is None:
                self._verdict = failure_of(error)
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- whatever an agent raises fails its task only
            if self._verdict is None:
                self._verdict = failure_of(error)
        finally:
            self._in_agent = False
            self._agent_ended = True
        return output

    def _check(self, output: object) -> None:
        """Raise for an output that is none."""
        self.turn.replay.check_end()
        if not isinstance(output, str):
            raise TypeError(f"run() returned {type(output).__name__}; expected str")
        size = len(output.encode())
        if size > MAX_OUTPUT_BYTES:
            raise ValueError(f"run() returned {size} bytes; at most {MAX_OUTPUT_BYTES}")

    async def _end_branches(self) -> None:
        """Cancel what the agent left running, and see it end."""
        branches = self.turn.order.branches
        if branches:
            for branch in tuple(branches):
                branch.cancel()
            await asyncio.wait(tuple(branches))

    async def _tell(self, output: str) -> None:
        task, attempt = self.key
        verdict = self._verdict
        if isinstance(verdict, Dropped):
            return
        if isinstance(verdict, Returned):
            await self.commit.all_durable()
            self._services.send(ReturnTask(task=task, attempt=attempt, reason=verdict.reason))
            return
        steps = await self.commit.rest()
        failed = verdict is not None
        self._services.send(
            FinishTask(
                task=task,
                attempt=attempt,
                output="" if failed else output,
                failure=verdict,
                steps=steps,
                state=None if failed else self._state(output),
                events=events_of(task, steps, time_ns() // 1_000_000),
            )
        )

    def _state(self, output: str) -> SessionState | None:
        turn, count = self.turn, self._pool.spec.history_turns
        if not count and not turn.memory.changed:
            return None
        new = (Turn("user", turn.input), *turn.exchanges, Turn("assistant", output))
        history = window(turn.history, new, count) if count else ()
        return SessionState(memory=turn.memory.merged(), history=history)


def failure_of(error: BaseException) -> Failure:
    """Return what a task fails with when its agent lets `error` pass."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    code: FailureCode = "agent_error"
    if isinstance(error, InferFailed):
        code = "model_error"
    elif isinstance(error, ToolFailed):
        code = "tool_error"
    elif isinstance(error, InvalidInput) and error.field == "input":
        code = "input_rejected"
    text = str(error)[:_MAX_MESSAGE] if code != "agent_error" else _with_place(error)
    return Failure(code, text)


def _with_place(error: BaseException) -> str:
    """Name the error and the agent's line that it passed through last."""
    text = f"{type(error).__name__}: {error}"[:_MAX_MESSAGE]
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith(_RUNTIME)]
    if not theirs:
        return text
    last = theirs[-1]
    return f"{text} ({Path(last.filename).name}:{last.lineno} in {last.name}: {last.line})"
