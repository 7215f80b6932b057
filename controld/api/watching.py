"""One watcher of one task, whoever accepted it: a snapshot, then events to the end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from controld.api import render
from controld.api.story import Stories, Story
from controld.cluster import Cluster
from corefleet.bus import Incoming
from corefleet.codec import decode
from corefleet.errors import CorruptRecord, Unavailable
from corefleet.messages.wire import (
    EventBatch,
    StepEnded,
    TaskEvent,
    TaskFinished,
    TaskPlaced,
    TaskRequeued,
    TokenText,
)
from corefleet.rpc import tasks_pb2
from corefleet.subjects import events_of

_SILENCE_S = 2.0
_BACKLOG = 10_000


class Watcher:
    """Hears a task's events and yields each once, with nothing lost at the end.

    Events come over core NATS and may be lost; the result may not: after two seconds
    of silence it is read from the stream's leader. A watcher too slow for the events
    gets a new snapshot in place of those that it missed.
    """

    def __init__(self, cluster: Cluster, stories: Stories, task: str, tokens: bool) -> None:
        self._cluster = cluster
        self._stories = stories
        self._task = task
        self._tokens = tokens
        self._heard: deque[TaskEvent] = deque()
        self._wake = asyncio.Event()
        self._missed = False
        self._steps: set[int] = set()
        self._attempt = 0
        self._requeued = 0

    async def events(self) -> AsyncIterator[tasks_pb2.TaskEvent]:
        """Yield a snapshot first, `finished` last.

        Raises NotFound, InvalidInput for the task id, Unavailable.
        """
        subscription = await self._cluster.bus.subscribe(events_of(self._task), self._hear)
        try:
            story = await self._stories.read(self._task)
            yield self._snapshot(story)
            while story.result is None:
                await self._wait()
                if self._missed:
                    self._missed = False
                    self._heard.clear()
                    story = await self._stories.read(self._task)
                    yield self._snapshot(story)
                while self._heard:
                    event = self._heard.popleft()
                    if isinstance(event, TaskFinished):
                        yield render.event(event)
                        return
                    if self._is_news(event):
                        yield render.event(event)
            ended = tasks_pb2.TaskEvent(task=self._task, at_ms=story.task.finished_ms)
            ended.finished.CopyFrom(story.task)
            yield ended
        finally:
            await subscription.close()

    def _hear(self, message: Incoming) -> None:
        try:
            events = decode(message.payload, EventBatch).events
        except CorruptRecord:
            self._missed = True
            events = ()
        for event in events:
            if self._tokens or not isinstance(event, TokenText):
                self._heard.append(event)
        if len(self._heard) > _BACKLOG:
            self._heard.clear()
            self._missed = True
        self._wake.set()

    async def _wait(self) -> None:
        """Return when something was heard, or when the result says that it is over."""
        while not self._heard and not self._missed:
            self._wake.clear()
            try:
                async with asyncio.timeout(_SILENCE_S):
                    await self._wake.wait()
            except TimeoutError:
                await self._look_for_the_end()

    async def _look_for_the_end(self) -> None:
        try:
            result = await self._stories.ended(self._task)
        except Unavailable:
            return
        if result is not None:
            self._heard.append(TaskFinished(task=self._task, result=result))

    def _snapshot(self, story: Story) -> tasks_pb2.TaskEvent:
        self._steps.update(step.step for step in story.task.steps)
        self._attempt = max(self._attempt, story.task.attempt)
        made = tasks_pb2.TaskEvent(task=self._task, at_ms=self._cluster.clock.wall_ms())
        made.snapshot.CopyFrom(story.task)
        return made

    def _is_news(self, event: TaskEvent) -> bool:
        match event:
            case StepEnded():
                if event.step.step in self._steps:
                    return False
                self._steps.add(event.step.step)
            case TaskPlaced():
                if event.attempt <= self._attempt:
                    return False
                self._attempt = event.attempt
            case TaskRequeued():
                if event.attempt <= self._requeued:
                    return False
                self._requeued = event.attempt
        return True
