"""Attempts that are asked back: batch for waiting online tasks, all from drained nodes.

An attempt that is asked yields at its next step boundary, by TaskReturned with the reason
that it was asked with; that counts against nobody (attempt_policy).
"""

from __future__ import annotations

from controld.core.attempt_policy import DRAINING_PREFIX, PREEMPTED_PREFIX
from controld.core.attempts import Attempts
from controld.core.shard_io import NodeDraining, SendYield
from controld.core.shard_state import ShardState
from controld.core.task import Task
from corefleet.messages.wire import YieldAttempt

_ASKS_A_TICK = 8
"""Yields that one shard asks of batch in one tick."""


class Yields:
    """Asks nodes to give attempts back, and at a drain's deadline takes them."""

    def __init__(self, state: ShardState, attempts: Attempts) -> None:
        self._state = state
        self._attempts = attempts
        self._drains: dict[str, NodeDraining] = {}
        self._ask_at: dict[str, float] = {}

    def drain(self, event: NodeDraining) -> None:
        """A node is to be emptied, for another reason or until another time, or no more."""
        node = event.node
        if not event.on:
            self._drains.pop(node, None)
            self._ask_at.pop(node, None)
            return
        self._drains[node] = event
        self._ask_at[node] = 0.0
        if self._state.live:
            self._look_at_drains()

    def tick(self) -> None:
        """Ask for what is due."""
        if self._drains:
            self._look_at_drains()
        if self._state.batch:
            self._preempt()

    # Drains.

    def _look_at_drains(self) -> None:
        state = self._state
        for node, drain in self._drains.items():
            over = 0 < drain.deadline_ms <= state.wall_ms
            if not over and state.now < self._ask_at[node]:
                continue
            self._ask_at[node] = state.now + state.settings.yield_again_s
            reason = f"{DRAINING_PREFIX} {drain.reason}"
            for task in sorted(state.inventory.on(node), key=_online_first):
                if task.write is not None or task.state not in ("offered", "running"):
                    continue
                if over:
                    why = f"{drain.reason}; its time is over"
                    self._attempts.leave(task, "drained", why)
                elif task.state == "running":
                    self._ask(task, reason)

    def _ask(self, task: Task, reason: str) -> None:
        state = self._state
        if not task.asked_ms:
            task.asked_ms = state.wall_ms
            task.story.append((state.now, "asked to yield", reason))
        record = task.record
        ask = YieldAttempt(task=task.id, attempt=record.attempt, reason=reason)
        state.out.append(SendYield(record.node, ask))

    # Preemption.

    def _preempt(self) -> None:
        """Ask for one batch attempt for each online task that has waited too long."""
        state = self._state
        left = _ASKS_A_TICK
        for pool in state.queue.waiting_for_place():
            for task in state.queue.first_ready(pool, left):
                if state.now - task.since < state.settings.preempt_after_s:
                    continue
                if state.now < task.preempt_at:
                    continue
                found = state.batch.youngest(state.fleet, pool.name, state.rng, state.now)
                if found is None:
                    break
                until = state.now + state.settings.yield_again_s
                task.preempt_at = until
                state.batch.asked(found, until)
                reason = f"{PREEMPTED_PREFIX} task {task.id} of pool {pool.name} waits for a place"
                ask = YieldAttempt(task=found.task, attempt=found.attempt, reason=reason)
                state.out.append(SendYield(found.node, ask))
                left -= 1
            if left <= 0:
                return


def _online_first(task: Task) -> tuple[bool, int]:
    return (task.record.pool_class != "online", task.seq)
