"""What goes into a shard's core and what comes out of it.

The core decides; the runner carries out. Every write that an action asks for is
answered by exactly one event, so the core always knows what is under way.
"""

from __future__ import annotations

import msgspec

from controld.core.affinity import Affinity
from corefleet.messages.records import (
    PoolSpec,
    ResultRecord,
    SessionHead,
    TaskRecord,
)
from corefleet.messages.wire import (
    AssignAnswer,
    Assignment,
    CancelAnswer,
    DropAttempt,
    HeldAttempt,
    InventoryQuery,
    TaskEvent,
    YieldAttempt,
)

# Events: what happened.


class RecordStored(msgspec.Struct, frozen=True, gc=False):
    """A task record was seen in the shard's stream; `revision` is its sequence."""

    record: TaskRecord
    revision: int


class HeadStored(msgspec.Struct, frozen=True, gc=False):
    """A session head was seen in the shard's stream."""

    head: SessionHead
    revision: int


class CaughtUp(msgspec.Struct, frozen=True, gc=False):
    """Our own mark was seen: all that earlier owners wrote is known; decide from now on."""


class PoolsSet(msgspec.Struct, frozen=True, gc=False):
    """All pools of the cluster, by name."""

    pools: dict[str, PoolSpec]


class RecordWritten(msgspec.Struct, frozen=True, gc=False):
    """A WriteRecord is durable; `revision` is the record's new sequence."""

    task: str
    attempt: int
    revision: int


class RecordRefused(msgspec.Struct, frozen=True, gc=False):
    """A WriteRecord lost the compare-and-set; the stream will show who won."""

    task: str
    attempt: int


class WriteUnavailable(msgspec.Struct, frozen=True, gc=False):
    """A WriteRecord or EndTask could not be carried out and had no effect; try later."""

    task: str
    attempt: int
    reason: str


class RecordRead(msgspec.Struct, frozen=True, gc=False):
    """Answers ReadRecord. Unlike RecordStored it says nothing of what precedes it."""

    record: TaskRecord
    revision: int


class RecordMissing(msgspec.Struct, frozen=True, gc=False):
    """Answers ReadRecord: the stream holds no record of the task any more."""

    task: str


class TaskEnded(msgspec.Struct, frozen=True, gc=False):
    """An EndTask was decided: `result` is what stands, ours when `won`."""

    task: str
    won: bool
    result: ResultRecord | None


class AssignAnswered(msgspec.Struct, frozen=True, gc=False):
    """A node answered an assignment."""

    node: str
    answer: AssignAnswer


class AssignUnanswered(msgspec.Struct, frozen=True, gc=False):
    """No answer in time; the node may or may not have the attempt."""

    node: str
    task: str
    attempt: int


class AttemptReturned(msgspec.Struct, frozen=True, gc=False):
    """A node gave an attempt back."""

    task: str
    attempt: int
    node: str
    reason: str


class NodeGone(msgspec.Struct, frozen=True, gc=False):
    """The rack owner's verdict, a newer epoch, or a level check."""

    node: str
    node_epoch: int
    """Attempts at this epoch or an older one are gone."""
    reason: str


class NodeResumed(msgspec.Struct, frozen=True, gc=False):
    """The node's agentd started anew within its epoch: it may have forgotten attempts."""

    node: str


class AttemptStuck(msgspec.Struct, frozen=True, gc=False):
    """A heartbeat shows no progress for longer than the pool's progress_timeout."""

    task: str
    attempt: int
    age_s: float


class NodeDraining(msgspec.Struct, frozen=True, gc=False):
    """A node is to be emptied: its attempts are asked to yield, and taken at the deadline."""

    node: str
    reason: str = ""
    deadline_ms: int = 0
    """Wall-clock milliseconds; 0: never."""
    on: bool = True
    """False: no longer."""


class InventoryAnswered(msgspec.Struct, frozen=True, gc=False):
    node: str
    node_epoch: int
    absent: tuple[HeldAttempt, ...]


class CancelRequested(msgspec.Struct, frozen=True, gc=False):
    """Answered by AnswerCancel with the same `call`."""

    call: int
    task: str
    reason: str


class LimitOpened(msgspec.Struct, frozen=True, gc=False):
    """A limit of attempts in flight has room, and it is this shard's turn."""

    pool: str
    tenant: str = ""
    """'' when it is the pool's own limit."""


class FleetChanged(msgspec.Struct, frozen=True, gc=False):
    """The fleet has a node, slots or a state that it had not: waiting tasks may fit now."""


class Tick(msgspec.Struct, frozen=True, gc=False):
    """Time passed: deadlines, back-offs, cool-downs, inventory checks."""


Event = (
    RecordStored
    | HeadStored
    | CaughtUp
    | PoolsSet
    | RecordWritten
    | RecordRefused
    | WriteUnavailable
    | RecordRead
    | RecordMissing
    | TaskEnded
    | AssignAnswered
    | AssignUnanswered
    | AttemptReturned
    | NodeGone
    | NodeResumed
    | AttemptStuck
    | NodeDraining
    | InventoryAnswered
    | CancelRequested
    | LimitOpened
    | FleetChanged
    | Tick
)

# Actions: what to do.


class WriteRecord(msgspec.Struct, frozen=True, gc=False):
    """Replace the record if its sequence is still `expected`.

    Places (state placed, attempt + 1) or requeues (state queued); either fences the
    attempt before. Answered by RecordWritten, RecordRefused or WriteUnavailable.
    """

    record: TaskRecord
    expected: int
    left: str = ""
    """Why the attempt before is given up (task.Cause); '' when it places from the queue."""
    home: Affinity = ""
    """What the placement did to the session's home; '' when it places nothing."""


class SendAssignment(msgspec.Struct, frozen=True, gc=False):
    """Offer the attempt to its node. Answered by AssignAnswered or AssignUnanswered."""

    node: str
    assignment: Assignment


class EndTask(msgspec.Struct, frozen=True, gc=False):
    """End the task by the owner's hand: cancel, deadline, dead letter.

    One atomic batch, compare-and-set on `expected`. Answered by TaskEnded or
    WriteUnavailable.
    """

    record: TaskRecord
    expected: int
    result: ResultRecord


class ReadRecord(msgspec.Struct, frozen=True, gc=False):
    """Read the task's record from the stream's leader, never from a replica.

    Asked when a refused write is not explained by the stream in time. Answered by
    RecordRead or RecordMissing; asked again while neither comes.
    """

    task: str


class SendDrop(msgspec.Struct, frozen=True, gc=False):
    """Tell a node that an attempt is over. Not answered; the fence is what protects."""

    node: str
    drop: DropAttempt


class SendYield(msgspec.Struct, frozen=True, gc=False):
    """Ask a node to give an attempt back at its next step boundary. Answered, if at all, by
    AttemptReturned with the same reason."""

    node: str
    ask: YieldAttempt


class QueryInventory(msgspec.Struct, frozen=True, gc=False):
    """Answered by InventoryAnswered, or not at all."""

    node: str
    query: InventoryQuery


class Notify(msgspec.Struct, frozen=True, gc=False):
    """Publish an event to the watchers of a task accepted by `origin`."""

    origin: str
    event: TaskEvent


class AnswerCancel(msgspec.Struct, frozen=True, gc=False):
    call: int
    answer: CancelAnswer


Action = (
    WriteRecord
    | SendAssignment
    | EndTask
    | ReadRecord
    | SendDrop
    | SendYield
    | QueryInventory
    | Notify
    | AnswerCancel
)
