"""The order in which a program that runs several branches gets its results.

A program is repeatable if it meets the same results in the same order. So results enter
one at a time, the next only when all that followed from the last has come to rest, and
on a repeated run the journal's come first, in the journal's order. A program that never
made a second task is at rest whenever it waits, and pays nothing for this.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any

from agentd.worker.replay import Replay

REST_ROUNDS = 16
"""Turns of the event loop without a new step after which a program counts as at rest.

A result travels through one future a turn: out of a task, into a gather, into the task
that waits for that. This is the depth of nesting that is certain to be followed.
"""

_current: ContextVar[Order | None] = ContextVar("order", default=None)


def watch_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Make `loop` tell each program's Order of the tasks that the program creates."""

    def create(
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        **kwargs: Any,
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **kwargs)
        order = _current.get()
        if order is not None:
            order.branched(task)
        return task

    loop.set_task_factory(create)


class Order:
    """Lets results into one program. `at_rest` is called when there is none to let in."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, replay: Replay, at_rest: Callable[[], None]
    ) -> None:
        self.branches: set[asyncio.Task[Any]] = set()
        self._loop = loop
        self._replay = replay
        self._at_rest = at_rest
        self._parallel = False
        self._planned = False
        self._quiet = 0
        self._replayed: dict[int, asyncio.Future[None]] = {}
        self._ended: deque[asyncio.Future[None]] = deque()

    def enter(self) -> None:
        """The current task, and those that it creates, are the program."""
        _current.set(self)

    def branched(self, task: asyncio.Task[Any]) -> None:
        """The program made another task."""
        self._parallel = True
        self.branches.add(task)
        task.add_done_callback(self.branches.discard)

    def asked(self) -> None:
        """The program came to a step, so it was not at rest."""
        if self._parallel:
            self.moved()

    def moved(self) -> None:
        """The program goes on: call `at_rest` once it waits for something again."""
        self._quiet = 0
        if not self._planned:
            self._planned = True
            self._loop.call_soon(self._turned)

    async def replayed(self, step: int) -> None:
        """Wait until it is the turn of the journaled result of `step`."""
        if not self._parallel:
            self._replay.delivered(step)
            return
        self._replayed[step] = self._loop.create_future()
        self.moved()
        await self._replayed[step]

    async def ended(self) -> None:
        """Wait until it is the turn of a result that came to be just now."""
        self.moved()
        if self._parallel:
            turn = self._loop.create_future()
            self._ended.append(turn)
            await turn

    def _turned(self) -> None:
        self._quiet += 1
        if self._parallel and self._quiet < REST_ROUNDS:
            self._loop.call_soon(self._turned)
            return
        self._planned = False
        due = self._replay.due(self._replayed)
        if due is not None:
            self._replay.delivered(due)
            self._let_in(self._replayed.pop(due))
        elif self._ended:
            self._let_in(self._ended.popleft())
        else:
            self._at_rest()

    def _let_in(self, turn: asyncio.Future[None]) -> None:
        if not turn.done():
            turn.set_result(None)
        self.moved()
