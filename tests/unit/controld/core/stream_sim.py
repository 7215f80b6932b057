"""A tiny cluster around one shard: a stream, nodes, and owners that come and go.

What is under way is kept in lists; the caller chooses what happens next and how it fails.
The stream is the truth; `problems` collects what must never happen.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from msgspec.structs import replace

from controld.core.batch_places import BatchPlaces
from controld.core.fleet import Fleet, FleetDelta
from controld.core.limits import Limits
from controld.core.shard import ShardCore
from controld.core.shard_io import (
    Action,
    AnswerCancel,
    AssignAnswered,
    AssignUnanswered,
    AttemptReturned,
    CancelRequested,
    CaughtUp,
    EndTask,
    Event,
    FleetChanged,
    HeadStored,
    InventoryAnswered,
    LimitOpened,
    NodeDraining,
    NodeGone,
    Notify,
    PoolsSet,
    QueryInventory,
    ReadRecord,
    RecordMissing,
    RecordRead,
    RecordRefused,
    RecordStored,
    RecordWritten,
    SendAssignment,
    SendDrop,
    SendYield,
    TaskEnded,
    Tick,
    WriteRecord,
    WriteUnavailable,
)
from corefleet.messages.records import (
    TERMINAL,
    LostNode,
    ResultRecord,
    SessionHead,
    TaskRecord,
)
from corefleet.messages.wire import (
    AssignAnswer,
    Assignment,
    TaskEvent,
)
from tests.unit.controld.core.sim_node import POOLS, SimNode, digest_of


@dataclass
class Pending:
    """An action under way, with the owner that asked for it."""

    owner: int
    action: Action


class Sim:
    """One shard with `nodes` nodes. All randomness is the cores' own, from `seed`.

    `mark_fences`: an owner's writes are refused once a newer owner's mark is stored.
    Without, only the record's revision fences them, as a late write of an owner that
    does not know yet of its end.
    """

    def __init__(self, nodes: int = 3, seed: int = 0, mark_fences: bool = True) -> None:
        self.mark_fences = mark_fences
        self.rng = Random(seed)
        self.now = 1000.0
        self.sequence = 0
        self.records: dict[str, tuple[TaskRecord, int]] = {}
        self.heads: dict[tuple[str, str], tuple[SessionHead, int]] = {}
        self.results: dict[str, ResultRecord] = {}
        self.log: list[tuple[int, TaskRecord | SessionHead | int]] = []
        self.nodes = {f"n{number}": SimNode(f"n{number}") for number in range(nodes)}
        self.lost: dict[str, LostNode] = {}
        self.draining: set[str] = set()
        self.pending: list[Pending] = []
        self.problems: list[str] = []
        self.events: list[TaskEvent] = []
        self.cancels: dict[int, str] = {}
        self.calls = 0
        self.created: dict[tuple[str, str], list[str]] = {}
        self.ended_order: dict[tuple[str, str], list[str]] = {}
        self.owner = 1
        self.digests = 0
        self._begin()

    # Owners.

    def take_over(self) -> None:
        """A new owner starts from the records; the old one's actions may still happen."""
        self.core.close(self.now)
        self.owner += 1
        self._begin()

    def _begin(self) -> None:
        self.fleet = self.new_fleet()
        self.limits, batch = Limits(), BatchPlaces()
        self.limits.set_pools(POOLS)
        self.core = ShardCore(
            0,
            f"c{self.owner}",
            self.owner,
            self.fleet,
            Random(self.owner),
            limits=self.limits,
            batch=batch,
        )
        self._store(self.owner)
        self.cursor = 0
        self.shown: set[str] = set()
        self.feed(PoolsSet(POOLS))
        for node in sorted(self.draining):
            self.feed(NodeDraining(node, "new kernel"))

    def new_fleet(self) -> Fleet:
        """Return a fleet that knows what the simulated nodes are."""
        fleet = Fleet()
        fleet.set_pools(POOLS)
        for node in self.nodes.values():
            fleet.registered(node.registration(), self.now)
        for lost in self.lost.values():
            fleet.lost(lost, self.now)
        self._digest(fleet)
        return fleet

    @property
    def wall_ms(self) -> int:
        return int(self.now * 1000)

    def feed(self, event: Event) -> None:
        """Give an event to the owner and take up what it asks for."""
        self._take_up(self.core.handle(event, self.now, self.wall_ms))
        while woken := self.fleet.woken():
            for _ in woken:
                self._take_up(self.core.handle(FleetChanged(), self.now, self.wall_ms))
        while opened := self.limits.woken():
            for _, pool, tenant in opened:
                event = LimitOpened(pool, tenant)
                self._take_up(self.core.handle(event, self.now, self.wall_ms))

    def _take_up(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Notify):
                self.events.append(action.event)
            elif isinstance(action, AnswerCancel):
                self._note_cancel(action)
            else:
                self.pending.append(Pending(self.owner, action))

    def _note_cancel(self, action: AnswerCancel) -> None:
        task = self.cancels.pop(action.call)
        if not action.answer.found:
            self.problems.append(f"cancel of {task}: not found")
        elif action.answer.state not in TERMINAL:
            self.problems.append(f"cancel of {task}: answered with {action.answer.state}")

    # The stream.

    def _store(self, message: TaskRecord | SessionHead | int) -> int:
        self.sequence += 1
        self.log.append((self.sequence, message))
        return self.sequence

    def _put(self, record: TaskRecord) -> int:
        revision = self._store(record)
        self.records[record.task] = (record, revision)
        if record.state in TERMINAL:
            key = (record.pool, record.session)
            self.ended_order.setdefault(key, []).append(record.task)
        return revision

    def submit(self, pool: str, session: str, deadline_s: float = 0.0) -> str:
        key = (pool, session)
        number = sum(len(tasks) for tasks in self.created.values())
        record = TaskRecord(
            task=f"t{number:03d}",
            pool=pool,
            session=session,
            request_id=f"r{number}",
            input="",
            pool_class=POOLS[pool].pool_class,
            origin="c0",
            tenant=f"tenant-{session}",
            created_ms=self.wall_ms,
            deadline_ms=self.wall_ms + int(deadline_s * 1000) if deadline_s else 0,
        )
        self._put(record)
        self.created.setdefault(key, []).append(record.task)
        return record.task

    def follow(self, count: int) -> None:
        """Show the owner the next messages; what was rolled up meanwhile is not shown."""
        for _ in range(count):
            if self.cursor >= len(self.log):
                return
            revision, message = self.log[self.cursor]
            self.cursor += 1
            if isinstance(message, TaskRecord):
                if self.records[message.task][1] == revision:
                    self.shown.add(message.task)
                    self.feed(RecordStored(message, revision))
            elif isinstance(message, SessionHead):
                if self.heads[(message.pool, message.session)][1] == revision:
                    self.feed(HeadStored(message, revision))
            elif message == self.owner:
                self.feed(CaughtUp())

    # What is under way.

    def carry_out(self, index: int, fault: str = "") -> None:
        """Let one pending action happen, or fail as `fault` says."""
        if not self.pending:
            return
        pending = self.pending.pop(index % len(self.pending))
        action = pending.action
        event: Event | None = None
        if isinstance(action, WriteRecord):
            event = self._write(action, fault, pending.owner)
        elif isinstance(action, EndTask):
            event = self._end(action, fault, pending.owner)
        elif isinstance(action, SendAssignment):
            event = self._assign(action, fault)
        elif isinstance(action, QueryInventory):
            event = self._inventory(action, fault)
        elif isinstance(action, ReadRecord):
            stored = self.records.get(action.task)
            event = RecordRead(*stored) if stored else RecordMissing(action.task)
        elif isinstance(action, SendDrop) and fault != "lost":
            self.nodes[action.node].let_go(action.drop.task, action.drop.attempt)
        elif isinstance(action, SendYield) and not fault:
            event = self._yield(action)
        if event is not None and pending.owner == self.owner:
            self.feed(event)

    def _fenced(self, owner: int) -> bool:
        return self.mark_fences and owner < self.owner

    def _write(self, action: WriteRecord, fault: str, owner: int) -> Event:
        record = action.record
        if fault == "unavailable":
            return WriteUnavailable(record.task, record.attempt, "no leader")
        if self._fenced(owner) or self.records[record.task][1] != action.expected:
            return RecordRefused(record.task, record.attempt)
        revision = self._put(record)
        if fault == "copied":
            # An earlier send of the same write, thought lost, is still on its way.
            self.pending.append(Pending(-1, action))
        if fault == "lost":
            # Written, the answer lost, the retry refused: the runner can only say so.
            return RecordRefused(record.task, record.attempt)
        return RecordWritten(record.task, record.attempt, revision)

    def _end(self, action: EndTask, fault: str, owner: int) -> Event:
        task = action.record.task
        if fault == "unavailable":
            return WriteUnavailable(task, action.record.attempt, "no leader")
        if self._fenced(owner) or self.records[task][1] != action.expected:
            return TaskEnded(task, False, self.results.get(task))
        self._put(action.record)
        self.results[task] = action.result
        return TaskEnded(task, True, action.result)

    def _assign(self, action: SendAssignment, fault: str) -> Event | None:
        node = self.nodes[action.node]
        item = action.assignment
        unanswered = AssignUnanswered(action.node, item.record.task, item.record.attempt)
        if fault == "unavailable" or not node.alive or node.epoch != item.record.node_epoch:
            return unanswered
        if fault == "refuse" and item.record.task not in node.held:
            node.denied[item.record.task] = item.record.attempt
            answer = AssignAnswer(item.record.task, item.record.attempt, False, "not now")
            return AssignAnswered(action.node, answer)
        answer = node.offer(item)
        if answer.accepted:
            self.check_start(item)
        return unanswered if fault == "lost" else AssignAnswered(action.node, answer)

    def check_start(self, item: Assignment) -> None:
        record, revision = self.records[item.record.task]
        if revision != item.revision:
            return
        key = (record.pool, record.session)
        order = self.created[key]
        place = order.index(record.task)
        for earlier in order[:place]:
            if self.records[earlier][0].state not in TERMINAL:
                self.problems.append(f"{record.task} started before {earlier} ended")
        for later in order[place + 1 :]:
            if self._can_write(later):
                self.problems.append(f"{record.task} started while {later} runs")
        head = self.heads.get(key)
        if item.head_revision != (head[1] if head else 0):
            self.problems.append(f"{record.task} started with an old head")

    def _can_write(self, task: str) -> bool:
        """Whether some node holds an attempt of the task whose fence is intact."""
        revision = self.records[task][1]
        return any(
            node.alive and task in node.held and node.held[task].revision == revision
            for node in self.nodes.values()
        )

    def _inventory(self, action: QueryInventory, fault: str) -> Event | None:
        node = self.nodes[action.node]
        if fault or not node.alive:
            return None
        node.owner_epoch = max(node.owner_epoch, action.query.owner_epoch)
        absent = tuple(
            held
            for held in action.query.held
            if held.task not in node.held or node.held[held.task].record.attempt != held.attempt
        )
        return InventoryAnswered(action.node, node.epoch, absent)

    def _yield(self, action: SendYield) -> Event | None:
        node, ask = self.nodes[action.node], action.ask
        found = node.held.get(ask.task)
        if found is None or found.record.attempt != ask.attempt:
            return None
        node.let_go(ask.task, ask.attempt)
        return AttemptReturned(ask.task, ask.attempt, node.name, ask.reason)

    # Nodes.

    def finish(self, index: int, well: bool = True) -> None:
        """One held attempt, anywhere, ends: with its fence intact or not at all."""
        held = [(node, name) for node in self.nodes.values() for name in node.held if node.alive]
        if not held:
            return
        node, name = held[index % len(held)]
        item = node.held.pop(name)
        record, revision = self.records[name]
        if revision != item.revision:
            return
        final = replace(record, state="done" if well else "failed")
        self._put(final)
        self.results[name] = ResultRecord(
            task=name,
            pool=record.pool,
            session=record.session,
            request_id=record.request_id,
            state=final.state,
        )
        if well:
            self._store_head(record, item)

    def _store_head(self, record: TaskRecord, item: Assignment) -> None:
        key = (record.pool, record.session)
        version = item.head.version + 1 if item.head else 1
        head = SessionHead(
            pool=record.pool,
            session=record.session,
            version=version,
            last_task=record.task,
            home_node=record.node,
            home_domain=record.domain,
        )
        found = self.heads.get(key)
        if item.head_revision != (found[1] if found else 0):
            self.problems.append(f"{record.task} finished on an old head")
        self.heads[key] = (head, self._store(head))

    def give_back(self, index: int, reason: str, heard: bool = True) -> None:
        """One held attempt is given back; the owner may not hear it."""
        held = [(node, name) for node in self.nodes.values() for name in node.held if node.alive]
        if not held:
            return
        node, name = held[index % len(held)]
        attempt = node.held[name].record.attempt
        node.let_go(name, attempt)
        if heard:
            self.feed(AttemptReturned(name, attempt, node.name, reason))

    def lose(self, index: int, heard: bool = True) -> None:
        """A node dies, and its rack's owner finds out. One node always stays."""
        alive = [node for node in self.nodes.values() if node.alive]
        if len(alive) < 2:
            return
        node = alive[index % len(alive)]
        node.alive = False
        node.held.clear()
        lost = LostNode(node=node.name, epoch=node.epoch, reason="silent")
        self.lost[node.name] = lost
        if heard:
            self._apply(self.fleet.lost(lost, self.now))

    def restart(self, index: int) -> None:
        """A node starts anew, dead before or not: at a new epoch, with nothing in hand."""
        node = list(self.nodes.values())[index % len(self.nodes)]
        node.alive = True
        node.epoch += 1
        node.held.clear()
        node.denied.clear()
        self._apply(self.fleet.registered(node.registration(), self.now))

    def drain(self, index: int, deadline_s: float = 0.0) -> None:
        """A node is to be emptied, or, if it was, no longer."""
        node = list(self.nodes)[index % len(self.nodes)]
        if node in self.draining:
            self.draining.discard(node)
            self.feed(NodeDraining(node, on=False))
            return
        self.draining.add(node)
        deadline_ms = self.wall_ms + int(deadline_s * 1000) if deadline_s else 0
        self.feed(NodeDraining(node, "new kernel", deadline_ms))

    def cancel(self, index: int) -> None:
        tasks = [name for names in self.created.values() for name in names]
        tasks = [name for name in tasks if name in self.shown]
        if not tasks:
            return
        self.calls += 1
        call = self.calls
        self.cancels[call] = tasks[index % len(tasks)]
        self.feed(CancelRequested(call, self.cancels[call], "changed my mind"))

    # Time.

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self._apply(self._digest(self.fleet))
        self._apply(self.fleet.tick(self.now))
        self.feed(Tick())

    def _digest(self, fleet: Fleet) -> FleetDelta:
        self.digests += 1
        return fleet.digest(digest_of(list(self.nodes.values()), self.digests), self.now)

    def _apply(self, delta: FleetDelta) -> None:
        for gone in delta.gone:
            self.feed(NodeGone(gone.node, gone.node_epoch, gone.reason))
        if delta.capacity:
            self.feed(FleetChanged())

    # Judging.

    @property
    def quiet(self) -> bool:
        """Whether the owner knows all of the stream and nothing of its own is under way."""
        own = any(pending.owner == self.owner for pending in self.pending)
        return self.core.live and self.cursor == len(self.log) and not own

    def found_problems(self) -> list[str]:
        """Return what is wrong now: noted before, or by the core's own invariants."""
        return self.problems + self.core.check()

    def settle(self, rounds: int = 600) -> None:
        """No more faults: everything must end, and soon."""
        for node in self.nodes.values():
            if not node.alive:
                self.restart(int(node.name[1:]))
        left = list(self.records)
        for _ in range(rounds):
            self.follow(len(self.log))
            while self.pending:
                self.carry_out(0)
            self.finish(self.rng.randrange(8))
            self.finish(self.rng.randrange(8))
            self.tick(0.5)
            left = [name for name, (r, _) in self.records.items() if r.state not in TERMINAL]
            if not left and self.quiet and not self.core.states():
                return
        stories = "; ".join(f"{name}: {self.core.story(name)}" for name in self.core.states())
        self.problems.append(f"not ended: {left}; live: {stories}")

    def judge(self) -> list[str]:
        """Return all that was wrong, the end included."""
        found = self.found_problems()
        for key, order in self.created.items():
            done = [
                name
                for name in self.ended_order.get(key, [])
                if self.records[name][0].state == "done"
            ]
            if done != [name for name in order if name in done]:
                found.append(f"session {key}: ended as {done}, created as {order}")
            if len(set(self.ended_order.get(key, []))) != len(self.ended_order.get(key, [])):
                found.append(f"session {key}: a task ended twice: {self.ended_order[key]}")
        if self.cancels and self.owner == 1:
            found.append(f"cancels without an answer: {self.cancels}")
        return found
