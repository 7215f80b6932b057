"""What must hold whatever happens. Judged by what lands in the streams and in the store.

lost        No accepted task is lost: whoever was told "accepted" finds a result.
twice       No step is journaled twice, whichever attempts wrote it.
writer      At most one live attempt can write: what a journal takes comes from the attempt
            that the task's record names at that moment, from that node.
order       A session's tasks run in the order of their creation, one at a time: none is
            placed before those created earlier have ended, and a head's version goes up by
            one with each task that changed it.
owner       At most one controld decides for a shard at one instant: epochs of ownership and of
            marks only grow, each belongs to one controld, and once somebody decided at an
            epoch nobody decides at an older one.
request     A request id gives one task.
quota       No more is admitted than the pool's rate and burst allow. A controld that starts brings
            its share of the burst anew, and its share is never less than one.
model       What tasks put out and what sessions hold is what the sequential model says.
ends        Once faults stop, everything ends within a bounded time, as it should.
defect      No process meets a failure that it does not handle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from corefleet.bus import Stored
from corefleet.codec import decode
from corefleet.messages.records import (
    TERMINAL,
    JournalEntry,
    OwnerMark,
    Ownership,
    PoolSpec,
    ResultRecord,
    SessionHead,
    TaskRecord,
)
from corefleet.store import Change
from corefleet.subjects import SHARDS, kind_of
from tests.sim.agent import CHAIN, Script
from tests.sim.loop import Process
from tests.sim.model import Ended, run_session
from tests.sim.plan import Plan, Work

Session = tuple[str, str]

BURST_TOLERANCE = 1.05
MAY_END_AS = {"cancel": "cancelled", "deadline": "failed"}


class Violation(AssertionError):
    """A property does not hold; the first word names it."""


@dataclass(slots=True)
class KnownTask:
    """All that the stream said of a task."""

    task: str
    session: Session
    request_id: str
    create_seq: int
    created_at: float
    record: TaskRecord
    script: Script
    steps: dict[tuple[int, bool], tuple[int, int]] = field(default_factory=dict)
    """By (step, intent): the attempt and number of the append that holds it."""
    appends: dict[tuple[int, int], bytes] = field(default_factory=dict)
    result: ResultRecord | None = None

    @property
    def over(self) -> bool:
        """Whether it was decided how the task ends."""
        decided = self.record.ending is not None or self.record.state in TERMINAL
        return decided or self.result is not None


class Properties:
    """Sees all that is committed, and raises Violation at once."""

    def __init__(self, plan: Plan, pools: Sequence[PoolSpec]) -> None:
        self._plan = plan
        self._work = {work.request_id: work for work in plan.work}
        self._pools = {pool.name: pool for pool in pools}
        self._sessions: dict[Session, list[KnownTask]] = {}
        self._heads: dict[Session, SessionHead] = {}
        self._requests: dict[str, str] = {}
        self._marks: dict[int, OwnerMark] = {}
        self._owners: dict[str, dict[int, str]] = {}
        self._decided: dict[int, tuple[int, str]] = {}
        self._admitted: dict[str, list[float]] = {}
        self._starts: list[float] = []
        self.tasks: dict[str, KnownTask] = {}
        self.accepted: dict[str, str] = {}
        """Task by request id, as clients were told."""
        self.counts: dict[str, int] = {}
        self.decided_last = ""
        """The controld that decided something last."""

    # What happens.

    def committed(self, now: float, process: Process, messages: Sequence[Stored]) -> None:
        """Messages were stored, sent by `process`."""
        for stored in messages:
            match kind_of(stored.subject):
                case "task":
                    self._record(now, decode(stored.payload, TaskRecord), stored.sequence)
                case "log":
                    self._journal(process, decode(stored.payload, JournalEntry), stored)
                case "head":
                    self._head(decode(stored.payload, SessionHead))
                case "res":
                    self._result(decode(stored.payload, ResultRecord))
                case "owner":
                    self._mark(decode(stored.payload, OwnerMark))

    def stored(self, changes: Sequence[Change]) -> None:
        """Keys of the store changed."""
        for change in changes:
            if change.key.startswith(SHARDS) and change.value is not None:
                found = decode(change.value, Ownership)
                known = self._owners.setdefault(change.key, {})
                newest = max(known, default=0)
                if found.epoch < newest:
                    raise Violation(f"owner: {change.key} went from {newest} to {found.epoch}")
                if found.controld and known.setdefault(found.epoch, found.controld) != (
                    found.controld
                ):
                    raise Violation(
                        f"owner: epoch {found.epoch} of {change.key} belongs to "
                        f"{known[found.epoch]} and to {found.controld}"
                    )

    def decides(self, controld: str, shard: int, epoch: int, what: str) -> None:
        """A controld decided something about a shard, now."""
        self._count("decisions")
        newest, by = self._decided.get(shard, (0, ""))
        if epoch < newest or (epoch == newest and by != controld):
            raise Violation(
                f"owner: {controld} decides ({what}) for shard {shard} at epoch {epoch} "
                f"after {by} did at {newest}"
            )
        self._decided[shard] = (epoch, controld)
        self.decided_last = controld

    def told_accepted(self, request_id: str, task: str) -> None:
        """A client was told that its submission is accepted."""
        before = self.accepted.setdefault(request_id, task)
        if before != task:
            raise Violation(f"request: {request_id} was said to be {before} and {task}")
        if task not in self.tasks:
            raise Violation(f"lost: {task} was said to be accepted, and has no record")

    # Judging what was committed.

    def _record(self, now: float, record: TaskRecord, sequence: int) -> None:
        task = self.tasks.get(record.task)
        if task is None:
            self._create(now, record, sequence)
            return
        if record.state == "placed" and record.ending is None:
            self._count("placed")
            if record.create_seq != task.create_seq:
                raise Violation(
                    f"order: {record.task} was created at {task.create_seq}, and its record "
                    f"says {record.create_seq}"
                )
            for earlier in self._sessions[task.session]:
                if earlier.create_seq < task.create_seq and not earlier.over:
                    raise Violation(
                        f"order: {record.task} was placed before {earlier.task} had ended, which "
                        f"is {earlier.record.state} in attempt {earlier.record.attempt}"
                    )
        if record.attempt < task.record.attempt:
            raise Violation(
                f"writer: {record.task} went from attempt {task.record.attempt} back to "
                f"{record.attempt}"
            )
        if record.state == "queued" and task.record.state == "placed":
            self._count("requeued")
        task.record = record

    def _create(self, now: float, record: TaskRecord, sequence: int) -> None:
        script = msgspec.json.decode(record.input, type=Script)
        key = (record.pool, record.session)
        made = KnownTask(record.task, key, record.request_id, sequence, now, record, script)
        self.tasks[record.task] = made
        self._sessions.setdefault(key, []).append(made)
        before = self._requests.get(record.request_id)
        if before is not None and before != record.task:
            raise Violation(f"request: {record.request_id} made {before} and {record.task}")
        self._requests[record.request_id] = record.task
        self._count("created")

    def controld_started(self, now: float) -> None:
        """A controld begins to admit, its tokens all there."""
        self._starts.append(now)

    def admitted(self, now: float, pool: str) -> None:
        """A controld took a token of the pool."""
        spec = self._pools[pool]
        if not spec.rate_per_s:
            return
        times = self._admitted.setdefault(pool, [])
        times.append(now)
        share = max(1.0, spec.burst / self._plan.sizes.controlds)
        for number, start in enumerate(times):
            starts = sum(at >= start - spec.burst / spec.rate_per_s for at in self._starts)
            bursts = share * (self._plan.sizes.controlds + starts)
            allowed = bursts + spec.rate_per_s * (now - start) * BURST_TOLERANCE
            found = len(times) - number
            if found > allowed:
                raise Violation(
                    f"quota: {found} submissions to pool {pool} were admitted within "
                    f"{now - start:.2f} s; its rate and burst allow {allowed:.1f}"
                )

    def _journal(self, process: Process, entry: JournalEntry, stored: Stored) -> None:
        task = self.tasks[entry.task]
        if entry.finish:
            return
        self._count("appends")
        record = task.record
        if record.state != "placed" or record.attempt != entry.attempt:
            raise Violation(
                f"writer: attempt {entry.attempt} of {entry.task} appends while the record is "
                f"{record.state}, attempt {record.attempt}"
            )
        if record.node != process.name:
            raise Violation(f"writer: {process.name} appends to {entry.task}, at {record.node}")
        key = (entry.attempt, entry.number)
        before = task.appends.setdefault(key, stored.payload)
        if before != stored.payload:
            raise Violation(f"twice: {entry.task} has two appends {key}")
        for step in entry.steps:
            if step.kind == "open":
                continue
            number = (step.step, step.kind == "intent")
            if task.steps.setdefault(number, key) != key:
                raise Violation(
                    f"twice: step {step.step} of {entry.task} by append {task.steps[number]} "
                    f"and by {key} (attempt, number)"
                )

    def _head(self, head: SessionHead) -> None:
        key = (head.pool, head.session)
        before = self._heads.get(key)
        self._count("heads")
        version = before.version if before is not None else 0
        if head.version != version + 1:
            raise Violation(f"order: head of {key} went from {version} to {head.version}")
        if before is not None:
            last, this = self.tasks[before.last_task], self.tasks[head.last_task]
            if this.create_seq <= last.create_seq:
                raise Violation(f"order: {this.task} changed {key} after {last.task} did")
        self._heads[key] = head

    def _result(self, result: ResultRecord) -> None:
        task = self.tasks[result.task]
        if task.result is not None and task.result != result:
            raise Violation(f"twice: {result.task} ended {task.result.state} and {result.state}")
        task.result = result
        self._count(result.state)

    def _mark(self, mark: OwnerMark) -> None:
        before = self._marks.get(mark.shard)
        if before is not None and mark.epoch <= before.epoch and mark != before:
            raise Violation(f"owner: mark {mark} after {before}")
        self._marks[mark.shard] = mark
        self._count("takeovers")

    # The end.

    def all_ended(self) -> bool:
        """Whether all work was accepted and has its terminal record."""
        return len(self.accepted) == len(self._work) and all(
            task.record.state in TERMINAL for task in self.tasks.values()
        )

    def unfinished(self) -> list[str]:
        """Return one line for each piece of work that has not come to its end."""
        lines = [f"{name} was not accepted" for name in self._work if name not in self.accepted]
        for task in self.tasks.values():
            record = task.record
            if record.state not in TERMINAL:
                where = f" on {record.node}@{record.node_epoch}" if record.node else ""
                ending = f", ending {record.ending.state}" if record.ending else ""
                lines.append(
                    f"{task.task} ({task.request_id}, {'/'.join(task.session)}) is {record.state}, "
                    f"attempt {record.attempt}{where}{ending}, result "
                    f"{task.result.state if task.result else 'none'}"
                )
        return lines

    def check_end(self) -> None:
        """Compare what there is with what had to be."""
        for request_id, name in self.accepted.items():
            task = self.tasks[name]
            if task.result is None:
                raise Violation(f"lost: {name} was accepted and has no result")
            self._check_state(task, self._work[request_id])
        for key, tasks in self._sessions.items():
            self._check_session(key, tasks)

    def _check_state(self, task: KnownTask, work: Work) -> None:
        result = task.result
        assert result is not None
        if result.state != task.record.state:
            raise Violation(f"model: {task.task} is {task.record.state}, result {result.state}")
        may = {"failed"} if work.fails else {"done"}
        if work.cancel_after_s:
            may.add("cancelled")
        code = result.failure.code if result.failure else ""
        if work.deadline_s and code == "deadline":
            return
        if result.state not in may or code not in ("", "agent_error", "cancelled"):
            raise Violation(f"ends: {task.task} is {result.state} {result.failure}, not {may}")

    def _check_session(self, key: Session, tasks: list[KnownTask]) -> None:
        ordered = sorted(tasks, key=lambda task: task.create_seq)
        states = [task.result.state if task.result else "" for task in ordered]
        expected = run_session(
            Ended(task.task, task.request_id, task.script, state)
            for task, state in zip(ordered, states, strict=True)
        )
        for task in ordered:
            output = task.result.output if task.result else ""
            if expected.outputs.get(task.task, "") != output:
                raise Violation(
                    f"model: {task.task} of {key} put out {output!r}, not "
                    f"{expected.outputs.get(task.task, '')!r}"
                )
        head = self._heads.get(key) or SessionHead(pool=key[0], session=key[1])
        found = (head.version, head.last_task, head.state.memory.get(CHAIN, b""))
        if found != (expected.version, expected.last_task, expected.value):
            raise Violation(f"model: head of {key} is {found}, not {expected}")

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
