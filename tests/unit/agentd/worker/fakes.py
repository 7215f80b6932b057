"""An agentd and an engine in this process, as far as an attempt can tell."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from agentd.worker.attempt import Attempt
from agentd.worker.engine_client import EngineGone
from agentd.worker.order import watch_tasks
from agentd.worker.pool import LoadedPool
from agentd.worker.tools import LoadedTool, Toolbox, ToolThreads
from corefleet.agent import Agent
from corefleet.messages.links import (
    AppendSteps,
    EmitEvents,
    FinishTask,
    Frame,
    Generate,
    GenerateDone,
    MessageSent,
    ReturnTask,
    RunTask,
)
from corefleet.messages.records import (
    PoolSpec,
    SessionHead,
    SessionState,
    Step,
    TaskRecord,
    ToolSpec,
)
from corefleet.messages.wire import TaskEvent
from corefleet.tool import Tool

TASK = "3f-01j5x0c9k2m4n6p8q0r2s4t6v8"


def loaded(agent: Agent, *tools: Tool, **spec: Any) -> LoadedPool:
    """Return a pool of `agent` with `tools`."""
    threads = ToolThreads()
    box = {t.name: LoadedTool(ToolSpec(name=t.name, source="m:f"), t, threads) for t in tools}
    return LoadedPool(PoolSpec(**{"name": "p", "model": "m", **spec}), agent, Toolbox(box, threads))


class Script(Agent):
    """An agent of one coroutine function."""

    def __init__(self, program: Callable[[Any], Any]) -> None:
        self.program = program

    async def run(self, turn: Any) -> str:
        result: str = await self.program(turn)
        return result


class FakeEngine:
    """Answers each request with `answer(request)`, at once or after random turns of the loop."""

    def __init__(self, seed: int | None = None) -> None:
        self.requests: list[Generate] = []
        self.requested = asyncio.Event()
        self._texts: dict[str, asyncio.Event] = {}
        self.answer: Callable[[Generate], GenerateDone] = echo
        self.hold: asyncio.Event | None = None
        self.after: dict[str, str] = {}
        """Requests that are answered only once another one has come."""
        self.gone = False
        self.cancelled = 0
        self._rng = None if seed is None else random.Random(seed)

    async def generate(
        self, request: Generate, heard: Callable[[str], None], waits: Callable[[str], None]
    ) -> GenerateDone:
        self.requests.append(request)
        self.requested.set()
        self._asked(request.turns[-1].text).set()
        try:
            await linger(self._rng)
            if self.hold is not None:
                await self.hold.wait()
            if before := self.after.get(request.turns[-1].text):
                await self._asked(before).wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.gone:
            raise EngineGone("no engine")
        done = self.answer(request)
        heard(done.text)
        return done

    def _asked(self, text: str) -> asyncio.Event:
        return self._texts.setdefault(text, asyncio.Event())


def echo(request: Generate) -> GenerateDone:
    """Answer with the last message in capitals."""
    return GenerateDone(call=0, text=request.turns[-1].text.upper(), tokens_in=3, tokens_out=2)


async def linger(rng: random.Random | None) -> None:
    """Let the loop turn a random number of times."""
    if rng is not None:
        for _ in range(rng.choice((0, 0, 1, 2, 5, 30))):
            await asyncio.sleep(0)


@dataclass
class FakeNode:
    """Journals what attempts append. `journal` outlives them, as the real one does."""

    engine: FakeEngine | None = field(default_factory=FakeEngine)
    node: str = "n1"
    seed: int | None = None
    hold_appends: bool = False
    lose_after: int | None = None
    """The process dies when so many appends are durable: their acknowledgement is lost."""
    journal: list[Step] = field(default_factory=list)
    appends: list[AppendSteps] = field(default_factory=list)
    events: list[TaskEvent] = field(default_factory=list)
    sent: dict[str, str] = field(default_factory=dict)
    refuse_send: str = ""
    attempt: Attempt | None = None
    end: FinishTask | ReturnTask | None = None
    died: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    appended: asyncio.Event = field(default_factory=asyncio.Event)
    _flying: bool = False

    def send(self, message: Frame) -> None:
        if self.died:
            return
        match message:
            case AppendSteps():
                assert not self._flying, "two appends of a task in flight"
                self._flying = True
                self.appends.append(message)
                self.appended.set()
                if not self.hold_appends:
                    # Outside of the program's context: this is no branch of the program.
                    loop = asyncio.get_running_loop()
                    Context().run(loop.create_task, self.acknowledge(message))
            case EmitEvents(events=events):
                self.events.extend(events)
            case FinishTask() | ReturnTask():
                assert not self._flying, "ended with an append in flight"
                assert self.end is None, "ended twice"
                self.end = message
                if isinstance(message, FinishTask):
                    self.journal.extend(message.steps)
                self.ended.set()

    async def acknowledge(self, message: AppendSteps) -> None:
        await linger(None if self.seed is None else random.Random(self.seed + len(self.journal)))
        if self.died:
            return
        assert self.attempt is not None
        self.journal.extend(message.steps)
        self._flying = False
        if self.lose_after is not None and len(self.appends) > self.lose_after:
            self.kill()
            return
        self.events.extend(message.events)
        self.attempt.commit.acknowledged()

    async def submit(self, pool: str, session: str, request_id: str, text: str) -> MessageSent:
        await linger(None if self.seed is None else random.Random(self.seed + len(self.sent)))
        if self.refuse_send:
            return MessageSent(call=0, error=self.refuse_send)
        assert self.sent.setdefault(request_id, text) == text, "one request id, two messages"
        return MessageSent(call=0, task=f"task-of-{request_id}")

    def kill(self) -> None:
        """The worker's process is gone: nothing it does has an effect any more."""
        self.died = True
        assert self.attempt is not None
        self.attempt.drop("killed")
        self.ended.set()

    @asynccontextmanager
    async def running(
        self,
        pool: LoadedPool,
        text: str = "hello",
        state: SessionState | None = None,
        **record: Any,
    ) -> Any:
        """Start an attempt with the journal so far; at the end see its task end."""
        watch_tasks(asyncio.get_running_loop())
        self._flying = False
        self.end, self.died = None, False
        self.ended = asyncio.Event()
        made = {"attempt": 1, "created_ms": 1_700_000_000_000, **record}
        run = RunTask(
            record=TaskRecord(task=TASK, pool="p", session="s", request_id="r", input=text, **made),
            head=SessionHead(pool="p", session="s", state=state) if state else None,
            journal=tuple(self.journal),
        )
        self.attempt = Attempt(run, pool, self)
        task = self.attempt.start()
        try:
            yield self.attempt
        finally:
            if not task.done() and self.end is None:
                self.attempt.drop("the test ends")
            await asyncio.wait((task,))
            pool.toolbox.threads.close()
            asyncio.get_running_loop().set_task_factory(None)
            if not task.cancelled():
                task.result()

    async def run(self, pool: LoadedPool, text: str = "hello", **rest: Any) -> Any:
        """Run an attempt to its end; return the last frame, None if the process died."""
        async with self.running(pool, text, **rest), asyncio.timeout(30):
            await self.ended.wait()
        return self.end


def kinds(steps: Sequence[Step]) -> list[str]:
    """Return `number:kind:name` of each step."""
    return [f"{step.step}:{step.kind}:{step.name}" for step in steps]
