"""One attempt on a simulated node: its steps take their time, all else is real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

from agentd.core.ending import result_of
from corefleet.bus import Bus, Log
from corefleet.codec import encode
from corefleet.journal import Journal
from corefleet.messages.links import FinishTask
from corefleet.messages.records import ResultRecord, Step
from corefleet.messages.wire import Assignment, EventBatch, StepEnded, TaskFinished
from corefleet.subjects import Layout, events
from tools.fleet.plan import Durations, Job


class Attempt:
    """Runs an assignment as the real nodes do: journal under the fence, events, one end."""

    def __init__(
        self, bus: Bus, log: Log, layout: Layout, item: Assignment, wall_ms: Callable[[], int]
    ) -> None:
        self._bus = bus
        self._layout = layout
        self._item = item
        self._wall_ms = wall_ms
        self._journal = Journal(log, layout, item.record, item.revision)
        self.yielding = ""
        """Set to the reason: end at the next step boundary without a result."""

    async def run(self, durations: Durations, rng: Random) -> bool:
        """Run to the end; return False when the attempt yielded.

        Raises AttemptDropped and Unavailable.
        """
        record = self._item.record
        job = Job.parse(record.input)
        steps = list(await self._journal.open(record.node))
        for number in range(len(steps), job.steps):
            if self.yielding:
                return False
            began = self._wall_ms()
            seconds = durations.draw(rng) if job.seconds is None else job.seconds
            if seconds:
                await asyncio.sleep(seconds)
            step = Step(
                step=number,
                kind="tool",
                name="simulated",
                attempt=record.attempt,
                node=record.node,
                started_ms=began,
                wall_us=(self._wall_ms() - began) * 1000,
            )
            await self._journal.append((step,))
            steps.append(step)
            self._tell(StepEnded(task=record.task, at_ms=self._wall_ms(), step=step))
        if self.yielding:
            return False
        await self._end(tuple(steps))
        return True

    async def _end(self, steps: tuple[Step, ...]) -> None:
        record = self._item.record
        finish = FinishTask(task=record.task, attempt=record.attempt, output=record.input)
        result = result_of(self._item, finish, steps, self._wall_ms())
        await self._journal.finish(result, stands=self._finished)

    def _finished(self, result: ResultRecord) -> None:
        self._tell(TaskFinished(task=result.task, at_ms=self._wall_ms(), result=result))

    def _tell(self, event: StepEnded | TaskFinished) -> None:
        record = self._item.record
        if record.origin:
            payload = encode(EventBatch(events=(event,)))
            self._bus.publish(events(record.origin, record.task), payload)
