"""Simulated time: one event loop a process, all turned by one world. No threads, no sockets.

A process is what its loop runs. Frozen, its loop does not turn while messages pile up;
crashed, nothing of it ever runs again, not even what `finally` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import random
import sys
import warnings
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from corefleet.errors import CorefleetError

MOST_TURNS_AT_ONCE = 100_000
"""Turns without any time passing after which something runs in a circle."""

MOST_LAST_WORDS = 20
"""How often a coroutine that is closed may await something more."""

EPOCH_MS = 1_700_000_000_000
START_S = 1000.0


class SimulationError(Exception):
    """The simulation itself went wrong, e.g. a process that runs in a circle."""


class ProcessLoop(asyncio.BaseEventLoop):
    """The event loop of one process; `turn` runs what is due."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._process.world.now

    @property
    def has_work(self) -> bool:
        return bool(self._ready)

    def due(self) -> float | None:
        """Return when the next timer is due, None if there is none."""
        scheduled = self._scheduled
        while scheduled and scheduled[0].cancelled():
            heapq.heappop(scheduled)
        return scheduled[0].when() if scheduled else None

    def turn(self) -> None:
        """Run what is ready and what is due now, once."""
        now = self._process.world.now + self._clock_resolution
        scheduled, ready = self._scheduled, self._ready
        while scheduled and scheduled[0].when() <= now:
            ready.append(heapq.heappop(scheduled))
        events._set_running_loop(self)
        try:
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            events._set_running_loop(None)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self._process.alive:
            self._process.world.failed(self._process, context.get("message", ""), error)

    async def create_connection(self, factory: Any, host: str, port: int, **_: Any) -> Any:  # type: ignore[override]
        return await self._process.world.wires.connect(self._process, factory, host, port)

    async def create_server(self, factory: Any, host: str, port: int, **_: Any) -> Any:  # type: ignore[override]
        return self._process.world.wires.listen(self._process, factory, host)

    def _write_to_self(self) -> None:
        """Nobody sleeps in a selector."""


class Process:
    """One simulated process; a restart is another Process of the same name."""

    def __init__(self, world: World, name: str, kind: str) -> None:
        self.world = world
        self.name = name
        self.kind = kind
        self.alive = True
        self.frozen = False
        self.loop = ProcessLoop(self)
        self.wall_offset_ms = 0
        self._listed = False
        self._armed = float("inf")
        self._tasks: list[asyncio.Task[Any]] = []

    @property
    def runs(self) -> bool:
        return self.alive and not self.frozen

    def run(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run `work` in this process, from outside of it."""
        task = self.loop.create_task(work, name=name)
        self._tasks.append(task)
        self.world.enlist(self)
        return task

    def deliver(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call `callback` in a turn of this process's loop, from outside of it."""
        if self.alive:
            self.loop.call_soon(callback, *args)
            self.world.enlist(self)

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        self.world.enlist(self)

    def crash(self) -> None:
        """Vanish without any clean-up."""
        self.alive = False
        self.world.buried.append(self)

    def turn(self) -> None:
        self._listed = False
        if not self.runs:
            return
        self.world.current = self
        self.loop.turn()
        self.world.current = None
        if self.loop.has_work:
            self.world.enlist(self)
        else:
            self.arm()

    def arm(self) -> None:
        """See to it that the next timer wakes the loop."""
        due = self.loop.due()
        if due is not None and due < self._armed:
            self._armed = due
            self.world.at(due, self._wake, due)

    def _wake(self, due: float) -> None:
        if self._armed == due:
            self._armed = float("inf")
        self.world.enlist(self)


class SimClock:
    """A process's clocks: monotonic as the world has it, wall with the process's own error."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def monotonic(self) -> float:
        return self._process.world.now

    def wall_ms(self) -> int:
        passed_ms = int((self._process.world.now - START_S) * 1000)
        return EPOCH_MS + passed_ms + self._process.wall_offset_ms


class Scheduler:
    """Time, what is due when, and whose turn it is."""

    def __init__(self, seed: int) -> None:
        self.now = START_S
        self.seed = seed
        self.current: Process | None = None
        self.buried: list[Process] = []
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._runnable: deque[Process] = deque()

    def rng(self, name: str) -> random.Random:
        """Return a source of chance of its own, so that one fault less changes little else."""
        return random.Random(f"{self.seed}/{name}")

    def at(self, when: float, callback: Callable[..., None], *args: Any) -> None:
        """Call `callback` at time `when`, outside of all processes."""
        self._count += 1
        heapq.heappush(self._events, (max(when, self.now), self._count, callback, args))

    def after(self, delay: float, callback: Callable[..., None], *args: Any) -> None:
        self.at(self.now + delay, callback, *args)

    def enlist(self, process: Process) -> None:
        """The process has something to do now."""
        if not process._listed and process.runs:
            process._listed = True
            self._runnable.append(process)

    def run_until(self, end: float, done: Callable[[], bool] = lambda: False) -> None:
        """Let time pass until `end`, or until `done` says so."""
        turns = 0
        while not done():
            if self._runnable:
                turns += 1
                if turns > MOST_TURNS_AT_ONCE:
                    raise SimulationError(f"{self._runnable[0].name} runs in a circle")
                self._runnable.popleft().turn()
                continue
            if not self._events or self._events[0][0] > end:
                self.now = max(self.now, end)
                return
            when, _, callback, args = heapq.heappop(self._events)
            if when > self.now:
                self.now = when
                turns = 0
            callback(*args)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Let nobody hear what coroutines of crashed processes say when they are let go of."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.unraisablehook = hook


class World(Scheduler):
    """What processes need of the world that they run in."""

    wires: Any

    def failed(self, process: Process, message: str, error: BaseException | None) -> None:
        """Something in a process failed that nothing there handles."""
        raise NotImplementedError

    def bury(self, processes: list[Process]) -> None:
        """Let go of processes that are over, in silence."""
        with silence():
            self._bury(processes)

    def _bury(self, processes: list[Process]) -> None:
        for process in processes:
            process.alive = False
            # Last words may start tasks (`shield`, `gather`): in this loop, and buried with it.
            events._set_running_loop(process.loop)
            try:
                while tasks := [t for t in asyncio.all_tasks(process.loop) if not t.done()]:
                    for task in tasks:
                        _end(task)
            finally:
                events._set_running_loop(None)
            process.loop._ready.clear()
            process.loop._scheduled.clear()
            process.loop.close()


def _end(task: asyncio.Task[Any]) -> None:
    """Close the coroutine of a task, and forget the task: it never runs again."""
    setattr(task, "_log_destroy_pending", False)  # noqa: B010 - typeshed does not know it
    coroutine = task.get_coro()
    for _ in range(MOST_LAST_WORDS):
        try:
            coroutine.close()
            break
        except (RuntimeError, CorefleetError):
            # It awaits something in a `finally`, which nobody sees any more.
            continue
    asyncio.tasks._unregister_task(task)
