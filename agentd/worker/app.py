"""The worker: a process of one pool, bound to one domain, that runs many tasks in one loop."""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from agentd.worker.attempt import Attempt
from agentd.worker.engine_client import EngineClient
from agentd.worker.order import watch_tasks
from agentd.worker.pool import LoadedPool, load_pool
from agentd.worker.uplink import Uplink
from corefleet import event_loop, logs
from corefleet.config import LogConfig
from corefleet.errors import ConfigError, Incompatible, Unavailable
from corefleet.link import Link, connect
from corefleet.messages.links import (
    LINK_VERSION,
    AgentdToWorker,
    AttemptOver,
    Frame,
    MessageSent,
    Ping,
    ReturnTask,
    RunResumed,
    RunTask,
    SendMessage,
    StepsAppended,
    Stop,
    Welcome,
    WelcomeBack,
    WorkerAlive,
    WorkerHello,
    YieldTask,
)
from corefleet.messages.wire import Assignment

EXIT_NOT_LOADED = 3
"""Exit code when the pool's agent or a tool cannot be loaded: another start would not help."""
CONNECT_S = 10.0
TERMINATE_GRACE_S = 5.0
"""Grace of a SIGTERM."""
END_S = 1.0
"""Time for cancelled agents to end; the process ends anyway."""

_log = structlog.get_logger(__name__)


class Worker:
    """One end of a worker's link: turns agentd's messages into attempts.

    Made with what Welcome says; `run` ends when agentd told it to stop, or is gone and no
    other one came. `name` and `path` are for that other one.
    """

    def __init__(
        self,
        link: Link[AgentdToWorker],
        name: str,
        path: Path,
        welcome: Welcome,
        pool: LoadedPool,
        engine: EngineClient | None,
    ) -> None:
        self.node = welcome.node
        self.engine = engine
        self._uplink = Uplink(link, path, name, welcome.orphan_s, self._held)
        self._pool = pool
        self._attempts: dict[tuple[str, int], Attempt] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._submissions: dict[int, asyncio.Future[MessageSent]] = {}
        self._numbers = itertools.count(1)
        self._stopping: asyncio.Task[None] | None = None
        self._emptied = asyncio.Event()

    async def run(self, first: Sequence[AgentdToWorker] = ()) -> None:
        """Serve until agentd is gone, or until stopped and everything was given back.

        `first` came together with the welcome. Raises CorruptRecord.
        """
        loop = asyncio.get_running_loop()
        for message in first:
            self._handle(message)
        tasks: list[asyncio.Task[Any]] = [
            loop.create_task(self._receive()),
            loop.create_task(self._emptied.wait()),
        ]
        if self.engine is not None:
            tasks.append(loop.create_task(self.engine.run()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            if self._stopping is not None:
                tasks.append(self._stopping)
            await self._end(tasks)

    def send(self, message: Frame) -> None:
        """See turn.Services."""
        self._uplink.send(message)

    async def submit(self, pool: str, session: str, request_id: str, text: str) -> MessageSent:
        """See turn.Services."""
        call = next(self._numbers)
        answer: asyncio.Future[MessageSent] = asyncio.get_running_loop().create_future()
        self._submissions[call] = answer
        try:
            self.send(
                SendMessage(
                    call=call, pool=pool, session=session, request_id=request_id, input=text
                )
            )
            return await answer
        finally:
            del self._submissions[call]

    def stop(self, reason: str, grace_s: float) -> None:
        """Give back what runs, at its next step; what does not reach one in time, as it is."""
        if self._stopping is None:
            self._uplink.stop_looking()
            _log.info("Stopping", reason=reason, tasks=len(self._attempts), grace_s=grace_s)
            self._stopping = asyncio.get_running_loop().create_task(self._stop(reason, grace_s))

    async def _receive(self) -> None:
        async for batch in self._uplink.frames():
            for message in batch:
                self._handle(message)

    def _handle(self, message: AgentdToWorker) -> None:
        match message:
            case StepsAppended(task=task, attempt=number):
                if attempt := self._attempts.get((task, number)):
                    attempt.commit.acknowledged()
            case RunTask():
                self._start(message)
            case AttemptOver():
                self._over(message)
            case YieldTask(task=task, attempt=number, reason=reason):
                if attempt := self._attempts.get((task, number)):
                    attempt.stop(reason)
            case MessageSent(call=call):
                answer = self._submissions.get(call)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case Ping(number=number):
                cpu_us = time.process_time_ns() // 1000
                self.send(WorkerAlive(number=number, cpu_us=cpu_us))
            case Stop(reason=reason, grace_s=grace_s):
                self.stop(reason, grace_s)
            case Welcome():
                _log.warning("Welcome came twice; the first one counts", node=message.node)
            case WelcomeBack() | RunResumed():
                pass  # the uplink's

    def _start(self, run: RunTask) -> None:
        key = (run.record.task, run.record.attempt)
        if self._stopping is not None:
            self.send(ReturnTask(task=key[0], attempt=key[1], reason="the worker stops"))
        elif key in self._attempts:
            _log.warning("Attempt runs already; not started again", task=key[0], attempt=key[1])
        else:
            attempt = Attempt(run, self._pool, self)
            self._attempts[key] = attempt
            task = attempt.start()
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Not the agent's failure, which FinishTask reports: ours. Another worker may do better.
            _log.error("Attempt ended by an error of the runtime", exc_info=error)
            self.stop(f"error of the runtime: {error}", 0.0)

    def _over(self, over: AttemptOver) -> None:
        attempt = self._attempts.pop((over.task, over.attempt), None)
        if attempt is not None and attempt.task is not None and not attempt.task.done():
            attempt.drop(over.reason or over.outcome)
        if self._stopping is not None and not self._attempts:
            self._emptied.set()

    async def _stop(self, reason: str, grace_s: float) -> None:
        for attempt in list(self._attempts.values()):
            attempt.stop(reason)
        if not self._attempts:
            self._emptied.set()
        await asyncio.sleep(grace_s)
        for task, number in self._attempts:
            self.send(ReturnTask(task=task, attempt=number, reason=f"{reason}: grace is over"))
        self._emptied.set()

    def _held(self) -> tuple[Assignment, ...]:
        return tuple(attempt.assignment for attempt in self._attempts.values())

    async def _end(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        for attempt in self._attempts.values():
            attempt.drop("the worker ends")
        for task in tasks:
            task.cancel()
        await asyncio.wait([*self._running, *tasks], timeout=END_S)
        await self._uplink.close()
        self._pool.toolbox.threads.close()


async def serve(socket: Path, name: str) -> None:
    """Be the worker `name` of the agentd that listens on `socket`, until it has no more need.

    Raises ConfigError when the pool cannot be loaded, Unavailable when agentd is gone
    before it said what to run.
    """
    loop = asyncio.get_running_loop()
    watch_tasks(loop)
    link: Link[AgentdToWorker] = await connect(socket, AgentdToWorker, CONNECT_S)
    try:
        link.send(WorkerHello(version=LINK_VERSION, worker=name, pid=os.getpid()))
        welcome, *rest = await link.receive()
        if isinstance(welcome, Stop):
            _log.info("Refused by agentd", reason=welcome.reason)
            return
        if not isinstance(welcome, Welcome):
            raise Incompatible(f"agentd began with {type(welcome).__name__}; expected Welcome")
        structlog.contextvars.bind_contextvars(
            node=welcome.node, domain=welcome.domain, pool=welcome.pool.name
        )
        pool = load_pool(welcome.pool)
        # What was loaded stays for good: no collection need look at it again.
        gc.freeze()
        engine = EngineClient(Path(welcome.engine_socket)) if welcome.engine_socket else None
        worker = Worker(link, name, socket, welcome, pool, engine)
        loop.add_signal_handler(signal.SIGTERM, worker.stop, "SIGTERM", TERMINATE_GRACE_S)
        # Ctrl-C in a foreground fleet reaches every process; agentd says when to stop.
        loop.add_signal_handler(signal.SIGINT, lambda: None)
        await worker.run(rest)
    finally:
        await link.close()


def main() -> int:
    """Run a worker; return its exit code: 3 when the pool cannot be loaded, 1 without agentd."""
    parser = argparse.ArgumentParser("agentd.worker", description=__doc__)
    parser.add_argument("--socket", required=True, type=Path, help="where agentd listens")
    parser.add_argument("--worker", required=True, help="name that agentd gave this worker")
    parser.add_argument("--domain", help="shown by ps; numactl has bound this process to it")
    parser.add_argument("--cpus", help="shown by ps")
    options = parser.parse_args()
    logs.configure(LogConfig(), "worker", worker=options.worker)
    try:
        with event_loop.runner() as runner:
            runner.run(serve(options.socket, options.worker))
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201 -- the last words of the process
        return EXIT_NOT_LOADED
    except (Unavailable, Incompatible) as error:
        print(error, file=sys.stderr)  # noqa: T201 -- the last words of the process
        return 1
    return 0
