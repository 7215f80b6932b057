"""Attempts: placed from the queue, offered to their nodes, taken away and placed again."""

from __future__ import annotations

from msgspec.structs import replace

from controld.core.affinity import Affinity, affinity
from controld.core.attempt_policy import (
    avoided_node,
    exhausted,
    given_up,
    goes_to_the_queue,
    pause_s,
)
from controld.core.ending import Ending
from controld.core.placement import Decision, PlacementRequest, place
from controld.core.shard_io import (
    Notify,
    RecordRefused,
    RecordWritten,
    SendAssignment,
    SendDrop,
    WriteRecord,
    WriteUnavailable,
)
from controld.core.shard_state import ShardState
from controld.core.task import Cause, Leaving, Task
from corefleet.messages.records import Failure, PastAttempt, TaskRecord
from corefleet.messages.wire import (
    Assignment,
    DropAttempt,
    TaskPlaced,
    TaskRequeued,
)

_MOVE_COST = 0.5
_MOVE_COST_A_TURN = 0.25


class Attempts:
    """Decides where attempts run. Every change of place is one fenced write (rules 1, 9)."""

    def __init__(self, state: ShardState, ending: Ending) -> None:
        self._state = state
        self._ending = ending

    # From the queue.

    def start_ready(self) -> None:
        """Place ready tasks while there are places: online first, pools in turn."""
        state = self._state
        queue = state.queue
        while (pool := queue.next_pool()) is not None:
            task = queue.peek(pool)
            if task is None:
                continue
            if queue.behind_parked(pool, task):
                queue.park(pool)
                continue
            held = state.limits.held_by(state.shard, pool.name, task.record.tenant)
            if held == "tenant":
                queue.park(pool)
                continue
            if held:
                queue.block(pool, "limit")
                continue
            if not state.fleet.turn(pool.name, state.shard):
                queue.block(pool, "turn")
                continue
            decision = place(state.fleet, request_of(state, task.record), state.rng)
            if decision.slot is None:
                queue.block(pool, "place")
                state.fleet.wait(pool.name, state.shard)
                continue
            queue.serve(pool)
            state.move(task, "placing", decision.slot.node.name)
            self._write(task, self._placed(task, decision, task.record))

    # Writes and their answers.

    def written(self, event: RecordWritten) -> None:
        """A write is durable. The stream may have shown it before: then this is no news."""
        task = self._state.tasks.get(event.task)
        if task is None or task.write is None or event.revision <= task.revision:
            return
        if task.write.attempt == event.attempt:
            self._durable(task, event.revision)

    def write_seen(self, task: Task, revision: int, shown: bool) -> None:
        """The write under way is in the stream: seen before or instead of its answer."""
        if shown:
            self._shown(task, revision)
        self._durable(task, revision)

    def known_write_seen(self, task: Task) -> None:
        """The stream shows the write whose answer came before, and all that precedes it."""
        if task.record.owner_epoch == self._state.epoch:
            self._shown(task, task.revision)
        if task.waits_for_head and task.state == "offered":
            self.offer(task)

    def refused_write(self, event: RecordRefused) -> None:
        """Somebody wrote first, or we did and the answer was lost: the stream will show."""
        task = self._state.tasks.get(event.task)
        if task is not None and task.write is not None and task.write.attempt == event.attempt:
            task.unsure = True
            task.story.append((self._state.now, "write refused", ""))
            self._state.set_timer(task, "look", self._state.settings.unsure_s)

    def unavailable(self, event: WriteUnavailable) -> None:
        """A write had no effect: try again after a while."""
        state = self._state
        task = state.tasks.get(event.task)
        if task is None:
            return
        task.story.append((state.now, "write unavailable", event.reason))
        if task.state == "ending":
            state.set_timer(task, "end", state.back_off_s(task))
        elif task.write is not None and task.write.attempt == event.attempt:
            self.no_effect(task)

    def no_effect(self, task: Task) -> None:
        """The write under way is known to have failed."""
        state = self._state
        task.write = None
        task.unsure = False
        task.doomed = None
        state.vacate(task)
        if task.state == "placing":
            state.queue.delay(task)
            state.move(task, "queued")
            state.set_timer(task, "wake", state.back_off_s(task))
        else:
            state.set_timer(task, "move", state.back_off_s(task))
        self._ending.fulfil(task)

    def adopt(self, task: Task, record: TaskRecord, revision: int, shown: bool) -> None:
        """The stream has a live record that we did not expect: it is the truth."""
        state = self._state
        if task.state == "ending":
            task.record, task.revision = record, revision
            return
        state.vacate(task)
        state.clear_timer(task)
        task.write = task.leaving = task.doomed = None
        task.unsure = task.waits_for_head = False
        if task.state != "queued":
            state.move(task, "queued", "another write won")
        task.record, task.revision, task.delayed = record, revision, False
        if record.state == "placed":
            state.adopt(task)
            ours = state.live and record.owner_epoch == state.epoch
            state.move(task, "offered" if ours else "running", record.node)
            if self._ending.fulfil(task):
                return
            if state.live and state.fleet.is_gone(record.node, record.node_epoch):
                self.leave(task, "lost", "its node is gone")
            elif ours and shown and record.ending is None:
                self.offer(task)
            else:
                task.waits_for_head = ours and record.ending is None
        elif not self._ending.fulfil(task):
            state.queue.wake(task)
        self.keep_order(task)

    def finishing(self, task: Task, record: TaskRecord, revision: int) -> None:
        """The attempt decided how its task ends (rule 3); if it dies, the next carries it out."""
        task.record, task.revision = record, revision
        task.waits_for_head = False
        if task.state == "offered":
            self._state.clear_timer(task)
            if task.slot is not None:
                self._state.fleet.accepted(task.slot)
            self._state.move(task, "running", "finishing")

    def keep_order(self, task: Task) -> None:
        """Take back what passed an earlier task of its session.

        Happens when an older owner's write lands after our mark, and replaces a record
        that we had not been shown yet.
        """
        state = self._state
        if not state.live or task.id not in state.tasks:
            return
        for later in state.queue.session_of(task).order[1:]:
            if later.write is not None:
                later.doomed = Leaving("order", "an earlier task of the session lives")
            elif later.state in ("offered", "running"):
                self.leave(later, "order", "an earlier task of the session lives")

    # Time.

    def timer(self, task: Task) -> None:
        """A task's timer is over."""
        state = self._state
        what, task.timer = task.timer, ""
        if what == "wake":
            state.queue.wake(task)
        elif what == "offer":
            self.offer(task)
        elif what == "move" and task.leaving is not None:
            self.leave(task, task.leaving.cause, task.leaving.reason)
        elif what == "end":
            self._ending.again(task)
        elif what == "look":
            self._ending.look(task)

    # Taking an attempt away.

    def leave(self, task: Task, cause: Cause, reason: str) -> None:
        """Give the current attempt up with one write, which fences it: a new place or none."""
        state = self._state
        record = task.record
        if self._ending.fulfil(task):
            return
        left = given_up(record, cause, reason, state.wall_ms)
        why = exhausted(left)
        if why:
            self._ending.end(task, Failure("attempts_exhausted", why), left)
            return
        task.leaving = Leaving(cause, reason)
        task.doomed = None
        task.waits_for_head = False
        state.clear_timer(task)
        state.vacate(task)
        if task.state != "moving":
            task.tries = 0
            state.move(task, "moving", f"{cause}: {reason}")
        decision = Decision(None, "")
        first = state.queue.session_of(task).order[0] is task
        if first and pause_s(left.past) == 0.0 and not goes_to_the_queue(cause):
            decision = place(state.fleet, request_of(state, left), state.rng)
        if decision.slot is not None:
            self._write(task, self._placed(task, decision, left), cause)
        else:
            self._write(task, self._requeued(task, left), cause)

    # Inside.

    def _shown(self, task: Task, revision: int) -> None:
        """The stream showed a write of ours, and so all that precedes it."""
        state = self._state
        if state.doubt is not None and revision > state.doubt:
            state.doubt = None
        session = state.queue.session_of(task)
        if revision > session.ended_at:
            session.ended_at = 0

    def _durable(self, task: Task, revision: int) -> None:
        state = self._state
        written = task.write
        if written is None:
            return
        task.record, task.revision, task.write = written, revision, None
        task.unsure = False
        task.tries = 0
        state.clear_timer(task)
        left, task.leaving = task.leaving, None
        doomed, task.doomed = task.doomed, None
        if left is not None:
            self._tell_left(task, left, written.past[-1])
        if written.state == "queued":
            pause = pause_s(written.past) if written.past else 0.0
            if pause:
                state.queue.delay(task)
                state.set_timer(task, "wake", pause)
            state.move(task, "queued")
            self._ending.fulfil(task)
            return
        state.move(task, "offered", written.node)
        if self._ending.fulfil(task):
            return
        if doomed is not None:
            self.leave(task, doomed.cause, doomed.reason)
        elif state.fleet.is_gone(written.node, written.node_epoch):
            self.leave(task, "lost", "its node is gone")
        elif state.doubt is None and not state.queue.session_of(task).ended_at:
            self.offer(task)
        else:
            # The head that the task before wrote may not have been shown yet.
            task.waits_for_head = True

    def offer(self, task: Task) -> None:
        """Offer the attempt to its node, with all that it needs to start."""
        state = self._state
        record = task.record
        first = task.waits_for_head or not task.tries
        task.waits_for_head = False
        head, head_revision = state.heads.get((record.pool, record.session), (None, 0))
        assignment = Assignment(
            record=record,
            revision=task.revision,
            create_seq=task.seq,
            head=head,
            head_revision=head_revision,
        )
        state.out.append(SendAssignment(record.node, assignment))
        if first and record.origin:
            placed = TaskPlaced(
                task=task.id,
                at_ms=state.wall_ms,
                attempt=record.attempt,
                node=record.node,
                domain=record.domain,
                why=record.why,
            )
            state.out.append(Notify(record.origin, placed))

    def _write(self, task: Task, record: TaskRecord, left: str = "") -> None:
        task.write = record
        task.unsure = False
        home: Affinity = ""
        if record.state == "placed":
            head = self._state.heads.get((record.pool, record.session))
            home = affinity(
                self._state.fleet.offers(record.pool), head[0].home_node if head else "", record
            )
        self._state.out.append(WriteRecord(record, task.revision, left, home))

    def _placed(self, task: Task, decision: Decision, record: TaskRecord) -> TaskRecord:
        slot = decision.slot
        if slot is None:
            raise ValueError("decision: no slot; expected one that places the task")
        self._state.occupy(task, slot)
        return replace(
            record,
            state="placed",
            create_seq=task.seq,
            attempt=record.attempt + 1,
            node=slot.node.name,
            node_epoch=slot.node.epoch,
            domain=slot.domain,
            owner_epoch=self._state.epoch,
            why=decision.why,
            placed_ms=self._state.wall_ms,
        )

    def _requeued(self, task: Task, record: TaskRecord) -> TaskRecord:
        return replace(
            record,
            state="queued",
            create_seq=task.seq,
            node="",
            node_epoch=0,
            domain=-1,
            owner_epoch=self._state.epoch,
            why="",
            placed_ms=0,
        )

    def _tell_left(self, task: Task, left: Leaving, past: PastAttempt) -> None:
        if left.cause in ("stuck", "unanswered", "drained"):
            self.drop(past.node, task.id, past.attempt, left.reason)
        if task.record.origin:
            requeued = TaskRequeued(
                task=task.id,
                at_ms=self._state.wall_ms,
                attempt=past.attempt,
                node=past.node,
                reason=left.reason,
            )
            self._state.out.append(Notify(task.record.origin, requeued))

    def drop(self, node: str, task: str, attempt: int, reason: str) -> None:
        """Tell a node that an attempt is over."""
        drop = DropAttempt(task=task, attempt=attempt, reason=reason)
        self._state.out.append(SendDrop(node, drop))


def request_of(state: ShardState, record: TaskRecord) -> PlacementRequest:
    """Return what placement is asked for a task, given its past attempts."""
    found = state.heads.get((record.pool, record.session))
    avoid = avoided_node(record.past) if record.past else ""
    if found is None:
        return PlacementRequest(record.pool, record.pool_class, record.kind, avoid=avoid)
    head = found[0]
    return PlacementRequest(
        record.pool,
        record.pool_class,
        record.kind,
        head.home_node,
        head.home_domain,
        _MOVE_COST + _MOVE_COST_A_TURN * len(head.state.history),
        avoid,
    )
