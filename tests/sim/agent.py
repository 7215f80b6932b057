"""What tasks do: scripted steps whose results depend on the session's state and order."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

import msgspec

from corefleet.messages.links import (
    AppendSteps,
    AttemptOver,
    FinishTask,
    Frame,
    ReturnTask,
    RunTask,
    YieldTask,
)
from corefleet.messages.records import Failure, SessionState, Step

CHAIN = "chain"


class Script(msgspec.Struct, frozen=True):
    """A task's input."""

    steps: int
    step_s: float
    fails: bool = False
    keeps_state: bool = False


def result_of_step(before: bytes, request_id: str, step: int) -> bytes:
    """Return what a step results in: it depends on all that came before it."""
    return hashlib.blake2b(before + f"/{request_id}/{step}".encode(), digest_size=8).digest()


class SimWorker:
    """Runs attempts as a worker does: steps appended one by one, then the end.

    `say` takes its frames to agentd, `wrong` is told of what must not be.
    """

    def __init__(
        self,
        name: str,
        node: str,
        say: Callable[[str, Frame], None],
        wrong: Callable[[str], None],
    ) -> None:
        self.name = name
        self._node = node
        self._say = say
        self._wrong = wrong
        self._running: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._appended: dict[tuple[str, int], asyncio.Future[None]] = {}
        self._yields: dict[tuple[str, int], str] = {}

    def take(self, frame: Frame) -> None:
        """A frame from agentd."""
        if isinstance(frame, RunTask):
            key = (frame.record.task, frame.record.attempt)
            task = asyncio.create_task(self._run(frame), name=f"run {key}")
            self._running[key] = task
            task.add_done_callback(lambda done: self._running.pop(key, None))
        elif isinstance(frame, AttemptOver):
            task_ = self._running.get((frame.task, frame.attempt))
            if task_ is not None:
                task_.cancel()
        elif isinstance(frame, YieldTask):
            self._yields[frame.task, frame.attempt] = frame.reason
        else:
            waiting = self._appended.pop((frame.task, frame.attempt), None)  # type: ignore[attr-defined]
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    def die(self) -> None:
        """Stop all that runs, without a word."""
        for task in list(self._running.values()):
            task.cancel()

    async def _run(self, frame: RunTask) -> None:
        record = frame.record
        script = msgspec.json.decode(record.input, type=Script)
        known = {step.step: step for step in frame.journal if step.kind != "intent"}
        head = frame.head
        value = head.state.memory.get(CHAIN, b"") if head is not None else b""
        for number in range(script.steps):
            result = result_of_step(value, record.request_id, number)
            if number not in known:
                reason = self._yields.pop((record.task, record.attempt), None)
                if reason is not None:
                    back = ReturnTask(task=record.task, attempt=record.attempt, reason=reason)
                    self._say(self.name, back)
                    return
                await asyncio.sleep(script.step_s)
                step = Step(
                    step=number,
                    kind="tool",
                    name="scripted",
                    result=result,
                    attempt=record.attempt,
                    node=self._node,
                )
                await self._append(record.task, record.attempt, step)
            elif known[number].result != result:
                self._wrong(
                    f"{record.task} attempt {record.attempt}: step {number} was made from "
                    "another state of its session"
                )
            value = result
        self._say(self.name, _finish(record.task, record.attempt, script, value))

    async def _append(self, task: str, attempt: int, step: Step) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._appended[task, attempt] = done
        self._say(self.name, AppendSteps(task=task, attempt=attempt, steps=(step,)))
        await done


def _finish(task: str, attempt: int, script: Script, value: bytes) -> FinishTask:
    if script.fails:
        failure = Failure("agent_error", "told to fail")
        return FinishTask(task=task, attempt=attempt, failure=failure)
    state = None if script.keeps_state else SessionState(memory={CHAIN: value})
    return FinishTask(task=task, attempt=attempt, output=value.hex(), state=state)
