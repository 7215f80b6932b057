"""The owner of a shard: (event, now) -> actions. See shard_io for both vocabularies.

Tasks move by the table in shard_state. Before CaughtUp nothing is decided: records are
only taken in. Every action that writes is answered by one event, in any order with the
stream showing the same write.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from controld.core.attempts import Attempts
from controld.core.batch_places import BatchPlaces
from controld.core.ending import Ending
from controld.core.fleet import Fleet
from controld.core.limits import Limits
from controld.core.node_news import NodeNews
from controld.core.rng import Rng
from controld.core.shard_io import (
    Action,
    AssignAnswered,
    AssignUnanswered,
    AttemptReturned,
    AttemptStuck,
    CancelRequested,
    CaughtUp,
    Event,
    FleetChanged,
    HeadStored,
    InventoryAnswered,
    LimitOpened,
    NodeDraining,
    NodeGone,
    NodeResumed,
    Notify,
    PoolsSet,
    RecordMissing,
    RecordRead,
    RecordRefused,
    RecordStored,
    RecordWritten,
    TaskEnded,
    Tick,
    WriteUnavailable,
)
from controld.core.shard_state import ShardSettings, ShardState
from controld.core.shard_views import check, explain_task, list_tasks, reason
from controld.core.task import Task
from controld.core.yields import Yields
from corefleet.messages.records import TERMINAL, Failure, TaskRecord
from corefleet.messages.wire import ExplainAnswer, ListTasks, TaskList, TaskWaiting

_NOTICES_A_TICK = 256


class ShardCore:
    """Decides for one shard, from `owner_epoch` of one controld until `close`."""

    def __init__(
        self,
        shard: int,
        controld: str,
        owner_epoch: int,
        fleet: Fleet,
        rng: Rng,
        settings: ShardSettings | None = None,
        limits: Limits | None = None,
        batch: BatchPlaces | None = None,
    ) -> None:
        """`limits` and `batch` are shared by all shards of the controld, as `fleet` is."""
        if limits is None:
            limits = Limits()
        if batch is None:
            batch = BatchPlaces()
        self._state = ShardState(
            shard, owner_epoch, fleet, rng, settings or ShardSettings(), limits, batch
        )
        limits.own(shard)
        self._ending = Ending(self._state)
        self._attempts = Attempts(self._state, self._ending)
        self._again: list[tuple[float, int, Task]] = []
        self._notices = 0
        self._unblock_at = 0.0
        self.controld = controld
        self._nodes = NodeNews(self._state, self._attempts)
        self._yields = Yields(self._state, self._attempts)
        attempts, nodes = self._attempts, self._nodes
        self._always: dict[type[Any], Callable[[Any], None]] = {
            RecordStored: self._on_record_stored,
            HeadStored: self._on_head_stored,
            PoolsSet: self._on_pools_set,
            CancelRequested: self._ending.cancel,
            NodeDraining: self._yields.drain,
            CaughtUp: self._on_caught_up,
        }
        self._live: dict[type[Any], Callable[[Any], None]] = {
            **self._always,
            RecordWritten: attempts.written,
            RecordRefused: attempts.refused_write,
            WriteUnavailable: attempts.unavailable,
            RecordRead: self._on_record_read,
            RecordMissing: self._on_record_missing,
            TaskEnded: self._ending.decided,
            AssignAnswered: nodes.answered,
            AssignUnanswered: nodes.unanswered,
            AttemptReturned: nodes.returned,
            AttemptStuck: nodes.stuck,
            NodeGone: nodes.node_gone,
            NodeResumed: nodes.node_resumed,
            InventoryAnswered: nodes.inventory,
            LimitOpened: self._on_limit_opened,
            FleetChanged: self._on_fleet_changed,
            Tick: self._on_tick,
        }

    @property
    def live(self) -> bool:
        """Whether all that earlier owners wrote is known."""
        return self._state.live

    def handle(self, event: Event, now: float, wall_ms: int) -> list[Action]:
        """Take in what happened and return what to do, in order.

        `now` is in monotonic seconds, `wall_ms` in milliseconds since the epoch. What
        happens before CaughtUp is judged then, from the records and the fleet. Raises
        IllegalTransition when the core itself is wrong.
        """
        state = self._state
        state.now = now
        state.wall_ms = wall_ms
        handlers = self._live if state.live else self._always
        handler = handlers.get(type(event))
        if handler is None:
            return []
        handler(event)
        if state.live:
            self._attempts.start_ready()
        out, state.out = state.out, []
        return out

    def close(self, now: float) -> None:
        """The shard is no longer ours: its attempts go on, its waiting places are free."""
        state = self._state
        state.now = now
        state.live = False
        state.disown()

    def list_tasks(self, query: ListTasks) -> TaskList:
        """Return the live tasks that match."""
        return list_tasks(self._state, query)

    def explain(self, task: str) -> ExplainAnswer:
        """Return where a task is and why, or why it waits."""
        return explain_task(self._state, task)

    def reason(self, task: str) -> str:
        """Return why a task waits; '' when it does not or is not live."""
        found = self._state.tasks.get(task)
        return reason(self._state, found) if found else ""

    def story(self, task: str) -> str:
        """Return the last moves of a live task, '' when it is not live."""
        found = self._state.tasks.get(task)
        return found.tell_story() if found else ""

    def backlog(self) -> dict[str, int]:
        """Return the queued tasks of each pool."""
        return {pool: count for pool, count in self._state.queue.counts.items() if count}

    def queue_content(self) -> dict[str, list[str]]:
        """Return the queued tasks of each pool in create order."""
        return self._state.queue.content()

    def states(self) -> dict[str, str]:
        """Return the state of each live task."""
        return {name: task.state for name, task in self._state.tasks.items()}

    def check(self) -> list[str]:
        """Return the invariants that do not hold; looks at all tasks."""
        return check(self._state)

    # The stream.

    def _on_record_stored(self, event: RecordStored) -> None:
        self._take(event.record, event.revision, shown=True)

    def _on_record_read(self, event: RecordRead) -> None:
        self._take(event.record, event.revision, shown=False)

    def _take(self, record: TaskRecord, revision: int, shown: bool) -> None:
        """Take in a stored record. `shown`: in the stream's order, so all before is known."""
        state = self._state
        task = state.tasks.get(record.task)
        if record.state in TERMINAL:
            if task is None:
                state.remember_end(record.task, record.state)
            elif revision > task.revision:
                self._ending.seen(task, record, revision, shown)
            return
        if task is None:
            if shown and (record.task not in state.ended or _created(record)):
                self._new(record, revision)
        elif revision > task.revision:
            if task.write is not None and _same(record, task.write):
                self._attempts.write_seen(task, revision, shown)
            elif _finishing(record, task):
                self._attempts.finishing(task, record, revision)
            else:
                self._attempts.adopt(task, record, revision, shown)
        elif revision == task.revision:
            self._as_known(task, shown)

    def _new(self, record: TaskRecord, revision: int) -> None:
        state = self._state
        task = Task(record, revision)
        state.add(task)
        if record.state == "placed":
            self._attempts.adopt(task, record, revision, shown=True)
        elif state.live:
            state.watch(task)
            self._attempts.keep_order(task)

    def _as_known(self, task: Task, shown: bool) -> None:
        """The record is as we know it: an answer came before, or a look found no change."""
        if task.unsure:
            self._attempts.no_effect(task)
        elif task.state == "ending" and task.timer == "look":
            self._ending.again(task)
        elif shown:
            self._attempts.known_write_seen(task)

    def _on_record_missing(self, event: RecordMissing) -> None:
        state = self._state
        task = state.tasks.get(event.task)
        if task is not None and (task.unsure or task.timer == "look"):
            # Only ended records vanish. How it ended, its result says; we cannot know here.
            state.doubt = max(state.doubt or 0, task.revision)
            self._ending.ended(task, "done", task.revision, ours=False)

    def _on_head_stored(self, event: HeadStored) -> None:
        head = event.head
        key = (head.pool, head.session)
        state = self._state
        known = state.heads.get(key)
        if known is not None and known[1] >= event.revision:
            return
        state.heads[key] = (head, event.revision)
        session = state.queue.sessions.get(key)
        if session is not None and event.revision > session.ended_at:
            session.ended_at = 0

    def _on_caught_up(self, event: CaughtUp) -> None:
        state = self._state
        if state.live:
            return
        state.live = True
        self._nodes.caught_up()
        self._ending.caught_up()
        self._yields.tick()
        for task in state.tasks.values():
            if task.state == "queued" and not task.watched:
                state.watch(task)

    def _on_pools_set(self, event: PoolsSet) -> None:
        state = self._state
        state.pools = event.pools
        state.queue.set_weights({name: spec.weight for name, spec in event.pools.items()})

    # Time and the fleet.

    def _on_fleet_changed(self, event: FleetChanged) -> None:
        self._state.queue.unblock()

    def _on_limit_opened(self, event: LimitOpened) -> None:
        if event.tenant:
            self._state.queue.unpark(event.pool, event.tenant)
        else:
            self._state.queue.unblock()

    def _on_tick(self, event: Tick) -> None:
        state = self._state
        if state.timers:
            for task in state.due_timers():
                self._attempts.timer(task)
        deadlines = state.deadlines
        while deadlines and deadlines[0][0] <= state.wall_ms:
            self._deadline(heapq.heappop(deadlines)[1])
        self._nodes.ask_inventories()
        self._yields.tick()
        if state.fresh or self._again:
            self._notice()
        if state.now >= self._unblock_at:
            self._unblock_at = state.now + state.settings.unblock_s
            state.queue.unblock()
            state.queue.unpark_all()

    def _deadline(self, name: str) -> None:
        task = self._state.tasks.get(name)
        if task is None:
            return
        record = task.record
        allowed = (record.deadline_ms - record.created_ms) / 1000
        where = f"on {record.node}" if record.state == "placed" else "in the queue"
        message = f"not done after {allowed:.1f} s; it was {where}, attempt {record.attempt}"
        self._ending.end(task, Failure("deadline", message))

    def _notice(self) -> None:
        """Tell watchers why tasks wait: once they wait for long, then on every change."""
        state = self._state
        due: list[Task] = []
        while state.fresh and state.fresh[0][0] <= state.now and len(due) < _NOTICES_A_TICK:
            due.append(state.fresh.popleft()[1])
        while self._again and self._again[0][0] <= state.now and len(due) < _NOTICES_A_TICK:
            due.append(heapq.heappop(self._again)[2])
        for task in due:
            if task.state != "queued":
                task.watched = False
                task.told = ""
                continue
            why = reason(state, task)
            if why != task.told and task.record.origin:
                waiting = TaskWaiting(task=task.id, at_ms=state.wall_ms, reason=why)
                state.out.append(Notify(task.record.origin, waiting))
            task.told = why
            self._notices += 1
            when = state.now + state.settings.notice_again_s
            heapq.heappush(self._again, (when, self._notices, task))


def _created(record: TaskRecord) -> bool:
    """Whether a record was never rewritten.

    A task that we remember as ended may be created again by its request id, once its result
    has expired (rule 4).
    """
    return not record.create_seq and not record.attempt and record.ending is None


def _finishing(record: TaskRecord, task: Task) -> bool:
    """Whether the attempt that we know decided how its task ends, and carries it out."""
    return (
        record.ending is not None
        and task.state in ("offered", "running")
        and (record.attempt, record.node) == (task.record.attempt, task.record.node)
    )


def _same(record: TaskRecord, write: TaskRecord) -> bool:
    """Return whether a stored record is the write that is under way."""
    return (
        record.attempt == write.attempt
        and record.state == write.state
        and record.owner_epoch == write.owner_epoch
        and record.node == write.node
    )
