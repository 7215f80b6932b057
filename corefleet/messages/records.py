"""Records stored in JetStream and etcd.

Every record carries its version `v`. A field is only ever added, with a default;
golden bytes in tests/unit/corefleet hold the old forms.
"""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["queued", "placed", "done", "failed", "cancelled"]
"""What a record says. `running` is known to the node only: it costs no write."""

TERMINAL: frozenset[str] = frozenset({"done", "failed", "cancelled"})

FailureCode = Literal[
    "agent_error",
    "tool_error",
    "tool_at_most_once",
    "deadline",
    "attempts_exhausted",
    "cancelled",
    "model_error",
    "input_rejected",
    "internal",
]

StepKind = Literal[
    "open", "stage", "infer", "tool", "intent", "remember", "send", "publish", "reply"
]


class Record(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Base of stored records; `v` is the version of the writer's schema."""

    v: int = 1


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a task did not end well."""

    code: FailureCode
    message: str


class PastAttempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """An attempt that was given up, and why."""

    attempt: int
    node: str
    reason: str
    domain: int = -1
    placed_ms: int = 0
    """Wall-clock milliseconds of the decision to place it."""
    ended_ms: int = 0
    """When it was given up."""
    why: str = ""
    """Why the placement chose that node."""


class Ending(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How a task ends, put into its record before anything else of its end is written.

    From then on nobody can end it otherwise, and whoever finds it there carries it out
    (docs/architecture.md, rule 3).
    """

    state: State
    failure: Failure | None = None
    result: bytes
    """The ResultRecord."""
    head: bytes = b""
    """The session's new SessionHead; empty leaves it as it is."""
    head_revision: int = 0
    """Sequence of the head that `head` replaces; with another one the ending is void."""
    number: int = 0
    """Appends that the attempt made to its journal."""
    journaled: bool = False
    """Whether there is a journal to be replaced by its short form."""


class TaskRecord(Record, frozen=True):
    """One task, the queue entry included. One message a task; its sequence is the fence."""

    task: str
    pool: str
    session: str
    request_id: str
    input: str
    state: State = "queued"
    pool_class: Literal["online", "batch"] = "online"
    kind: str = "mixed"
    tenant: str = ""
    origin: str = ""
    """Controld that accepted it and that its events are addressed to."""
    created_ms: int = 0
    deadline_ms: int = 0
    """Wall-clock milliseconds at which the task is failed; 0 is never."""
    max_attempts: int = 5
    result_ttl_s: int = 600
    create_seq: int = 0
    """Sequence of the create, copied by the first rewrite (docs/architecture.md, rule 6)."""
    attempt: int = 0
    """Number of the attempt that is or was placed; 0 before the first."""
    node: str = ""
    node_epoch: int = 0
    domain: int = -1
    owner_epoch: int = 0
    why: str = ""
    """Why the placement chose this node, in one line."""
    placed_ms: int = 0
    """Wall-clock milliseconds of the decision to place the attempt; 0 while it has none."""
    past: tuple[PastAttempt, ...] = ()
    yields: int = 0
    """Attempts given up because they were asked to: they count against nobody."""
    failure: Failure | None = None
    ending: Ending | None = None
    """Set while the task is being ended; every rewrite of the record keeps it."""
    digest: bytes = b""
    """Of what was asked: tells a repeated submission from another one with its request id."""
    submitted_by: str = ""
    """Who asked for it, by certificate or token, as the audit log names them; '' where nobody
    is known, and for what an agent sent: its request id names the task then."""


class Step(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One journaled unit of a task. `step` counts from 0 over all attempts."""

    step: int
    kind: StepKind
    name: str = ""
    fingerprint: bytes = b""
    """Digest of what was asked, checked on replay: another question is not this step."""
    result: bytes = b""
    """MessagePack of the step's result."""
    error: str = ""
    attempt: int = 0
    node: str = ""
    started_ms: int = 0
    wall_us: int = 0
    cpu_us: int = 0
    tokens_in: int = 0
    tokens_out: int = 0


class JournalEntry(Record, frozen=True):
    """One message of a journal: the steps that ended together in one attempt."""

    task: str
    attempt: int
    number: int
    """Counts an attempt's appends from 0: with `attempt`, it tells our own append."""
    steps: tuple[Step, ...] = ()
    finish: bool = False
    """Set on the last message, which carries the trace in short form (results left out)."""


class Turn(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a session's conversation."""

    role: Literal["user", "assistant", "tool"]
    text: str
    name: str = ""


class SessionState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a session keeps between tasks."""

    memory: dict[str, bytes] = {}
    """Values that the agent remembered, as MessagePack."""
    history: tuple[Turn, ...] = ()


class SessionHead(Record, frozen=True):
    """The newest state of a session; written once a finished task, by compare-and-set."""

    pool: str
    session: str
    version: int = 0
    last_task: str = ""
    home_node: str = ""
    home_domain: int = -1
    state: SessionState = SessionState()


class ResultRecord(Record, frozen=True):
    """How a task ended; kept for the pool's `result_ttl_s`."""

    task: str
    pool: str
    session: str
    request_id: str
    state: State
    output: str = ""
    failure: Failure | None = None
    attempt: int = 0
    node: str = ""
    domain: int = -1
    why: str = ""
    placed_ms: int = 0
    past: tuple[PastAttempt, ...] = ()
    created_ms: int = 0
    finished_ms: int = 0
    steps: tuple[Step, ...] = ()
    digest: bytes = b""
    """The record's."""
    tenant: str = ""
    submitted_by: str = ""


class RequestRecord(Record, frozen=True):
    """Which task a request id made. Written no more: ids of tasks are derived instead."""

    request_id: str
    task: str
    session: str
    digest: bytes


class OwnerMark(Record, frozen=True):
    """Written to the shard's stream by a new owner: the barrier of docs/architecture.md, rule 7."""

    shard: int
    epoch: int
    controld: str


# Records in etcd.


class ClusterSettings(Record, frozen=True):
    """Constants of the cluster, written once by the first controld."""

    shards: int = 256
    streams: int = 4
    replicas: int = 1
    max_input_bytes: int = 262_144
    generation: int = 1


class ControldRegistration(Record, frozen=True):
    """A living controld; the key hangs on its lease."""

    controld: str
    address: str
    """gRPC address, host:port."""
    started_ms: int = 0
    version: str = ""


class Ownership(Record, frozen=True):
    """Who owns a shard or a rack. Not on a lease: the epoch outlives its holder."""

    controld: str
    epoch: int


class DomainInfo(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One NUMA domain as the node offers it."""

    domain: int
    cpus: str
    """CPU list as the kernel writes it, e.g. `0-3,8`."""
    memory_bytes: int = 0
    slots: dict[str, int] = {}
    """Tasks that each pool may run at once here."""


class NodeRegistration(Record, frozen=True):
    """A node as it last registered."""

    node: str
    epoch: int = 0
    rack: str = "rack0"
    probe_address: str = ""
    """host:port of the TCP port that answers liveness probes."""
    arch: str = ""
    features: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    domains: tuple[DomainInfo, ...] = ()
    models: tuple[str, ...] = ()
    version: str = ""
    started_ms: int = 0
    warnings: tuple[str, ...] = ()
    isolation: tuple[str, ...] = ()
    """One line for each kind of isolation: what is active, and why not a better one."""
    draining: bool = False
    """The node asks to be drained: its health gets worse."""
    accelerators: dict[str, int] = {}
    """How many of each accelerator are there, by label."""
    draining_reason: str = ""
    """What its health finds wrong, when it asks to be drained."""
    draining_since_ms: int = 0
    """When it began to ask, by the clock of the controld that registered it; 0: it does not."""


class Drain(Record, frozen=True):
    """Somebody wants a node free of tasks; stands until it is deleted (undrained)."""

    node: str
    by: str = ""
    reason: str = ""
    at_ms: int = 0
    deadline_ms: int = 0
    """Wall-clock milliseconds after which tasks are taken away between steps or not; 0: never."""


class LostNode(Record, frozen=True):
    """A rack owner's verdict: this epoch of the node is dead."""

    node: str
    epoch: int
    by: str = ""
    at_ms: int = 0
    reason: str = ""


class ToolSpec(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A tool that a pool may call."""

    name: str
    source: str = "builtin"
    """`builtin`, or `module:function` importable by the worker."""
    at_most_once: bool = False
    timeout_s: float = 30.0


class PoolSpec(Record, frozen=True):
    """One class of agents, as configured."""

    name: str
    agent: str = "declared"
    """`declared`, or `module:Class` of a corefleet.Agent importable by the worker."""
    python_path: tuple[str, ...] = ()
    model: str = ""
    prompt: str = ""
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: Literal["auto", "required_first", "none"] = "auto"
    max_steps: int = 16
    max_tokens: int = 256
    temperature: float = 0.0
    pool_class: Literal["online", "batch"] = "online"
    kind: Literal["compute", "retrieval", "tool", "mixed"] = "mixed"
    labels: dict[str, str] = {}
    slots: int = 8
    """Tasks that one domain runs at once."""
    workers: int = 1
    """Worker processes in a domain."""
    spares: int = 1
    """Warm workers in a domain that wait to replace a dead one."""
    max_attempts: int = 5
    deadline_s: float = 0.0
    progress_timeout_s: float = 120.0
    result_ttl_s: int = 600
    rate_per_s: float = 0.0
    """Submissions a second over the whole cluster; 0 is no limit."""
    burst: int = 0
    tenant_rate_per_s: float = 0.0
    """Submissions a second of each tenant over the whole cluster; 0 is no limit."""
    backlog_limit: int = 0
    """Queued tasks over the whole cluster above which submissions are refused; 0 is no limit."""
    weight: int = 1
    """Turns at free places, among the pools of its class."""
    max_in_flight: int = 0
    """Tasks that have a place at once, over the whole cluster; 0 is no limit."""
    max_in_flight_per_tenant: int = 0
    arch: str = ""
    """Architecture that nodes must have, as `uname -m` says; '' is any."""
    features: tuple[str, ...] = ()
    """CPU features that nodes must have, as their registrations name them."""
    accelerator: str = ""
    """Label of the accelerator of which each task takes one; '' for none."""
    exclusive: bool = False
    """Nodes that run a task of the pool run none of another."""
    history_turns: int = 16
    worker_memory_bytes: int = 0
    """Most memory that one worker process may have; 0: its share of the domain."""
