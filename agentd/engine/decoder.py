"""The decode thread: it loads the model, and all that happens to the model happens in it."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from agentd.engine.batcher import Batcher, Caller, Model, Reply
from agentd.engine.schedule import Schedule
from corefleet.clock import Clock
from corefleet.messages.links import EngineAlive, Generate, GenerateDone, GenerateFailed

_TIMER_SLACK_S = 0.001


class ThreadedModel(Model, Protocol):
    """A model with what only the decode thread's owner needs."""

    def warm(self) -> bool: ...
    def interrupt(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Request:
    """A generation that a client asks for."""

    client: int
    generate: Generate
    received: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """A client does not want the answer to one of its calls any more."""

    client: int
    call: int


@dataclass(frozen=True, slots=True)
class Forget:
    """A client is gone."""

    client: int


@dataclass(frozen=True, slots=True)
class Alive:
    """A client asks whether the thread turns."""

    client: int
    number: int


@dataclass(frozen=True, slots=True)
class StopDecoding:
    """Give back what runs, and end the thread."""

    reason: str


Command = Request | Cancel | Forget | Alive | StopDecoding


class Decoder:
    """Owns the thread. To be used from the event loop that `start` was called in.

    `deliver` is called in that loop, with the replies of one step together.
    """

    def __init__(
        self,
        load: Callable[[], tuple[ThreadedModel, Schedule]],
        deliver: Callable[[list[Reply]], None],
        clock: Clock,
    ) -> None:
        self._load = load
        self._deliver = deliver
        self._clock = clock
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._model: ThreadedModel | None = None
        self._decoding: frozenset[Caller] = frozenset()
        self._unwanted: set[Caller] = set()
        self._timers: dict[Caller, asyncio.TimerHandle] = {}
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)

    def start(self) -> None:
        """Begin to load the model. `ready` and `ended` are futures that tell how it goes."""
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()

    def generate(self, client: int, request: Generate) -> None:
        """Queue a request; its deadline counts from now."""
        self._inbox.put(Request(client, request, self._clock.monotonic()))
        if request.deadline_s > 0:
            caller = (client, request.call)
            self._timers[caller] = self._loop.call_later(
                request.deadline_s + _TIMER_SLACK_S, self._unwant, caller
            )

    def cancel(self, client: int, call: int) -> None:
        """End a generation; its client gets GenerateDone with `cancelled`."""
        self._inbox.put(Cancel(client, call))
        self._unwant((client, call))

    def forget(self, client: int) -> None:
        """End what `client` has running; nothing is delivered for it any more."""
        self._inbox.put(Forget(client))
        for caller in self._decoding:
            if caller[0] == client:
                self._unwant(caller)

    def ping(self, client: int, number: int) -> None:
        """Let the thread answer with EngineAlive."""
        self._inbox.put(Alive(client, number))

    async def stop(self, reason: str) -> None:
        """Fail what runs with `retry`, end the thread and free the model."""
        self._inbox.put(StopDecoding(reason))
        self._interrupt()
        await asyncio.wait({self.ended})
        self._thread.join()
        for timer in self._timers.values():
            timer.cancel()

    def _unwant(self, caller: Caller) -> None:
        """Interrupt the batch that is being decoded once nobody wants any of it."""
        self._unwanted.add(caller)
        if self._decoding and self._decoding <= self._unwanted:
            self._interrupt()

    def _interrupt(self) -> None:
        if self._model is not None:
            self._model.interrupt()

    def _arrive(self, replies: list[Reply]) -> None:
        for client, message in replies:
            if isinstance(message, GenerateDone | GenerateFailed):
                self._clear((client, message.call))
        self._deliver(replies)

    def _forgotten(self, client: int) -> None:
        for caller in {*self._timers, *self._unwanted}:
            if caller[0] == client:
                self._clear(caller)

    def _clear(self, caller: Caller) -> None:
        self._unwanted.discard(caller)
        timer = self._timers.pop(caller, None)
        if timer is not None:
            timer.cancel()

    def _run(self) -> None:
        try:
            model, schedule = self._load()
        except BaseException as error:  # noqa: BLE001  # whoever awaits `ready` gets it
            self._tell(self.ready, error)
            self._tell(self.ended, None)
            return
        self._model = model
        self._tell(self.ready, None)
        failure: BaseException | None = None
        try:
            self._turn(model, Batcher(model, schedule))
        except BaseException as error:  # noqa: BLE001  # whoever awaits `ended` gets it
            failure = error
        self._model = None
        model.close()
        self._tell(self.ended, failure)

    def _turn(self, model: ThreadedModel, batcher: Batcher) -> None:
        warm = False
        while True:
            stop = self._commands(batcher, wait=warm and not batcher.busy)
            if stop is not None:
                self._post(batcher.fail_all(stop.reason))
                return
            batch, late = batcher.plan(self._clock.monotonic())
            self._post(late)
            if batch.rows or batch.moves:
                self._decoding = batcher.callers(batch)
                replies = batcher.decode(batch)
                self._decoding = frozenset()
                self._post(replies)
            elif not warm:
                warm = model.warm()

    def _commands(self, batcher: Batcher, wait: bool) -> StopDecoding | None:
        """Carry out what is in the inbox; with `wait` there is at least one command."""
        while True:
            try:
                command = self._inbox.get(block=wait)
            except queue.Empty:
                return None
            wait = False
            match command:
                case Request(client, generate, received):
                    self._post(batcher.generate(client, generate, received))
                case Cancel(client, call):
                    self._post(batcher.cancel(client, call))
                case Forget(client):
                    batcher.forget(client)
                    self._loop.call_soon_threadsafe(self._forgotten, client)
                case Alive(client, number):
                    alive = EngineAlive(
                        number=number,
                        running=batcher.running,
                        waiting=batcher.waiting,
                        steps=batcher.steps,
                    )
                    self._post([(client, alive)])
                case StopDecoding():
                    return command

    def _post(self, replies: list[Reply]) -> None:
        if replies:
            self._loop.call_soon_threadsafe(self._arrive, replies)

    def _tell(self, future: asyncio.Future[None], error: BaseException | None) -> None:
        if error is None:
            self._loop.call_soon_threadsafe(future.set_result, None)
        else:
            self._loop.call_soon_threadsafe(future.set_exception, error)
