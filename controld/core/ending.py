"""Tasks that end: by their node, or by the owner's hand (rule 3)."""

from __future__ import annotations

from msgspec.structs import replace

from controld.core.shard_io import (
    AnswerCancel,
    CancelRequested,
    EndTask,
    Notify,
    ReadRecord,
    SendDrop,
    TaskEnded,
)
from controld.core.shard_state import ShardState
from controld.core.task import Task
from corefleet.messages.records import Failure, ResultRecord, State, TaskRecord
from corefleet.messages.wire import CancelAnswer, DropAttempt, TaskFinished


class Ending:
    """Ends tasks by one compare-and-set each; the loser reports the winner."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._early: list[CancelRequested] = []
        """Cancels that came before all records were known."""

    def cancel(self, event: CancelRequested) -> None:
        """Cancel in whatever state the task is; the answer follows the decision."""
        state = self._state
        if not state.live:
            self._early.append(event)
            return
        task = state.tasks.get(event.task)
        if task is None:
            how = state.ended.get(event.task)
            if how is None:
                answer = CancelAnswer(found=False)
            else:
                answer = CancelAnswer(found=True, state=how)
            state.out.append(AnswerCancel(event.call, answer))
            return
        task.calls.append(event.call)
        self.end(task, Failure("cancelled", event.reason or "cancelled"))

    def caught_up(self) -> None:
        """Decide the cancels that waited."""
        early, self._early = self._early, []
        for event in early:
            self.cancel(event)

    def end(self, task: Task, failure: Failure, record: TaskRecord | None = None) -> None:
        """End the task with `failure`; the first wish stands. `record` carries more history."""
        if task.state == "ending" or task.wish is not None:
            return
        if task.write is not None:
            task.wish = failure
            task.story.append((self._state.now, "to be ended", failure.code))
            return
        task.leaving = None
        task.waits_for_head = False
        self._state.move(task, "ending", failure.code)
        self._send(task, failure, record or task.record)

    def fulfil(self, task: Task) -> bool:
        """End the task if that was wished while a write was under way."""
        wish = task.wish
        if wish is None:
            return False
        task.wish = None
        self.end(task, wish)
        return True

    def again(self, task: Task) -> None:
        """Repeat the EndTask, on the newest revision."""
        end = task.end
        if end is None:
            return
        if end.expected == task.revision:
            self._state.clear_timer(task)
            self._state.out.append(end)
        elif end.record.failure is not None:
            self._send(task, end.record.failure, task.record)

    def decided(self, event: TaskEnded) -> None:
        """An EndTask was decided."""
        task = self._state.tasks.get(event.task)
        if task is None or task.end is None or task.state != "ending":
            return
        if event.won:
            self.ended(task, task.end.record.state, 0, ours=True)
        elif event.result is not None:
            # The stream shows the winner's record too, and with it the session's head.
            self._answer_calls(task, event.result.state, cancelled=False)
            self._state.set_timer(task, "look", self._state.settings.unsure_s)
        elif task.revision != task.end.expected:
            self.again(task)
        else:
            self._state.set_timer(task, "look", self._state.settings.unsure_s)

    def look(self, task: Task) -> None:
        """Ask the stream's leader, and again while there is no answer."""
        self._state.out.append(ReadRecord(task.id))
        self._state.set_timer(task, "look", self._state.settings.unsure_s)

    def seen(self, task: Task, record: TaskRecord, revision: int, shown: bool) -> None:
        """The stream holds a terminal record; if not yet `shown`, its head is not known."""
        if not shown:
            self._state.doubt = max(self._state.doubt or 0, revision)
        end = task.end
        ours = (
            end is not None
            and record.state == end.record.state
            and record.owner_epoch == self._state.epoch
            and record.failure == end.record.failure
        )
        self.ended(task, record.state, revision, ours)

    def ended(self, task: Task, how: State, revision: int, ours: bool) -> None:
        """The task is over: its session goes on. `revision` is 0 when no head can follow."""
        state = self._state
        if ours and task.end is not None:
            origin = task.record.origin
            if origin:
                finished = TaskFinished(task=task.id, at_ms=state.wall_ms, result=task.end.result)
                state.out.append(Notify(origin, finished))
            if task.record.state == "placed":
                reason = task.end.record.failure.code if task.end.record.failure else how
                drop = DropAttempt(task=task.id, attempt=task.record.attempt, reason=reason)
                state.out.append(SendDrop(task.record.node, drop))
        if revision and not ours:
            session = state.queue.session_of(task)
            session.ended_at = revision
        self._answer_calls(task, how, cancelled=ours and how == "cancelled")
        state.remember_end(task.id, how)
        state.move(task, "ended", how)

    def _send(self, task: Task, failure: Failure, record: TaskRecord) -> None:
        state = self._state
        how: State = "cancelled" if failure.code == "cancelled" else "failed"
        final = replace(
            record,
            state=how,
            failure=failure,
            create_seq=task.seq,
            owner_epoch=state.epoch,
        )
        result = ResultRecord(
            task=task.id,
            pool=final.pool,
            session=final.session,
            request_id=final.request_id,
            state=how,
            failure=failure,
            attempt=final.attempt,
            node=final.node,
            domain=final.domain,
            why=final.why,
            placed_ms=final.placed_ms,
            past=final.past,
            created_ms=final.created_ms,
            finished_ms=state.wall_ms,
            digest=final.digest,
            tenant=final.tenant,
            submitted_by=final.submitted_by,
        )
        task.end = EndTask(final, task.revision, result)
        state.clear_timer(task)
        state.out.append(task.end)

    def _answer_calls(self, task: Task, how: State, cancelled: bool) -> None:
        calls, task.calls = task.calls, []
        for call in calls:
            answer = CancelAnswer(found=True, cancelled=cancelled, state=how)
            self._state.out.append(AnswerCancel(call, answer))
