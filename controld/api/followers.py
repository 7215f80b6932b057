"""Events of tasks on their way to those who follow them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from controld.api.story import Stories
from controld.cluster import Cluster
from corefleet.background import Background, stop
from corefleet.bus import Incoming, Subscription
from corefleet.codec import decode
from corefleet.errors import CorruptRecord, NotFound, Unavailable
from corefleet.messages.wire import EventBatch, TaskEvent, TaskFinished
from corefleet.subjects import events_to

_log = structlog.get_logger(__name__)

Sink = Callable[[Sequence[TaskEvent]], None]

_SILENCE_S = 2.0
_SWEEP_S = 0.5
_READS_PER_SWEEP = 64


class Follower:
    """Somebody who follows one task."""

    __slots__ = ("heard_at", "sink", "task")

    def __init__(self, task: str, sink: Sink, heard_at: float) -> None:
        self.task = task
        self.sink = sink
        self.heard_at = heard_at


class Followers:
    """Those who follow tasks that this controld accepted; one subscription for all.

    A follower hears of the task's end even if the event was lost: after two seconds of
    silence the result is read from the stream's leader. A follower leaves by itself
    with the `finished` event.
    """

    def __init__(self, cluster: Cluster, background: Background, stories: Stories) -> None:
        self._cluster = cluster
        self._background = background
        self._stories = stories
        self._followers: dict[str, tuple[Follower, ...]] = {}
        self._subscription: Subscription | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to hear events."""
        self._subscription = await self._cluster.bus.subscribe(
            events_to(self._cluster.controld), self._heard
        )
        self._sweeper = self._background.spawn(self._sweep(), "followers of silent tasks")

    async def close(self) -> None:
        """Stop hearing. Idempotent."""
        if self._subscription:
            await self._subscription.close()
        await stop(self._sweeper)
        self._followers.clear()

    def follow(self, task: str, sink: Sink) -> Follower:
        """Call `sink` with the task's events from now on."""
        follower = Follower(task, sink, self._cluster.clock.monotonic())
        others = self._followers.get(task)
        self._followers[task] = (follower,) if others is None else (*others, follower)
        return follower

    def leave(self, follower: Follower) -> None:
        """Follow no more. Idempotent."""
        rest = tuple(
            each for each in self._followers.get(follower.task, ()) if each is not follower
        )
        if rest:
            self._followers[follower.task] = rest
        else:
            self._followers.pop(follower.task, None)

    def _heard(self, message: Incoming) -> None:
        task = message.subject.rpartition(".")[2]
        followers = self._followers.get(task)
        if followers is None:
            return
        try:
            events = decode(message.payload, EventBatch).events
        except CorruptRecord as error:
            _log.warning("event is not usable", task=task, error=str(error))
            return
        for follower in followers:
            self._tell(follower, events)

    def _tell(self, follower: Follower, events: Sequence[TaskEvent]) -> None:
        follower.heard_at = self._cluster.clock.monotonic()
        for event in events:
            if isinstance(event, TaskFinished):
                self.leave(follower)
        follower.sink(events)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            before = self._cluster.clock.monotonic() - _SILENCE_S
            silent = [
                follower
                for followers in self._followers.values()
                for follower in followers
                if follower.heard_at < before
            ]
            silent.sort(key=lambda follower: follower.heard_at)
            await asyncio.gather(*(self._check(each) for each in silent[:_READS_PER_SWEEP]))

    async def _check(self, follower: Follower) -> None:
        task = follower.task
        follower.heard_at = self._cluster.clock.monotonic()
        try:
            result = await self._stories.result(task)
        except (Unavailable, NotFound) as error:
            _log.debug("silent task not checked", task=task, error=str(error))
            return
        if result is not None and follower in self._followers.get(task, ()):
            self._tell(follower, [TaskFinished(task=task, result=result)])
