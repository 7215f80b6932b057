"""What goes into a shard's core and what comes out of it.

The core decides; the runner carries out. Every write that an action asks for is
answered by exactly one event, so the core always knows what is under way.
"""

from __future__ import annotations

from dataclasses import dataclass

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
)

# Events: what happened.


@dataclass(slots=True, frozen=True)
class RecordStored:
    """A task record was seen in the shard's stream; `revision` is its sequence."""

    record: TaskRecord
    revision: int


@dataclass(slots=True, frozen=True)
class HeadStored:
    """A session head was seen in the shard's stream."""

    head: SessionHead
    revision: int


@dataclass(slots=True, frozen=True)
class CaughtUp:
    """Our own mark was seen: all that earlier owners wrote is known; decide from now on."""


@dataclass(slots=True, frozen=True)
class PoolsSet:
    """All pools of the cluster, by name."""

    pools: dict[str, PoolSpec]


@dataclass(slots=True, frozen=True)
class RecordWritten:
    """A WriteRecord is durable; `revision` is the record's new sequence."""

    task: str
    attempt: int
    revision: int


@dataclass(slots=True, frozen=True)
class RecordRefused:
    """A WriteRecord lost the compare-and-set; the stream will show who won."""

    task: str
    attempt: int


@dataclass(slots=True, frozen=True)
class WriteUnavailable:
    """A WriteRecord or EndTask could not be carried out and had no effect; try later."""

    task: str
    attempt: int
    reason: str


@dataclass(slots=True, frozen=True)
class RecordRead:
    """Answers ReadRecord. Unlike RecordStored it says nothing of what precedes it."""

    record: TaskRecord
    revision: int


@dataclass(slots=True, frozen=True)
class RecordMissing:
    """Answers ReadRecord: the stream holds no record of the task any more."""

    task: str


@dataclass(slots=True, frozen=True)
class TaskEnded:
    """An EndTask was decided: `result` is what stands, ours when `won`."""

    task: str
    won: bool
    result: ResultRecord | None


@dataclass(slots=True, frozen=True)
class AssignAnswered:
    """A node answered an assignment."""

    node: str
    answer: AssignAnswer


@dataclass(slots=True, frozen=True)
class AssignUnanswered:
    """No answer in time; the node may or may not have the attempt."""

    node: str
    task: str
    attempt: int


@dataclass(slots=True, frozen=True)
class AttemptReturned:
    """A node gave an attempt back."""

    task: str
    attempt: int
    node: str
    reason: str


@dataclass(slots=True, frozen=True)
class NodeGone:
    """The rack owner's verdict, a newer epoch that adopted nothing, or a level check."""

    node: str
    node_epoch: int
    """Attempts at this epoch or an older one are gone."""
    reason: str


@dataclass(slots=True, frozen=True)
class AttemptStuck:
    """A heartbeat shows no progress for longer than the pool's progress_timeout."""

    task: str
    attempt: int
    age_s: float


@dataclass(slots=True, frozen=True)
class InventoryAnswered:
    node: str
    node_epoch: int
    absent: tuple[HeldAttempt, ...]


@dataclass(slots=True, frozen=True)
class CancelRequested:
    """Answered by AnswerCancel with the same `call`."""

    call: int
    task: str
    reason: str


@dataclass(slots=True, frozen=True)
class FleetChanged:
    """The fleet has a node, slots or a state that it had not: waiting tasks may fit now."""


@dataclass(slots=True, frozen=True)
class Tick:
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
    | AttemptStuck
    | InventoryAnswered
    | CancelRequested
    | FleetChanged
    | Tick
)

# Actions: what to do.


@dataclass(slots=True, frozen=True)
class WriteRecord:
    """Replace the record if its sequence is still `expected`.

    Places (state placed, attempt + 1) or requeues (state queued); either fences the
    attempt before. Answered by RecordWritten, RecordRefused or WriteUnavailable.
    """

    record: TaskRecord
    expected: int


@dataclass(slots=True, frozen=True)
class SendAssignment:
    """Offer the attempt to its node. Answered by AssignAnswered or AssignUnanswered."""

    node: str
    assignment: Assignment


@dataclass(slots=True, frozen=True)
class EndTask:
    """End the task by the owner's hand: cancel, deadline, dead letter.

    One atomic batch, compare-and-set on `expected`. Answered by TaskEnded or
    WriteUnavailable.
    """

    record: TaskRecord
    expected: int
    result: ResultRecord


@dataclass(slots=True, frozen=True)
class ReadRecord:
    """Read the task's record from the stream's leader, never from a replica.

    Asked when a refused write is not explained by the stream in time. Answered by
    RecordRead or RecordMissing; asked again while neither comes.
    """

    task: str


@dataclass(slots=True, frozen=True)
class SendDrop:
    """Tell a node that an attempt is over. Not answered; the fence is what protects."""

    node: str
    drop: DropAttempt


@dataclass(slots=True, frozen=True)
class QueryInventory:
    """Answered by InventoryAnswered, or not at all."""

    node: str
    query: InventoryQuery


@dataclass(slots=True, frozen=True)
class Notify:
    """Publish an event to the watchers of a task accepted by `origin`."""

    origin: str
    event: TaskEvent


@dataclass(slots=True, frozen=True)
class AnswerCancel:
    call: int
    answer: CancelAnswer


Action = (
    WriteRecord
    | SendAssignment
    | EndTask
    | ReadRecord
    | SendDrop
    | QueryInventory
    | Notify
    | AnswerCancel
)
