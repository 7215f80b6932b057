"""This node's attempts: accepted or refused, on which worker, how far, and how they end. Pure.

An attempt goes opening -> waiting -> running -> finishing | returning -> over. Everything
here may be lost with the process: the journal has what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from agentd.core.admission import Admission
from agentd.core.attempt import Attempt, Outcome
from agentd.core.node_io import (
    Adopted,
    Answer,
    AnswerInventory,
    AppendJournal,
    CannotGoOn,
    CloseJournal,
    Draining,
    Dropped,
    EngineUsable,
    EpochLost,
    EventsEmitted,
    FinishAsked,
    FinishJournal,
    InventoryAsked,
    JournalAppended,
    JournalFinished,
    JournalLost,
    JournalOpened,
    JournalRefused,
    NodeAction,
    NodeEvent,
    NodeTick,
    Offered,
    OpenJournal,
    Place,
    PlacesSet,
    PublishEvents,
    PublishReturned,
    Registered,
    ReturnAsked,
    RunOn,
    StepsOffered,
    ToWorker,
    WorkerGone,
    WorkerLeaving,
    WorkerReady,
    YieldAsked,
)
from agentd.core.places import Places
from corefleet.messages.links import AttemptOver, FinishTask, RunResumed, StepsAppended, YieldTask
from corefleet.messages.records import Failure
from corefleet.messages.wire import (
    AssignAnswer,
    HeldAttempt,
    InventoryAnswer,
    SlotUse,
    SlowTask,
)

MOST_WORKER_DEATHS = 3
"""An attempt that outlived so many workers is given back: it may be what kills them."""
WAIT_FOR_WORKER_S = 10.0
RETURN_EVERY_S = 1.0
RETURN_FOR_S = 60.0
"""After this an inventory tells the owner what was returned."""
MOST_SLOW = 50


class Node:
    """The node's part of the protocol of docs/architecture.md, rules 1, 2, 8 and 9."""

    def __init__(self, node: str) -> None:
        self.places = Places()
        self.tallies: dict[tuple[str, str], int] = {}
        """How many attempts of each pool were accepted, refused, finished, returned, dropped."""
        self._attempts: dict[str, Attempt] = {}
        self._admission = Admission(node)
        self._handlers: dict[type, Callable[[Any, float], Iterable[NodeAction]]] = {
            Offered: self._offered,
            Adopted: self._adopted,
            StepsOffered: self._steps_offered,
            JournalAppended: self._appended,
            FinishAsked: self._finish_asked,
            JournalFinished: self._finished,
            EventsEmitted: self._emitted,
            JournalOpened: self._opened,
            JournalLost: self._lost,
            JournalRefused: self._journal_refused,
            CannotGoOn: self._cannot_go_on,
            ReturnAsked: self._return_asked,
            Dropped: self._dropped,
            YieldAsked: self._yield_asked,
            WorkerReady: self._worker_ready,
            WorkerGone: self._worker_gone,
            WorkerLeaving: self._worker_leaving,
            InventoryAsked: self._inventory,
            NodeTick: self._tick,
            Registered: self._registered,
            EpochLost: self._epoch_lost,
            PlacesSet: self._places_set,
            EngineUsable: self._engine_usable,
            Draining: self._drain,
        }

    def handle(self, event: NodeEvent, now: float) -> list[NodeAction]:
        """Take `event` in at monotonic second `now`; return what to do, in order."""
        return list(self._handlers[type(event)](event, now))

    # What others ask about the node.

    @property
    def epoch(self) -> int:
        """The node's epoch, 0 while it is not registered."""
        return self._admission.epoch

    def slots(self) -> tuple[SlotUse, ...]:
        return self.places.slots()

    def counts(self) -> tuple[int, int]:
        """Return how many attempts are with a worker, and how many are on their way to one."""
        running = sum(a.phase in {"running", "finishing"} for a in self._attempts.values())
        queued = sum(a.phase in {"opening", "waiting"} for a in self._attempts.values())
        return running, queued

    def slow(self, now: float) -> tuple[SlowTask, ...]:
        """Return the attempts whose progress is older than half of their pool's limit."""
        ages = [
            (now - attempt.progress_at, attempt)
            for attempt in self._attempts.values()
            if attempt.phase != "returning"
            and now - attempt.progress_at > self.places.progress_timeout_s(attempt.place) / 2
        ]
        ages.sort(key=lambda pair: -pair[0])
        return tuple(SlowTask(a.task, a.number, age) for age, a in ages[:MOST_SLOW])

    def held(self) -> tuple[HeldAttempt, ...]:
        """Return the attempts that go on here."""
        return tuple(
            HeldAttempt(a.task, a.number) for a in self._attempts.values() if a.phase != "returning"
        )

    # Assignments.

    def _offered(self, event: Offered, now: float) -> Iterable[NodeAction]:
        record = event.item.record
        task, number = record.task, record.attempt
        held = self._attempts.get(task)
        if held is not None and held.number == number and held.phase != "returning":
            yield Answer(AssignAnswer(task, number, accepted=True))
            return
        if held is not None and held.number > number:
            reason = f"attempt {held.number} of the task is here"
            yield Answer(AssignAnswer(task, number, accepted=False, reason=reason))
            return
        said = self._admission.answered(task, number, event.item.create_seq)
        if said is not None:
            yield Answer(AssignAnswer(task, number, accepted=said[0], reason=said[1]))
            return
        stale = self._admission.stale(record)
        if stale:
            yield Answer(AssignAnswer(task, number, accepted=False, reason=stale))
            return
        if held is not None:
            yield from self._end(held, "dropped", f"attempt {number} was placed", now)
        place = Place(record.pool, record.domain)
        refusal = self._admission.draining or self.places.refusal(place)
        if refusal:
            self._admission.deny(task, number, refusal, now, event.item.create_seq)
            self._count(record.pool, "refused")
            yield Answer(AssignAnswer(task, number, accepted=False, reason=refusal))
            return
        attempt = self._attempts[task] = Attempt(event.item, place, now)
        self.places.take(place)
        self._count(record.pool, "accepted")
        yield Answer(AssignAnswer(task, number, accepted=True))
        if number > 1:
            yield OpenJournal(event.item)
        else:
            attempt.move("waiting")
            yield from self._dispatch(attempt, now)

    def _adopted(self, event: Adopted, now: float) -> Iterable[NodeAction]:
        """Carry on what an earlier agentd of this epoch accepted, unless it is over by now."""
        record = event.item.record
        task, number = record.task, record.attempt
        said = self._admission.answered(task, number, event.item.create_seq)
        over = said is not None or task in self._attempts or self._admission.stale(record)
        if over:
            yield _not_here(event.worker, task, number)
            return
        place = Place(record.pool, record.domain)
        self._attempts[task] = Attempt(event.item, place, now, worker=event.worker)
        self.places.take(place)
        self.places.assign(event.worker)
        self._count(record.pool, "adopted")
        yield OpenJournal(event.item, adopted=True)

    def _opened(self, event: JournalOpened, now: float) -> Iterable[NodeAction]:
        attempt = self._find(event.task, event.attempt)
        if attempt is None or attempt.phase != "opening":
            return
        attempt.steps = list(event.steps)
        if attempt.worker:
            attempt.progress_at = now
            attempt.move("running")
            frame = RunResumed(task=event.task, attempt=event.attempt)
            yield ToWorker(attempt.worker, frame)
            yield from self._tell_to_yield(attempt)
        else:
            attempt.move("waiting")
            yield from self._dispatch(attempt, now)

    def _dispatch(self, attempt: Attempt, now: float) -> Iterable[NodeAction]:
        """Give a waiting attempt to a worker, if one is there and its owner does not want it."""
        if attempt.yields:
            yield from self._give_back(attempt, attempt.yields, now)
            return
        worker = self.places.pick(attempt.place)
        attempt.progress_at = now
        if worker is None:
            return
        attempt.worker = worker
        attempt.move("running")
        yield RunOn(worker, attempt.item, tuple(attempt.steps))

    # What workers ask.

    def _steps_offered(self, event: StepsOffered, now: float) -> Iterable[NodeAction]:
        attempt = self._of_worker(event.worker, event.task, event.attempt)
        if attempt is None or attempt.finish is not None:
            yield _not_here(event.worker, event.task, event.attempt)
            return
        if attempt.appending is not None:
            yield from self._give_back(attempt, "its worker sent two appends at once", now)
            return
        if event.steps and attempt.committed(event.steps):
            # An agentd that died had appended them, and could not say so.
            yield PublishEvents(attempt.item.record.origin, attempt.task, event.events)
            yield ToWorker(event.worker, StepsAppended(task=event.task, attempt=event.attempt))
            return
        attempt.appending, attempt.events = event.steps, event.events
        yield AppendJournal(attempt.item, event.steps)

    def _appended(self, event: JournalAppended, now: float) -> Iterable[NodeAction]:
        attempt = self._find(event.task, event.attempt)
        if attempt is None or attempt.appending is None:
            return
        attempt.steps.extend(attempt.appending)
        attempt.appending = None
        attempt.progress_at = now
        events, attempt.events = attempt.events, ()
        if events:
            yield PublishEvents(attempt.item.record.origin, attempt.task, events)
        if attempt.finish is not None:
            yield FinishJournal(attempt.item, attempt.finish, tuple(attempt.steps))
        elif attempt.worker:
            yield ToWorker(attempt.worker, StepsAppended(task=event.task, attempt=event.attempt))
        elif attempt.phase == "waiting":
            yield from self._dispatch(attempt, now)

    def _finish_asked(self, event: FinishAsked, now: float) -> Iterable[NodeAction]:
        finish = event.finish
        attempt = self._of_worker(event.worker, finish.task, finish.attempt)
        if attempt is None or attempt.finish is not None:
            yield _not_here(event.worker, finish.task, finish.attempt)
            return
        attempt.finish = finish
        attempt.move("finishing")
        if attempt.appending is None:
            yield FinishJournal(attempt.item, finish, tuple(attempt.steps))

    def _finished(self, event: JournalFinished, now: float) -> Iterable[NodeAction]:
        attempt = self._find(event.task, event.attempt)
        if attempt is not None:
            yield from self._end(attempt, "finished", "", now)

    def _emitted(self, event: EventsEmitted, now: float) -> Iterable[NodeAction]:
        attempt = self._of_worker(event.worker, event.task, event.attempt)
        if attempt is not None:
            attempt.progress_at = now
            yield PublishEvents(attempt.item.record.origin, event.task, event.events)

    def _return_asked(self, event: ReturnAsked, now: float) -> Iterable[NodeAction]:
        attempt = self._of_worker(event.worker, event.task, event.attempt)
        if attempt is None or attempt.phase != "running":
            yield _not_here(event.worker, event.task, event.attempt)
            return
        yield from self._give_back(attempt, event.reason, now)

    # Ends that are not the worker's.

    def _lost(self, event: JournalLost, now: float) -> Iterable[NodeAction]:
        attempt = self._find(event.task, event.attempt)
        if attempt is not None:
            yield from self._end(attempt, "dropped", event.reason, now)

    def _journal_refused(self, event: JournalRefused, now: float) -> Iterable[NodeAction]:
        attempt = self._find(event.task, event.attempt)
        if attempt is None or attempt.phase not in {"running", "waiting", "finishing"}:
            return
        attempt.appending, attempt.events = None, ()
        if attempt.phase == "finishing" and attempt.finish is not None and attempt.finish.failure:
            yield from self._give_back(attempt, event.reason, now)
            return
        attempt.finish = FinishTask(
            task=event.task,
            attempt=event.attempt,
            failure=Failure("agent_error", event.reason),
        )
        if attempt.phase != "finishing":
            attempt.move("finishing")
        yield FinishJournal(attempt.item, attempt.finish, tuple(attempt.steps))

    def _cannot_go_on(self, event: CannotGoOn, now: float) -> Iterable[NodeAction]:
        attempt = self._find(event.task, event.attempt)
        if attempt is not None and attempt.phase != "returning":
            yield from self._give_back(attempt, event.reason, now)

    def _dropped(self, event: Dropped, now: float) -> Iterable[NodeAction]:
        attempt = self._attempts.get(event.task)
        if attempt is not None and attempt.number <= event.attempt:
            yield from self._end(attempt, "dropped", event.reason, now)
        self._admission.deny(event.task, event.attempt, event.reason, now)

    def _yield_asked(self, event: YieldAsked, now: float) -> Iterable[NodeAction]:
        """Give back what no worker runs; of the rest nothing is cut off in the middle of a step."""
        attempt = self._find(event.task, event.attempt)
        if attempt is None or attempt.phase in {"finishing", "returning"}:
            return
        attempt.yields = event.reason
        if attempt.phase == "running":
            yield from self._tell_to_yield(attempt)
        elif not attempt.worker and attempt.appending is None:
            yield from self._give_back(attempt, event.reason, now)

    def _inventory(self, event: InventoryAsked, now: float) -> Iterable[NodeAction]:
        query = event.query
        absent = []
        # Before it is registered the node does not know yet what it will adopt.
        if self.epoch and not self._admission.stale_owner(query.shard, query.owner_epoch):
            for asked in query.held:
                attempt = self._attempts.get(asked.task)
                if attempt is not None and attempt.phase == "returning":
                    yield from self._end(attempt, "returned", attempt.reason, now)
                    attempt = None
                if attempt is None or attempt.number != asked.attempt:
                    absent.append(asked)
                    self._admission.absent(asked, now)
        yield AnswerInventory(InventoryAnswer(node_epoch=self.epoch, absent=tuple(absent)))

    # Workers.

    def _worker_ready(self, event: WorkerReady, now: float) -> Iterable[NodeAction]:
        self.places.add_worker(event.worker, event.place)
        for attempt in list(self._attempts.values()):
            waits = attempt.phase == "waiting" and attempt.appending is None
            if waits and attempt.place == event.place:
                yield from self._dispatch(attempt, now)

    def _worker_leaving(self, event: WorkerLeaving, now: float) -> Iterable[NodeAction]:
        self.places.remove_worker(event.worker)
        return ()

    def _worker_gone(self, event: WorkerGone, now: float) -> Iterable[NodeAction]:
        orphans = [a for a in self._attempts.values() if a.worker == event.worker]
        self.places.remove_worker(event.worker)
        for attempt in orphans:
            attempt.worker = ""
            if attempt.phase != "running":
                continue
            attempt.deaths += 1
            attempt.move("waiting")
            if attempt.deaths >= MOST_WORKER_DEATHS:
                reason = f"{attempt.deaths} workers died with it; the last: {event.reason}"
                yield from self._give_back(attempt, reason, now)
            elif attempt.appending is None:
                yield from self._dispatch(attempt, now)

    # The node as a whole.

    def _tick(self, event: NodeTick, now: float) -> Iterable[NodeAction]:
        self._admission.expire(now)
        for attempt in list(self._attempts.values()):
            if attempt.phase == "returning" and now >= attempt.return_at:
                if now - attempt.returned_since > RETURN_FOR_S:
                    yield from self._end(attempt, "returned", attempt.reason, now)
                else:
                    attempt.return_at = now + RETURN_EVERY_S
                    yield PublishReturned(attempt.returned())
            elif attempt.phase == "waiting" and now - attempt.progress_at > WAIT_FOR_WORKER_S:
                yield from self._give_back(
                    attempt, f"no worker of pool {attempt.place.pool} became ready", now
                )

    def _registered(self, event: Registered, now: float) -> Iterable[NodeAction]:
        self._admission.epoch = event.epoch
        return ()

    def _epoch_lost(self, event: EpochLost, now: float) -> Iterable[NodeAction]:
        self._admission.epoch = 0
        for attempt in list(self._attempts.values()):
            yield from self._end(attempt, "dropped", event.reason, now)

    def _places_set(self, event: PlacesSet, now: float) -> Iterable[NodeAction]:
        self.places.set(event.places)
        return ()

    def _engine_usable(self, event: EngineUsable, now: float) -> Iterable[NodeAction]:
        self.places.engine_usable(event.model, event.domain, event.usable)
        return ()

    def _drain(self, event: Draining, now: float) -> Iterable[NodeAction]:
        self._admission.draining = f"draining: {event.reason}"
        for attempt in list(self._attempts.values()):
            if attempt.phase in {"opening", "waiting"}:
                yield from self._give_back(attempt, event.reason, now)

    # Moves.

    def _give_back(self, attempt: Attempt, reason: str, now: float) -> Iterable[NodeAction]:
        attempt.move("returning")
        self._count(attempt.place.pool, "returned")
        self.places.release(attempt.place, attempt.worker)
        attempt.reason = reason
        attempt.returned_since = now
        attempt.return_at = now + RETURN_EVERY_S
        self._admission.deny(attempt.task, attempt.number, f"given back: {reason}", now)
        yield from self._tell_worker(attempt, "returned", reason)
        yield CloseJournal(attempt.task, attempt.number)
        yield PublishReturned(attempt.returned())

    def _end(
        self, attempt: Attempt, outcome: Outcome, reason: str, now: float
    ) -> Iterable[NodeAction]:
        returned = attempt.phase == "returning"
        attempt.move("over")
        del self._attempts[attempt.task]
        if returned:
            return
        self.places.release(attempt.place, attempt.worker)
        self._count(attempt.place.pool, outcome)
        if outcome == "finished":
            self._admission.finished(attempt.task, attempt.number, now, attempt.item.create_seq)
        else:
            life = attempt.item.create_seq
            self._admission.deny(attempt.task, attempt.number, reason, now, life)
        yield from self._tell_worker(attempt, outcome, reason)
        yield CloseJournal(attempt.task, attempt.number)

    def _tell_worker(self, attempt: Attempt, outcome: Outcome, reason: str) -> Iterable[NodeAction]:
        if attempt.worker:
            yield ToWorker(attempt.worker, attempt.over(outcome, reason))
            attempt.worker = ""

    def _tell_to_yield(self, attempt: Attempt) -> Iterable[NodeAction]:
        if attempt.yields:
            frame = YieldTask(task=attempt.task, attempt=attempt.number, reason=attempt.yields)
            yield ToWorker(attempt.worker, frame)

    def _count(self, pool: str, what: str) -> None:
        key = (pool, what)
        self.tallies[key] = self.tallies.get(key, 0) + 1

    def _find(self, task: str, number: int) -> Attempt | None:
        attempt = self._attempts.get(task)
        return attempt if attempt is not None and attempt.number == number else None

    def _of_worker(self, worker: str, task: str, number: int) -> Attempt | None:
        attempt = self._find(task, number)
        return attempt if attempt is not None and attempt.worker == worker else None


def _not_here(worker: str, task: str, attempt: int) -> ToWorker:
    return ToWorker(
        worker,
        AttemptOver(task=task, attempt=attempt, outcome="dropped", reason="not with this worker"),
    )
