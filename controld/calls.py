"""Calls to the owner of a shard, whoever that is at the moment."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from controld.cluster import Cluster
from corefleet.codec import decode, encode
from corefleet.errors import NoResponders, Timeout, Unavailable
from corefleet.ids import shard_of_task
from corefleet.messages.wire import (
    CancelAnswer,
    CancelTask,
    ExplainAnswer,
    ExplainTask,
    ListTasks,
    Message,
    TaskList,
)
from corefleet.subjects import shard_cancel, shard_explain, shard_list

T = TypeVar("T", bound=Message)

PATIENCE_S = 3.0
_ANSWER_S = 1.0
_PAUSE_S = 0.05


class OwnerCalls:
    """Asks shard owners over the bus; waits while ownership moves."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def cancel(self, task: str, reason: str) -> CancelAnswer:
        """End the task. Raises Unavailable when no owner answers within 3 s."""
        subject = shard_cancel(shard_of_task(task))
        answer, repeated = await self._ask(
            subject, CancelTask(task=task, reason=reason), CancelAnswer, PATIENCE_S
        )
        if repeated and answer.found and answer.state == "cancelled":
            return CancelAnswer(found=True, cancelled=True, state="cancelled")
        return answer

    async def explain(self, task: str) -> ExplainAnswer:
        """Ask why the task is where it is. Raises Unavailable likewise."""
        subject = shard_explain(shard_of_task(task))
        answer, _ = await self._ask(subject, ExplainTask(task=task), ExplainAnswer, PATIENCE_S)
        return answer

    async def list(
        self, shard: int, filters: ListTasks, patience_s: float = PATIENCE_S
    ) -> TaskList:
        """Return live tasks of one shard. Raises Unavailable after `patience_s`."""
        answer, _ = await self._ask(shard_list(shard), filters, TaskList, patience_s)
        return answer

    async def _ask(
        self, subject: str, question: Message, kind: type[T], patience_s: float
    ) -> tuple[T, bool]:
        """Return the answer, and whether an earlier try may have had its effect."""
        clock = self._cluster.clock
        payload = encode(question)
        give_up = clock.monotonic() + patience_s
        repeated = False
        while True:
            left = give_up - clock.monotonic()
            try:
                answer = await self._cluster.bus.request(
                    subject, payload, min(_ANSWER_S, max(0.01, left))
                )
                return decode(answer, kind), repeated
            except Timeout:
                repeated = True
            except NoResponders:
                pass
            if clock.monotonic() + _PAUSE_S >= give_up:
                raise Unavailable(f"{subject}: the shard has no owner just now; try again")
            await asyncio.sleep(_PAUSE_S)
