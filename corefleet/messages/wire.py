"""Messages on core NATS between controlds and nodes; never stored."""

from __future__ import annotations

from typing import Literal

import msgspec

from corefleet.messages.records import (
    NodeRegistration,
    PoolSpec,
    ResultRecord,
    SessionHead,
    State,
    Step,
    TaskRecord,
)


class Message(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Base of wire messages; `v` is the version of the sender's schema."""

    v: int = 1


class LoadVector(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fractions of capacity in use, each from 0 to 1; 0 where nobody measures them."""

    cpu: float = 0.0
    memory_bandwidth: float = 0.0
    memory: float = 0.0
    network: float = 0.0
    storage: float = 0.0
    llc_hit: float = 0.0
    """Share of last-level cache look-ups that hit, in the domain where fewest do."""
    remote: float = 0.0
    """Share of pages that were given across domains, in the domain where most are."""
    steal: float = 0.0
    """Share of CPU time that the hypervisor took."""


class SlotUse(msgspec.Struct, frozen=True, omit_defaults=True):
    """Slots of one pool in one domain."""

    pool: str
    domain: int
    total: int
    used: int


class SlowTask(msgspec.Struct, frozen=True, omit_defaults=True):
    """A task whose last step is older than its pool finds normal."""

    task: str
    attempt: int
    progress_age_s: float


class Heartbeat(Message, frozen=True):
    """A node's sign of life, five times a second."""

    node: str
    rack: str
    epoch: int
    number: int
    sent_ms: int = 0
    loop_age_s: float = 0.0
    """Age of the newest answer of agentd's main loop."""
    restart_grace_s: float = 0.0
    """agentd announced that it restarts, and asks for so long; 0: it did not."""
    load: LoadVector = LoadVector()
    running: int = 0
    queued: int = 0
    slots: tuple[SlotUse, ...] = ()
    slow: tuple[SlowTask, ...] = ()


NodeState = Literal["ready", "suspect", "cut", "held", "lost", "draining"]
"""`held`: found lost together with so many others that most controlds must agree first."""


class NodeView(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A node in its rack owner's digest."""

    node: str
    epoch: int
    state: NodeState = "ready"
    load: LoadVector = LoadVector()
    running: int = 0
    queued: int = 0
    slots: tuple[SlotUse, ...] = ()
    slow: tuple[SlowTask, ...] = ()
    beat_age_s: float = 0.0
    provisional: bool = False
    """Lost, but not in the store yet: a mass loss may still be held, the node waits."""


class RackDigest(Message, frozen=True):
    """What a rack owner tells all controlds, four times a second."""

    rack: str
    controld: str
    epoch: int
    """Epoch of the rack's ownership: an older owner's digest is ignored."""
    number: int
    nodes: tuple[NodeView, ...] = ()


class Verdict(Message, frozen=True):
    """Pushed at once when a node is found lost or cut; digests only repeat it."""

    rack: str
    rack_epoch: int
    node: str
    node_epoch: int
    state: Literal["lost", "cut"]
    reason: str = ""
    provisional: bool = False
    """See NodeView."""


class ObserveNode(Message, frozen=True):
    """A rack owner asks another controld for a second look at a silent node (rule 11)."""

    node: str
    node_epoch: int
    address: str
    """The node's probe address."""


class NodeObserved(Message, frozen=True):
    """What the second observer found. Without a bus of its own it gives no verdict (rule 10)."""

    node: str
    node_epoch: int
    observer: str
    alive: bool
    """The node's own port answered the observer."""
    reached: bool = True
    """The observer could look at all; false: its answer counts for nothing."""


class LossVote(Message, frozen=True):
    """What one controld finds of a mass loss: its own probes of nodes that are held as lost."""

    controld: str
    number: int
    """Counts the votes of this controld: the newest counts."""
    unreachable: tuple[str, ...] = ()
    """Held nodes whose port does not answer the voter."""
    reachable: tuple[str, ...] = ()


class PeerSuspected(Message, frozen=True):
    """A controld finds another one dead before its lease shows it: look sooner."""

    controld: str
    by: str


class QuotaReport(Message, frozen=True):
    """What one controld asks, spends and grants of the shared quotas (core/quota_shares).

    Several times a second while it has demand, else once a second. A quota that is not in
    `holders` is neither spent nor asked for by the sender.
    """

    controld: str
    number: int
    """Grows with each report of this controld, over its restarts too."""
    demand: dict[str, float] = {}
    """Wanted a second, refused demand included, by name of quota."""
    spend: dict[str, float] = {}
    """What the sender holds itself to, until it has heard a later grant."""
    holders: dict[str, str] = {}
    """The controld whose grants of each quota the sender takes."""
    seen: dict[str, int] = {}
    """Newest number heard of the controlds that the sender takes grants from or gives them."""
    members: str = ""
    """Digest of the controlds that the sender knows to be members."""
    grants: dict[str, dict[str, float]] = {}
    """Shares of the quotas that the sender divides: quota -> controld -> amount."""
    backlog: dict[str, int] = {}
    """Queued tasks of each pool in the sender's shards."""


class PoolCounts(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One pool in one controld's shards. What is not `queued` or `in_flight` only grows."""

    pool: str
    queued: int = 0
    in_flight: int = 0
    """Tasks with a place, from the decision until their end is seen."""
    placed: int = 0
    finished: int = 0
    not_admitted: int = 0
    """Submissions over a limit, at this controld."""
    home: dict[str, int] = {}
    """Placements by where the session's home was: `hit`, `moved`, `missed`, `new`."""
    requeued: dict[str, int] = {}
    """Attempts given up, by cause."""
    waits: tuple[int, ...] = ()
    """Queue waits by corefleet.metrics.LATENCY_BUCKETS_S, the last one beyond all of them."""


class AskOverview(Message, frozen=True):
    """Every controld answers with a ControldOverview at `overview_of(asked_by)`."""

    asked_by: str
    number: int


class ControldOverview(Message, frozen=True):
    """What one controld does. Counts begin with the process, which `started_ms` tells apart."""

    controld: str
    number: int
    """Of the AskOverview that it answers."""
    started_ms: int = 0
    at_ms: int = 0
    shards: int = 0
    """Shards that it decides for."""
    loop_lag_s: float = 0.0
    cpu_s: float = 0.0
    """CPU time of the process so far."""
    pools: tuple[PoolCounts, ...] = ()


class RegisterNode(Message, frozen=True):
    """agentd's first message; the answer fixes its epoch."""

    registration: NodeRegistration


class NodeRegistered(Message, frozen=True):
    """What a node needs to know of its cluster."""

    epoch: int
    shards: int
    streams: int
    pools: tuple[PoolSpec, ...] = ()
    pools_revision: int = 0
    error: str = ""
    """Set when the registration is refused; then nothing else counts."""


class PoolsChanged(Message, frozen=True):
    """All pools, after one of them changed."""

    pools: tuple[PoolSpec, ...]
    pools_revision: int


class Assignment(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One attempt, offered to the node that its record names."""

    record: TaskRecord
    revision: int
    """Sequence of the placing write: the fence of the attempt's journal."""
    create_seq: int
    head: SessionHead | None = None
    head_revision: int = 0
    """Sequence of `head`; 0 when the session has none yet."""


class AssignBatch(Message, frozen=True):
    """Assignments of one shard owner to one node."""

    controld: str
    items: tuple[Assignment, ...]


class AssignAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether the node took the attempt; a refusal names the reason."""

    task: str
    attempt: int
    accepted: bool
    reason: str = ""


class AssignAnswers(Message, frozen=True):
    items: tuple[AssignAnswer, ...]


class DropAttempt(Message, frozen=True):
    """Tells a node that an attempt, and every earlier one of the task, is over."""

    task: str
    attempt: int
    reason: str


class YieldAttempt(Message, frozen=True):
    """Asks a node to give an attempt back at its next step boundary (TaskReturned)."""

    task: str
    attempt: int
    reason: str
    """Copied into TaskReturned; `preempted: ...` and `draining: ...` count against nobody."""


class TaskReturned(Message, frozen=True):
    """A node gives an attempt back to the shard's owner."""

    task: str
    attempt: int
    node: str
    node_epoch: int
    reason: str


class HeldAttempt(msgspec.Struct, frozen=True):
    task: str
    attempt: int


class InventoryQuery(Message, frozen=True):
    """An owner's list of the attempts it believes the node holds."""

    shard: int
    owner_epoch: int
    held: tuple[HeldAttempt, ...]


class InventoryAnswer(Message, frozen=True):
    """Those of the query that the node does not hold."""

    node_epoch: int
    absent: tuple[HeldAttempt, ...] = ()


class CancelTask(Message, frozen=True):
    task: str
    reason: str = ""


class CancelAnswer(Message, frozen=True):
    """`state` is how the task stands afterwards; `cancelled` false: it had ended before."""

    found: bool
    cancelled: bool = False
    state: State = "queued"


class ExplainTask(Message, frozen=True):
    task: str


class CandidateLine(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One candidate of a placement and why it won or lost."""

    node: str
    domain: int
    eligible: bool
    score: float = 0.0
    line: str = ""


class ExplainAnswer(Message, frozen=True):
    found: bool
    chosen: str = ""
    why: str = ""
    candidates: tuple[CandidateLine, ...] = ()


class ListTasks(Message, frozen=True):
    """Live tasks of a shard; empty filters match all."""

    pool: str = ""
    session: str = ""
    state: str = ""
    limit: int = 100
    node: str = ""
    """Only tasks that have a place there."""


class TaskLine(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A live task as its owner sees it."""

    record: TaskRecord
    reason: str = ""
    state: str = ""
    """More than the record's: `running` once its node has it, `moving` while it is taken away."""
    asked_ms: int = 0
    """When its node was first asked to give the attempt back; 0: never."""


class TaskList(Message, frozen=True):
    tasks: tuple[TaskLine, ...] = ()
    draining: bool = False
    """Whether the owner knows that the asked `node` is to be given nothing more."""


class SubmitMessage(Message, frozen=True):
    """A submission by an agent's `turn.send`."""

    pool: str
    session: str
    request_id: str
    input: str
    tenant: str = ""
    """That of the task whose agent sends."""


class SubmitAnswer(Message, frozen=True):
    task: str = ""
    session: str = ""
    duplicate: bool = False
    error: str = ""
    retry_after_s: float = 0.0


# Events of a task, for watchers. A tagged union: `type` names the struct.


class Event(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag_field="type"):
    """Base of events. `at_ms` is the sender's wall clock."""

    task: str
    at_ms: int = 0
    v: int = 1


class TaskWaiting(Event, frozen=True, tag="waiting"):
    reason: str


class TaskPlaced(Event, frozen=True, tag="placed"):
    attempt: int
    node: str
    domain: int
    why: str = ""


class TaskRequeued(Event, frozen=True, tag="requeued"):
    attempt: int
    node: str
    reason: str


class StepEnded(Event, frozen=True, tag="step"):
    """A committed step; `summary` is its result in one short line."""

    step: Step
    summary: str = ""


class TokenText(Event, frozen=True, tag="token"):
    step: int
    text: str


class AgentPublished(Event, frozen=True, tag="published"):
    step: int
    topic: str
    data: str
    """JSON text."""


class TaskFinished(Event, frozen=True, tag="finished"):
    result: ResultRecord


TaskEvent = (
    TaskWaiting | TaskPlaced | TaskRequeued | StepEnded | TokenText | AgentPublished | TaskFinished
)


class EventBatch(Message, frozen=True):
    """Events of one task that happened together, oldest first."""

    events: tuple[TaskEvent, ...]
