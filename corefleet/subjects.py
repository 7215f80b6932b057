"""The only speller of NATS subjects, stream names and etcd keys.

Streams: shard s lives in stream `cf-<s * streams // shards>`; a stream holds every
subject `cf.<stream>.>`. The mapping is fixed at creation (docs/architecture.md, rule 12).

Kinds in a stream, by who reads them:
    cf.<stream>.own.<shard>.task.<task>            the record, one message a task
    cf.<stream>.own.<shard>.head.<pool>.<session>  the session head
    cf.<stream>.own.<shard>.owner                  the owner's mark
    cf.<stream>.log.<shard>.<task>                 the journal
    cf.<stream>.res.<shard>.task.<task>            the result
"""

from __future__ import annotations

from typing import Literal

from corefleet.errors import InvalidInput

AnyToken = Literal["*"]
ANY: AnyToken = "*"
"""In place of a node, shard, stream or any other token: each one there is."""


class Layout:
    """Where each shard's subjects live, for a cluster of `shards` over `streams`."""

    def __init__(self, shards: int, streams: int) -> None:
        if not 1 <= streams <= shards <= 65536:
            raise InvalidInput("streams", streams, f"1 to shards ({shards}), shards at most 65536")
        self.shards = shards
        self.streams = streams

    def stream_of(self, shard: int) -> int:
        """Return the number of the stream that holds `shard`."""
        return shard * self.streams // self.shards

    def stream_name(self, stream: int) -> str:
        return stream_name(stream)

    def stream_subjects(self, stream: int) -> str:
        return f"cf.{stream}.>"

    def task(self, shard: int, task: str) -> str:
        return f"cf.{self.stream_of(shard)}.own.{shard}.task.{task}"

    def tasks_of(self, shard: int) -> str:
        return f"cf.{self.stream_of(shard)}.own.{shard}.task.*"

    def head(self, shard: int, pool: str, session: str) -> str:
        return f"cf.{self.stream_of(shard)}.own.{shard}.head.{pool}.{session}"

    def owner(self, shard: int) -> str:
        return f"cf.{self.stream_of(shard)}.own.{shard}.owner"

    def owned(self, shard: int) -> str:
        """Filter for all that the owner of `shard` follows."""
        return f"cf.{self.stream_of(shard)}.own.{shard}.>"

    def journal(self, shard: int, task: str) -> str:
        return f"cf.{self.stream_of(shard)}.log.{shard}.{task}"

    def result(self, shard: int, task: str) -> str:
        return f"cf.{self.stream_of(shard)}.res.{shard}.task.{task}"

    def task_or_result(self, shard: int, task: str) -> str:
        """Filter for the task's record and its result, and nothing else."""
        return f"cf.{self.stream_of(shard)}.*.{shard}.task.{task}"


# What there is of each kind in all streams, for permissions.

ALL_TASKS = "cf.*.own.*.task.*"
ALL_HEADS = "cf.*.own.*.head.*.*"
ALL_OWNERS = "cf.*.own.*.owner"
ALL_JOURNALS = "cf.*.log.*.*"
ALL_RESULTS = "cf.*.res.*.task.*"


def stream_name(stream: int) -> str:
    return f"cf-{stream}"


def stream_name_of(subject: str) -> str:
    """Return the name of the stream that holds a stored subject."""
    return f"cf-{subject.split('.', 2)[1]}"


def kind_of(subject: str) -> str:
    """Return `task`, `head`, `owner`, `log` or `res` for a stored subject."""
    parts = subject.split(".", 5)
    return parts[4] if parts[2] == "own" else parts[2]


# Core NATS: only the newest counts, nothing is stored.


def beat(rack: str, node: str) -> str:
    """Heartbeats of one node."""
    return f"cf.beat.{rack}.{node}"


def beats(rack: str) -> str:
    """Heartbeats of a rack, for its owner."""
    return f"cf.beat.{rack}.*"


def digest(rack: str) -> str:
    return f"cf.digest.{rack}"


DIGESTS = "cf.digest.*"
VERDICTS = "cf.verdict"
LOSS_VOTES = "cf.loss"
"""Publish: LossVote, while a mass loss is held."""

PEERS = "cf.peer"
"""Publish: PeerSuspected."""

QUOTAS = "cf.quota"
"""Publish: QuotaReport."""


OVERVIEW = "cf.control.overview"
"""Publish: AskOverview, to all controlds."""


def overview_of(controld: str) -> str:
    """Publish: ControldOverview, for the controld that asked."""
    return f"cf.control.{controld}.overview"


def observe(controld: str) -> str:
    """Request: ObserveNode -> NodeObserved."""
    return f"cf.control.{controld}.observe"


def node_assign(node: str) -> str:
    """Request: AssignBatch -> AssignAnswers."""
    return f"cf.node.{node}.assign"


def node_drop(node: str) -> str:
    """Publish: DropAttempt."""
    return f"cf.node.{node}.drop"


def node_yield(node: str) -> str:
    """Publish: YieldAttempt."""
    return f"cf.node.{node}.yield"


def node_inventory(node: str) -> str:
    """Request: InventoryQuery -> InventoryAnswer."""
    return f"cf.node.{node}.inventory"


CONTROL_REGISTER = "cf.control.register.*"
"""Registrations of all nodes."""


def control_register(node: str) -> str:
    """Request to any controld: RegisterNode -> NodeRegistered."""
    return f"cf.control.register.{node}"


CONTROL_SUBMIT = "cf.control.submit"
"""Request to any controld, from an agent's turn.send: SubmitMessage -> SubmitAnswer."""

CONTROL_QUEUE = "controld"
"""Queue group of all controlds."""

POOLS_CHANGED = "cf.pools"
"""Publish: PoolsChanged, from the controld that applied a pool."""


def shard_calls(shard: int | AnyToken) -> str:
    """All that the owner of a shard answers."""
    return f"cf.shard.{shard}.>"


def call_of(subject: str) -> str:
    """Return `returned`, `cancel`, `explain` or `list` for a call to the owner of a shard."""
    return subject.split(".", 4)[3]


def sender_of(subject: str) -> str:
    """Return the node that a subject ends in: only that node may publish there."""
    return subject.rpartition(".")[2]


def shard_returned(shard: int | AnyToken, node: str) -> str:
    """Publish: TaskReturned, from a node that gives an attempt back."""
    return f"cf.shard.{shard}.returned.{node}"


def shard_cancel(shard: int | AnyToken) -> str:
    """Request: CancelTask -> CancelAnswer."""
    return f"cf.shard.{shard}.cancel"


def shard_explain(shard: int | AnyToken) -> str:
    """Request: ExplainTask -> ExplainAnswer."""
    return f"cf.shard.{shard}.explain"


def shard_list(shard: int | AnyToken) -> str:
    """Request: ListTasks -> TaskList."""
    return f"cf.shard.{shard}.list"


def events(origin: str, task: str) -> str:
    """Events of a task, addressed to the controld that accepted it."""
    return f"cf.events.{origin}.{task}"


def events_to(origin: str) -> str:
    return f"cf.events.{origin}.*"


def events_of(task: str) -> str:
    return f"cf.events.*.{task}"


# Answers. Who is told the name of an inbox can answer there; nobody else knows it.

INBOX = "_INBOX."
"""What every subject for answers begins with: nothing is answered elsewhere."""
PLAIN_INBOXES = f"{INBOX}cf"
"""Inboxes of programs without a certificate."""
ALL_INBOXES = f"{INBOX}>"


def inboxes(role: str, name: str) -> str:
    """What the inboxes of one holder of a certificate begin with; it alone may listen there."""
    return f"{INBOX}{role}.{name}"


# JetStream's API.


def stream_info(stream: str) -> str:
    return f"$JS.API.STREAM.INFO.{stream}"


def stream_create(stream: str) -> str:
    return f"$JS.API.STREAM.CREATE.{stream}"


def stream_message(stream: str) -> str:
    """Request: one message, from the stream's leader, wrapped in JSON."""
    return f"$JS.API.STREAM.MSG.GET.{stream}"


def stream_messages(stream: str) -> str:
    """Request: messages as they were stored, from any replica."""
    return f"$JS.API.DIRECT.GET.{stream}"


def consumer_create(stream: str, consumer: str) -> str:
    return f"$JS.API.CONSUMER.CREATE.{stream}.{consumer}"


def consumer_delete(stream: str, consumer: str) -> str:
    return f"$JS.API.CONSUMER.DELETE.{stream}.{consumer}"


FLOW_CONTROL = "$JS.FC.>"
"""Where a consumer's server hears that its messages were taken."""
JETSTREAM_API = "$JS.API.>"
SNAPSHOTS = "$JS.SNAPSHOT.>"
"""Chunks of a stream that is restored, and receipts for chunks of one that is saved."""

# etcd keys.

EVERY_KEY = "/corefleet/"
"""What all keys begin with."""

SETTINGS = "/corefleet/settings"
CONTROLDS = "/corefleet/controlds/"
SHARDS = "/corefleet/shards/"
RACKS = "/corefleet/racks/"
NODES = "/corefleet/nodes/"
LOST = "/corefleet/lost/"
POOLS = "/corefleet/pools/"
DRAINS = "/corefleet/drains/"


def controld_key(controld: str) -> str:
    return f"{CONTROLDS}{controld}"


def shard_key(shard: int) -> str:
    return f"{SHARDS}{shard:05d}"


def rack_key(rack: str) -> str:
    return f"{RACKS}{rack}"


def node_key(node: str) -> str:
    return f"{NODES}{node}"


def lost_key(node: str) -> str:
    return f"{LOST}{node}"


def pool_key(pool: str) -> str:
    return f"{POOLS}{pool}"


def drain_key(node: str) -> str:
    return f"{DRAINS}{node}"


def name_in_key(key: str) -> str:
    """Return the last segment of an etcd key."""
    return key.rsplit("/", 1)[1]
