"""What a shard's owner knows, and the one table by which its tasks move."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from controld.core.batch_places import BatchPlaces
from controld.core.eligibility import Slot
from controld.core.fleet import Fleet
from controld.core.inventory import Inventory
from controld.core.limits import Limits
from controld.core.ready_queue import ReadyQueue
from controld.core.rng import Rng
from controld.core.shard_io import Action
from controld.core.task import Task, TaskState, Timer
from corefleet.errors import IllegalTransition
from corefleet.messages.records import PoolSpec, SessionHead, State

_ENDED_REMEMBERED = 8192


@dataclass(slots=True, frozen=True)
class ShardSettings:
    """Times in seconds."""

    assign_tries: int = 3
    """Offers of one attempt to its node before another node is tried."""
    retry_first_s: float = 0.1
    """First back-off of a write or an offer; doubles up to `retry_most_s`."""
    retry_most_s: float = 5.0
    unsure_s: float = 2.0
    """How long the stream may take to show why a write was refused."""
    inventory_s: float = 10.0
    inventory_first_s: float = 1.0
    """After a query without an answer."""
    notice_after_s: float = 0.2
    """A task that waits longer tells its watchers why."""
    notice_again_s: float = 2.0
    """How often the reason is looked at again."""
    unblock_s: float = 0.25
    """Pools without a place try again after this, whatever the fleet said."""
    progress_timeout_s: float = 120.0
    """For tasks whose pool is not known."""
    batch_every: int = 20
    """One of so many placements is batch's while both classes have something to place."""
    preempt_after_s: float = 0.2
    """An online task that waits longer for a place has a batch attempt asked to yield."""
    yield_again_s: float = 5.0
    """Until an attempt that was asked to yield is asked again, or another one for the task."""


class ShardState:
    """The data of one shard's core. Its parts act on it; it decides nothing itself."""

    def __init__(
        self,
        shard: int,
        epoch: int,
        fleet: Fleet,
        rng: Rng,
        settings: ShardSettings,
        limits: Limits,
        batch: BatchPlaces,
    ) -> None:
        self.shard = shard
        self.epoch = epoch
        self.fleet = fleet
        self.limits = limits
        self.batch = batch
        self.rng = rng
        self.settings = settings
        self.now = 0.0
        self.wall_ms = 0
        self.live = False
        """All that earlier owners wrote is known."""
        self.doubt: int | None = 0
        """Until the stream shows a write of ours behind this sequence, heads may be missing:
        a task may have ended whose record we were not shown. At the start, because its end
        behind our mark replaced what we would have read before it."""
        self.pools: dict[str, PoolSpec] = {}
        self.tasks: dict[str, Task] = {}
        self.ended: dict[str, State] = {}
        """How the last tasks ended: late news of them is no news."""
        self.heads: dict[tuple[str, str], tuple[SessionHead, int]] = {}
        self.queue = ReadyQueue(settings.batch_every)
        self.inventory = Inventory(settings.inventory_s, settings.inventory_first_s, rng)
        self.deadlines: list[tuple[int, str]] = []
        self.timers: list[tuple[float, int, str]] = []
        self.fresh: deque[tuple[float, Task]] = deque()
        """Queued tasks whose watchers were not told yet why they wait."""
        self.out: list[Action] = []
        self._count = 0

    # Transitions.

    def move(self, task: Task, finish: TaskState, note: str = "") -> None:
        """Move a task by the table; raises IllegalTransition with the task's story."""
        start = task.state
        transition = TABLE.get((start, finish))
        if transition is None:
            raise IllegalTransition(f"task {task.id}", start, finish, task.tell_story())
        task.state = finish
        task.since = self.now
        task.story.append((self.now, finish, note))
        transition(self, task)
        if task.record.pool_class == "batch":
            if finish == "running":
                self.batch.began(task.record)
            elif start == "running":
                self.batch.over(task.id)

    def _transition_queued_busy(self, task: Task) -> None:
        self.queue.occupy(task)
        self.limits.took(self.shard, task.record.pool, task.record.tenant)

    def _transition_busy_queued(self, task: Task) -> None:
        self.queue.free(task)
        self.limits.left(task.record.pool, task.record.tenant)
        if self.live and not task.watched:
            self.watch(task)

    def _transition_busy_busy(self, task: Task) -> None:
        pass

    def _transition_queued_ending(self, task: Task) -> None:
        self.queue.withdraw(task)

    def _transition_queued_ended(self, task: Task) -> None:
        self.queue.withdraw(task)
        self._transition_any_ended(task)

    def _transition_any_ended(self, task: Task) -> None:
        self.vacate(task)
        if task.occupies:
            self.limits.left(task.record.pool, task.record.tenant)
        task.timer = ""
        del self.tasks[task.id]
        self.queue.drop(task)

    # Indices.

    def add(self, task: Task) -> None:
        """Take in a task in state queued."""
        self.tasks[task.id] = task
        task.since = self.now
        task.story.append((self.now, "queued", ""))
        if task.record.deadline_ms:
            heapq.heappush(self.deadlines, (task.record.deadline_ms, task.id))
        self.queue.add(task)

    def remember_end(self, task: str, state: State) -> None:
        ended = self.ended
        ended[task] = state
        if len(ended) > _ENDED_REMEMBERED:
            del ended[next(iter(ended))]

    def occupy(self, task: Task, slot: Slot) -> None:
        """A new attempt of ours takes a place."""
        task.slot = slot
        task.node = slot.node.name
        self.inventory.add(task, task.node, self.now)
        self.fleet.took(slot, self.now)

    def adopt(self, task: Task) -> None:
        """An attempt that another owner placed, or that we placed without knowing it."""
        record = task.record
        task.node = record.node
        self.inventory.add(task, task.node, self.now)
        slot = self.fleet.slot(record.node, record.node_epoch, record.pool, record.domain)
        if slot is not None:
            task.slot = slot
            self.fleet.adopted(slot)

    def vacate(self, task: Task) -> None:
        """The attempt is over as far as we are concerned."""
        if task.node:
            self.inventory.remove(task, task.node)
            task.node = ""
            task.asked_ms = 0
        slot = task.slot
        if slot is not None:
            task.slot = None
            self.fleet.gave_back(slot, self.now)

    def disown(self) -> None:
        """The shard is no longer ours: its attempts go on, its waiting places are free."""
        for task in self.tasks.values():
            if task.slot is not None:
                slot, task.slot = task.slot, None
                self.fleet.disowned(slot)
            if task.occupies:
                task.occupies = False
                self.limits.left(task.record.pool, task.record.tenant)
            self.batch.over(task.id)
        self.fleet.forget_shard(self.shard)
        self.limits.disown(self.shard)

    def watch(self, task: Task) -> None:
        """Tell the task's watchers why it waits if it waits for long."""
        task.watched = True
        self.fresh.append((self.now + self.settings.notice_after_s, task))

    # Timers: one a task; setting it replaces the one before.

    def set_timer(self, task: Task, what: Timer, after_s: float) -> None:
        self._count += 1
        task.timer = what
        task.timer_number = self._count
        task.retry_at = self.now + after_s
        heapq.heappush(self.timers, (task.retry_at, self._count, task.id))

    def clear_timer(self, task: Task) -> None:
        task.timer = ""

    def back_off_s(self, task: Task) -> float:
        """Count one more failure of a write or an offer; return how long to wait."""
        settings = self.settings
        pause = min(settings.retry_first_s * 2.0 ** min(task.tries, 16), settings.retry_most_s)
        task.tries += 1
        return pause * (0.75 + 0.5 * self.rng.random())

    def due_timers(self) -> list[Task]:
        """Take out the tasks whose timer is over."""
        due = []
        timers = self.timers
        while timers and timers[0][0] <= self.now:
            _, number, name = heapq.heappop(timers)
            task = self.tasks.get(name)
            if task is not None and task.timer and task.timer_number == number:
                due.append(task)
        return due


Transition = Callable[[ShardState, Task], None]

_queued_busy = ShardState._transition_queued_busy
_busy_queued = ShardState._transition_busy_queued
_busy_busy = ShardState._transition_busy_busy
_queued_ending = ShardState._transition_queued_ending
_queued_ended = ShardState._transition_queued_ended
_any_ended = ShardState._transition_any_ended

TABLE: dict[tuple[TaskState, TaskState], Transition] = {
    # A placing write goes out; is durable; had no effect, or another owner's write won.
    ("queued", "placing"): _queued_busy,
    ("placing", "offered"): _busy_busy,
    ("placing", "queued"): _busy_queued,
    # The node takes it.
    ("offered", "running"): _busy_busy,
    # It is taken from its node, to another one or to the queue.
    ("offered", "moving"): _busy_busy,
    ("running", "moving"): _busy_busy,
    ("moving", "offered"): _busy_busy,
    ("moving", "queued"): _busy_queued,
    # The stream shows a write that we did not wait for.
    ("queued", "offered"): _queued_busy,
    ("queued", "running"): _queued_busy,
    ("offered", "queued"): _busy_queued,
    ("running", "queued"): _busy_queued,
    # The owner ends it; never while a write is under way.
    ("queued", "ending"): _queued_ending,
    ("offered", "ending"): _busy_busy,
    ("running", "ending"): _busy_busy,
    ("moving", "ending"): _busy_busy,
    # Its record is terminal, by whoever's hand.
    ("queued", "ended"): _queued_ended,
    ("placing", "ended"): _any_ended,
    ("offered", "ended"): _any_ended,
    ("running", "ended"): _any_ended,
    ("moving", "ended"): _any_ended,
    ("ending", "ended"): _any_ended,
}
