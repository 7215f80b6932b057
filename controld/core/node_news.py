"""What nodes say of their attempts, and what is found out about nodes (rules 8, 9, 11)."""

from __future__ import annotations

from controld.core.attempt_policy import returned_for
from controld.core.attempts import Attempts
from controld.core.shard_io import (
    AssignAnswered,
    AssignUnanswered,
    AttemptReturned,
    AttemptStuck,
    InventoryAnswered,
    NodeGone,
    NodeResumed,
    QueryInventory,
)
from controld.core.shard_state import ShardState
from controld.core.task import Leaving, Task
from corefleet.messages.wire import HeldAttempt, InventoryQuery

_ANY_EPOCH = 2**62


class NodeNews:
    """Judges attempts by what their nodes answer, or by the nodes' end."""

    def __init__(self, state: ShardState, attempts: Attempts) -> None:
        self._state = state
        self._attempts = attempts

    # What nodes say.

    def answered(self, event: AssignAnswered) -> None:
        """A node took the attempt, or refused it."""
        state = self._state
        answer = event.answer
        task = state.tasks.get(answer.task)
        current = task is not None and task.record.attempt == answer.attempt
        if task is None or not current or task.state not in ("offered", "running"):
            over = task is None and answer.task not in state.ended
            over = over or (task is not None and answer.attempt < task.record.attempt)
            if answer.accepted and over:
                self._attempts.drop(event.node, answer.task, answer.attempt, "the attempt is over")
            return
        if answer.accepted:
            if task.state == "offered":
                task.tries = 0
                state.clear_timer(task)
                if task.slot is not None:
                    state.fleet.accepted(task.slot)
                state.move(task, "running", event.node)
        elif task.state == "offered":
            if task.slot is not None:
                state.fleet.refused(task.slot, state.now)
            self._attempts.leave(task, "refused", answer.reason or "no reason given")

    def unanswered(self, event: AssignUnanswered) -> None:
        """No answer: the same attempt to the same node again, then another one (rule 9)."""
        state = self._state
        task = state.tasks.get(event.task)
        if task is None or task.state != "offered" or task.record.attempt != event.attempt:
            return
        pause = state.back_off_s(task)
        if task.tries >= state.settings.assign_tries:
            self._attempts.leave(task, "unanswered", f"no answer to {task.tries} offers")
        else:
            state.set_timer(task, "offer", pause)

    def returned(self, event: AttemptReturned) -> None:
        """A node gave the attempt back."""
        task = self._current(event.task, event.attempt)
        if task is not None:
            cause, reason = returned_for(event.reason)
            self._attempts.leave(task, cause, reason)

    def stuck(self, event: AttemptStuck) -> None:
        """The attempt shows no progress; whether for too long is the pool's to say."""
        state = self._state
        task = self._current(event.task, event.attempt)
        if task is None:
            return
        spec = state.pools.get(task.record.pool)
        limit = spec.progress_timeout_s if spec else state.settings.progress_timeout_s
        if event.age_s > limit:
            reason = f"no progress for {event.age_s:.0f} s, {limit:.0f} s allowed"
            self._attempts.leave(task, "stuck", reason)

    def node_gone(self, event: NodeGone) -> None:
        """Take all attempts from a node at once, so that their writes go out together."""
        self._leave_node(event.node, event.node_epoch, event.reason)

    def node_resumed(self, event: NodeResumed) -> None:
        """Ask the node at once what it has: what its new agentd did not adopt is requeued."""
        state = self._state
        state.inventory.ask(event.node, state.now)
        self.ask_inventories()

    def inventory(self, event: InventoryAnswered) -> None:
        """Take away what the node does not have; online first."""
        state = self._state
        state.inventory.answered(event.node)
        for held in event.absent:
            task = state.tasks.get(held.task)
            if (
                task is not None
                and task.state == "running"
                and task.record.attempt == held.attempt
                and task.record.node == event.node
                and task.record.node_epoch <= event.node_epoch
            ):
                self._attempts.leave(task, "absent", "its node does not have it")

    # What is found out.

    def caught_up(self) -> None:
        """Judge what earlier owners placed: gone with its node, or to be asked for (rule 8)."""
        state = self._state
        for node in state.inventory.nodes():
            tasks = state.inventory.on(node)
            for task in sorted(tasks, key=_online_first):
                if state.fleet.is_gone(node, task.record.node_epoch):
                    self._attempts.leave(task, "lost", "its node is gone")
        for session in list(state.queue.sessions.values()):
            if session.busy > session.order[0].occupies:
                self._attempts.keep_order(session.order[0])
        state.inventory.ask_all(state.now)

    def ask_inventories(self) -> None:
        """Ask nodes whether they have what they should."""
        state = self._state
        for attempts in state.inventory.due(state.now):
            node = attempts.node
            if state.inventory.silent(attempts) and not state.fleet.knows(node):
                self._leave_node(node, _ANY_EPOCH, "its node is not registered")
                continue
            held = []
            for task in sorted(attempts.tasks.values(), key=_online_first):
                if task.state != "running":
                    continue
                if state.fleet.is_gone(node, task.record.node_epoch):
                    self._attempts.leave(task, "lost", "its node is gone")
                else:
                    held.append(HeldAttempt(task.id, task.record.attempt))
            if held:
                query = InventoryQuery(shard=state.shard, owner_epoch=state.epoch, held=tuple(held))
                state.out.append(QueryInventory(node, query))
            else:
                state.inventory.answered(node)

    # Inside.

    def _leave_node(self, node: str, epoch: int, reason: str) -> None:
        """Take from a node what runs there at `epoch` or before."""
        for task in sorted(self._state.inventory.on(node), key=_online_first):
            if task.write is not None:
                if task.write.node_epoch <= epoch:
                    task.doomed = Leaving("lost", reason)
            elif task.state in ("offered", "running") and task.record.node_epoch <= epoch:
                self._attempts.leave(task, "lost", reason)

    def _current(self, name: str, attempt: int) -> Task | None:
        """Return the task if this is its live attempt."""
        task = self._state.tasks.get(name)
        if task is None or task.record.attempt != attempt:
            return None
        return task if task.state in ("offered", "running") else None


def _online_first(task: Task) -> tuple[bool, int]:
    return (task.record.pool_class != "online", task.seq)
