"""What a worker process talks to, in the test's process: an agentd and an engine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from corefleet.link import Link, LinkServer, serve
from corefleet.messages.links import (
    AppendSteps,
    AttemptOver,
    CancelGenerate,
    FinishTask,
    Frame,
    Generate,
    Generated,
    GenerateDone,
    ReturnTask,
    RunTask,
    StepsAppended,
    Welcome,
    WorkerHello,
    WorkerToAgentd,
    WorkerToEngine,
)
from corefleet.messages.records import PoolSpec, SessionHead, SessionState, Step, TaskRecord

F = TypeVar("F", bound=Frame)
PATIENCE_S = 20.0


class FakeAgentd:
    """Welcomes one worker; acknowledges appends and ends as they come."""

    def __init__(self, socket: Path, pool: PoolSpec, engine_socket: Path | None = None) -> None:
        self.socket = socket
        self.welcome = Welcome(
            node="n1",
            domain=0,
            pool=pool,
            engine_socket=str(engine_socket) if engine_socket else "",
        )
        self.journals: dict[str, list[Step]] = {}
        self.received: list[Any] = []
        self.acknowledge = True
        self.link: Link[Any] | None = None
        self._news = asyncio.Condition()

    async def handle(self, link: Link[Any]) -> None:
        self.link = link
        async for batch in link:
            for message in batch:
                self._answer(link, message)
            async with self._news:
                self.received.extend(batch)
                self._news.notify_all()

    def _answer(self, link: Link[Any], message: Any) -> None:
        match message:
            case WorkerHello():
                link.send(self.welcome)
            case AppendSteps(task=task, attempt=attempt, steps=steps) if self.acknowledge:
                self.journals.setdefault(task, []).extend(steps)
                link.send(StepsAppended(task=task, attempt=attempt))
            case FinishTask(task=task, attempt=attempt, steps=steps):
                self.journals.setdefault(task, []).extend(steps)
                link.send(AttemptOver(task=task, attempt=attempt, outcome="finished"))
            case ReturnTask(task=task, attempt=attempt):
                link.send(AttemptOver(task=task, attempt=attempt, outcome="returned"))

    def send(self, message: Frame) -> None:
        assert self.link is not None
        self.link.send(message)

    def start(
        self, text: str, task: str = "t1", attempt: int = 1, state: SessionState | None = None
    ) -> None:
        """Run a task from its journal so far."""
        pool = self.welcome.pool.name
        record = TaskRecord(
            task=task, pool=pool, session="s", request_id=task, input=text, attempt=attempt
        )
        head = SessionHead(pool=pool, session="s", state=state) if state else None
        journal = tuple(self.journals.get(task, ()))
        self.send(RunTask(record=record, head=head, journal=journal))

    async def expect(self, kind: type[F], holds: Callable[[F], bool] = lambda _: True) -> F:
        """Return the first message of `kind` for which `holds` is true, once it came."""
        async with asyncio.timeout(PATIENCE_S), self._news:
            while True:
                for message in self.received:
                    if isinstance(message, kind) and holds(message):
                        return message
                await self._news.wait()

    async def finish(self, task: str = "t1") -> FinishTask:
        return await self.expect(FinishTask, lambda end: end.task == task)


class FakeEngine:
    """Answers generations with `answer`, unless it holds them."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.requests: list[Generate] = []
        self.cancelled: list[int] = []
        self.answer: Callable[[Generate], GenerateDone] = _echo
        self.hold = False
        self.requested = asyncio.Event()
        self.was_cancelled = asyncio.Event()
        self._held: list[tuple[Link[Any], Generate]] = []
        self._server: LinkServer | None = None

    async def start(self) -> None:
        self._server = await serve(self.socket, WorkerToEngine, self._handle)

    async def stop(self) -> None:
        """Die: links break with what runs in them."""
        if self._server is not None:
            await self._server.close()
            self._server = None

    def release(self) -> None:
        """Answer what was held, and hold nothing more."""
        self.hold = False
        held, self._held = self._held, []
        for link, request in held:
            self._send(link, request)

    def _send(self, link: Link[Any], request: Generate) -> None:
        done = self.answer(request)
        link.send(Generated(call=request.call, text=done.text))
        link.send(done)

    async def _handle(self, link: Link[Any]) -> None:
        async for batch in link:
            for message in batch:
                match message:
                    case Generate():
                        self.requests.append(message)
                        self.requested.set()
                        if self.hold:
                            self._held.append((link, message))
                        else:
                            self._send(link, message)
                    case CancelGenerate(call=call):
                        self.cancelled.append(call)
                        self.was_cancelled.set()


def _echo(request: Generate) -> GenerateDone:
    return GenerateDone(call=request.call, text=request.turns[-1].text.upper(), tokens_out=1)


class WorkerProcess:
    """A real worker."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ended(self) -> tuple[int, str]:
        """Return exit code and standard error once it ended."""
        async with asyncio.timeout(PATIENCE_S):
            _, errors = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, errors.decode()


@asynccontextmanager
async def worker_of(agentd: FakeAgentd) -> AsyncIterator[WorkerProcess]:
    """Start a worker of `agentd`; kill it at the end if it still runs."""
    server = await serve(agentd.socket, WorkerToAgentd, agentd.handle)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "agentd.worker",
        *("--socket", str(agentd.socket), "--worker", "w1", "--domain", "0", "--cpus", "0"),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield WorkerProcess(process)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()
        await server.close()
