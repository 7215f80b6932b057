"""The client of the plant, a process of its own: submits sessions' tasks until told to stop.

    python -m tests.faults.submitter ADDRESS... < COMMANDS > STORY

The first line of COMMANDS is a Begin in JSON. `drain` as a later line ends new
submissions; the process ends when all that it submitted is finished. STORY has a line of
JSON for everything that happens; a client that is started again goes on from it, with the
same request ids.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Literal

import msgspec

from corefleet.client import Client
from corefleet.errors import CorefleetError, Exhausted, Timeout, Unavailable
from corefleet.rpc import tasks_pb2
from tests.faults.agents import LEDGER

_OUTSTANDING = 2
_PAUSE_S = 0.1


class Session(msgspec.Struct, frozen=True):
    """Tasks of COUNT links with PAUSE_MS each; the next one to submit is `number`."""

    name: str
    count: int
    pause_ms: int
    number: int = 0
    """The first task whose acceptance is not known."""
    unfinished: dict[int, str] = {}
    """Ids of accepted tasks by number."""


class Begin(msgspec.Struct, frozen=True):
    sessions: list[Session]


class Ran(msgspec.Struct, frozen=True, array_like=True):
    """One step as the result tells it."""

    step: int
    kind: str
    attempt: int
    node: str
    started_ms: int


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the story."""

    what: Literal["submitting", "accepted", "finished", "trouble", "refused"]
    session: str
    number: int
    at_ms: int
    task: str = ""
    duplicate: bool = False
    done: bool = False
    output: str = ""
    attempt: int = 0
    node: str = ""
    steps: list[Ran] = []
    error: str = ""


class Submitter:
    """Submits and follows; every session has a task of its own."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._draining = asyncio.Event()

    async def run(self, begin: Begin) -> None:
        commands = asyncio.create_task(self._listen())
        async with asyncio.TaskGroup() as group:
            for session in begin.sessions:
                group.create_task(self._session(session))
        commands.cancel()

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        await reader.readline()
        self._draining.set()

    async def _session(self, session: Session) -> None:
        room = asyncio.Semaphore(_OUTSTANDING)
        async with asyncio.TaskGroup() as group:
            for number, task in session.unfinished.items():
                await room.acquire()
                group.create_task(self._follow(session, number, task, room))
            number = session.number
            while not self._draining.is_set():
                await room.acquire()
                task = await self._submit(session, number)
                if not task:
                    return
                group.create_task(self._follow(session, number, task, room))
                number += 1

    async def _submit(self, session: Session, number: int) -> str:
        """Return the task, once it is accepted; '' when it is refused for good."""
        _tell(Line("submitting", session.name, number, _now_ms()))
        while True:
            try:
                reply = await self._client.submit(
                    LEDGER.name,
                    f"{session.count} {session.pause_ms}",
                    session=session.name,
                    request_id=f"{session.name}-{number}",
                )
            except (Unavailable, Timeout, Exhausted) as error:
                await self._trouble(session, number, error)
            except CorefleetError as error:
                _tell(Line("refused", session.name, number, _now_ms(), error=repr(error)))
                return ""
            else:
                _tell(
                    Line("accepted", session.name, number, _now_ms(), reply.task, reply.duplicate)
                )
                return reply.task

    async def _follow(
        self, session: Session, number: int, task: str, room: asyncio.Semaphore
    ) -> None:
        while True:
            try:
                async for event in self._client.watch(task, tokens=False):
                    if event.HasField("finished"):
                        _tell(_ended(session, number, event.finished))
                        room.release()
                        return
                await self._trouble(session, number, Unavailable("the events ended early"))
            except (Unavailable, Timeout) as error:
                await self._trouble(session, number, error)
            except CorefleetError as error:
                _tell(Line("refused", session.name, number, _now_ms(), task, error=repr(error)))
                room.release()
                return

    async def _trouble(self, session: Session, number: int, error: CorefleetError) -> None:
        _tell(Line("trouble", session.name, number, _now_ms(), error=repr(error)))
        await asyncio.sleep(_PAUSE_S)


def _ended(session: Session, number: int, task: tasks_pb2.Task) -> Line:
    return Line(
        "finished",
        session.name,
        number,
        _now_ms(),
        task.task,
        done=task.state == tasks_pb2.TASK_STATE_DONE,
        output=task.output,
        attempt=task.attempt,
        node=task.node,
        steps=[
            Ran(step.step, step.kind, step.attempt, step.node, step.started_ms)
            for step in task.steps
        ],
        error=f"{task.failure.code}: {task.failure.message}" if task.HasField("failure") else "",
    )


def _tell(line: Line) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


async def _main(addresses: list[str]) -> None:
    begin = msgspec.json.decode(sys.stdin.buffer.readline(), type=Begin)
    async with Client(addresses) as client:
        await Submitter(client).run(begin)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1:]))
