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


class _Follower:
    __slots__ = ("heard_at", "sink")

    def __init__(self, sink: Sink, heard_at: float) -> None:
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
        self._followers: dict[str, _Follower] = {}
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

    def follow(self, task: str, sink: Sink) -> None:
        """Call `sink` with the task's events from now on; one follower a task."""
        self._followers[task] = _Follower(sink, self._cluster.clock.monotonic())

    def leave(self, task: str) -> None:
        """Follow no more. Idempotent."""
        self._followers.pop(task, None)

    def _heard(self, message: Incoming) -> None:
        task = message.subject.rpartition(".")[2]
        follower = self._followers.get(task)
        if follower is None:
            return
        try:
            events = decode(message.payload, EventBatch).events
        except CorruptRecord as error:
            _log.warning("event is not usable", task=task, error=str(error))
            return
        self._tell(task, follower, events)

    def _tell(self, task: str, follower: _Follower, events: Sequence[TaskEvent]) -> None:
        follower.heard_at = self._cluster.clock.monotonic()
        if any(isinstance(event, TaskFinished) for event in events):
            self.leave(task)
        follower.sink(events)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            before = self._cluster.clock.monotonic() - _SILENCE_S
            silent = [
                (follower.heard_at, task)
                for task, follower in self._followers.items()
                if follower.heard_at < before
            ]
            silent.sort()
            await asyncio.gather(*(self._check(task) for _, task in silent[:_READS_PER_SWEEP]))

    async def _check(self, task: str) -> None:
        follower = self._followers.get(task)
        if follower is None:
            return
        follower.heard_at = self._cluster.clock.monotonic()
        try:
            result = await self._stories.result(task)
        except (Unavailable, NotFound) as error:
            _log.debug("silent task not checked", task=task, error=str(error))
            return
        if result is not None and self._followers.get(task) is follower:
            self._tell(task, follower, [TaskFinished(task=task, result=result)])
