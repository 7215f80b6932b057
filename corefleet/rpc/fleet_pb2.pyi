from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListNodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNodesReply(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    def __init__(self, nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("node", "rack", "epoch", "state", "arch", "domains", "load", "running", "queued", "beat_age_ms", "version", "warnings", "isolation", "drain")
    NODE_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ARCH_FIELD_NUMBER: _ClassVar[int]
    DOMAINS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    BEAT_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    node: str
    rack: str
    epoch: int
    state: str
    arch: str
    domains: _containers.RepeatedCompositeFieldContainer[Domain]
    load: Load
    running: int
    queued: int
    beat_age_ms: int
    version: str
    warnings: _containers.RepeatedScalarFieldContainer[str]
    isolation: _containers.RepeatedScalarFieldContainer[str]
    drain: Drain
    def __init__(self, node: _Optional[str] = ..., rack: _Optional[str] = ..., epoch: _Optional[int] = ..., state: _Optional[str] = ..., arch: _Optional[str] = ..., domains: _Optional[_Iterable[_Union[Domain, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., running: _Optional[int] = ..., queued: _Optional[int] = ..., beat_age_ms: _Optional[int] = ..., version: _Optional[str] = ..., warnings: _Optional[_Iterable[str]] = ..., isolation: _Optional[_Iterable[str]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("node", "reason", "by", "at_ms", "deadline_ms", "waits")
    NODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    node: str
    reason: str
    by: str
    at_ms: int
    deadline_ms: int
    waits: bool
    def __init__(self, node: _Optional[str] = ..., reason: _Optional[str] = ..., by: _Optional[str] = ..., at_ms: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., waits: _Optional[bool] = ...) -> None: ...

class DrainNodeRequest(_message.Message):
    __slots__ = ("node", "reason", "by", "deadline_in_ms")
    NODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_IN_MS_FIELD_NUMBER: _ClassVar[int]
    node: str
    reason: str
    by: str
    deadline_in_ms: int
    def __init__(self, node: _Optional[str] = ..., reason: _Optional[str] = ..., by: _Optional[str] = ..., deadline_in_ms: _Optional[int] = ...) -> None: ...

class UndrainNodeRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class UndrainNodeReply(_message.Message):
    __slots__ = ("ended", "stands")
    ENDED_FIELD_NUMBER: _ClassVar[int]
    STANDS_FIELD_NUMBER: _ClassVar[int]
    ended: Drain
    stands: Drain
    def __init__(self, ended: _Optional[_Union[Drain, _Mapping]] = ..., stands: _Optional[_Union[Drain, _Mapping]] = ...) -> None: ...

class WatchDrainRequest(_message.Message):
    __slots__ = ("node", "interval_ms")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    node: str
    interval_ms: int
    def __init__(self, node: _Optional[str] = ..., interval_ms: _Optional[int] = ...) -> None: ...

class DrainProgress(_message.Message):
    __slots__ = ("node", "state", "drain", "at_ms", "left", "running", "drained", "waits_for")
    NODE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    node: str
    state: str
    drain: Drain
    at_ms: int
    left: _containers.RepeatedCompositeFieldContainer[DrainedAttempt]
    running: int
    drained: bool
    waits_for: str
    def __init__(self, node: _Optional[str] = ..., state: _Optional[str] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., at_ms: _Optional[int] = ..., left: _Optional[_Iterable[_Union[DrainedAttempt, _Mapping]]] = ..., running: _Optional[int] = ..., drained: _Optional[bool] = ..., waits_for: _Optional[str] = ...) -> None: ...

class DrainedAttempt(_message.Message):
    __slots__ = ("task", "pool", "session", "state", "attempt", "domain", "asked_ms_ago", "reason")
    TASK_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    ASKED_MS_AGO_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    task: str
    pool: str
    session: str
    state: str
    attempt: int
    domain: int
    asked_ms_ago: int
    reason: str
    def __init__(self, task: _Optional[str] = ..., pool: _Optional[str] = ..., session: _Optional[str] = ..., state: _Optional[str] = ..., attempt: _Optional[int] = ..., domain: _Optional[int] = ..., asked_ms_ago: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Domain(_message.Message):
    __slots__ = ("domain", "cpus", "memory_bytes", "slots")
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    domain: int
    cpus: str
    memory_bytes: int
    slots: _containers.RepeatedCompositeFieldContainer[Slots]
    def __init__(self, domain: _Optional[int] = ..., cpus: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., slots: _Optional[_Iterable[_Union[Slots, _Mapping]]] = ...) -> None: ...

class Slots(_message.Message):
    __slots__ = ("pool", "total", "used")
    POOL_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    pool: str
    total: int
    used: int
    def __init__(self, pool: _Optional[str] = ..., total: _Optional[int] = ..., used: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("cpu", "memory_bandwidth", "memory", "network", "storage")
    CPU_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    cpu: float
    memory_bandwidth: float
    memory: float
    network: float
    storage: float
    def __init__(self, cpu: _Optional[float] = ..., memory_bandwidth: _Optional[float] = ..., memory: _Optional[float] = ..., network: _Optional[float] = ..., storage: _Optional[float] = ...) -> None: ...

class ListPoolsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPoolsReply(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    def __init__(self, pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("name", "spec_toml", "revision", "model", "agent", "pool_class", "tools", "slots")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_TOML_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    POOL_CLASS_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    spec_toml: str
    revision: int
    model: str
    agent: str
    pool_class: str
    tools: _containers.RepeatedScalarFieldContainer[str]
    slots: int
    def __init__(self, name: _Optional[str] = ..., spec_toml: _Optional[str] = ..., revision: _Optional[int] = ..., model: _Optional[str] = ..., agent: _Optional[str] = ..., pool_class: _Optional[str] = ..., tools: _Optional[_Iterable[str]] = ..., slots: _Optional[int] = ...) -> None: ...

class ApplyPoolRequest(_message.Message):
    __slots__ = ("name", "spec_toml")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_TOML_FIELD_NUMBER: _ClassVar[int]
    name: str
    spec_toml: str
    def __init__(self, name: _Optional[str] = ..., spec_toml: _Optional[str] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("task",)
    TASK_FIELD_NUMBER: _ClassVar[int]
    task: str
    def __init__(self, task: _Optional[str] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("task", "chosen", "why", "candidates")
    TASK_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    task: str
    chosen: str
    why: str
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    def __init__(self, task: _Optional[str] = ..., chosen: _Optional[str] = ..., why: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("node", "domain", "eligible", "score", "line")
    NODE_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    ELIGIBLE_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    node: str
    domain: int
    eligible: bool
    score: float
    line: str
    def __init__(self, node: _Optional[str] = ..., domain: _Optional[int] = ..., eligible: _Optional[bool] = ..., score: _Optional[float] = ..., line: _Optional[str] = ...) -> None: ...

class ListControldsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListControldsReply(_message.Message):
    __slots__ = ("controlds",)
    CONTROLDS_FIELD_NUMBER: _ClassVar[int]
    controlds: _containers.RepeatedCompositeFieldContainer[Controld]
    def __init__(self, controlds: _Optional[_Iterable[_Union[Controld, _Mapping]]] = ...) -> None: ...

class Controld(_message.Message):
    __slots__ = ("controld", "address", "shards", "racks")
    CONTROLD_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    RACKS_FIELD_NUMBER: _ClassVar[int]
    controld: str
    address: str
    shards: _containers.RepeatedScalarFieldContainer[int]
    racks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, controld: _Optional[str] = ..., address: _Optional[str] = ..., shards: _Optional[_Iterable[int]] = ..., racks: _Optional[_Iterable[str]] = ...) -> None: ...

class OverviewRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OverviewReply(_message.Message):
    __slots__ = ("controld", "at_ms", "nodes", "controlds", "wait_bounds_s")
    CONTROLD_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    CONTROLDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_BOUNDS_S_FIELD_NUMBER: _ClassVar[int]
    controld: str
    at_ms: int
    nodes: NodesOverview
    controlds: _containers.RepeatedCompositeFieldContainer[ControldOverview]
    wait_bounds_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, controld: _Optional[str] = ..., at_ms: _Optional[int] = ..., nodes: _Optional[_Union[NodesOverview, _Mapping]] = ..., controlds: _Optional[_Iterable[_Union[ControldOverview, _Mapping]]] = ..., wait_bounds_s: _Optional[_Iterable[float]] = ...) -> None: ...

class NodesOverview(_message.Message):
    __slots__ = ("states", "slots_used", "slots_total", "balance", "pools")
    class StatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STATES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_USED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BALANCE_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    states: _containers.ScalarMap[str, int]
    slots_used: int
    slots_total: int
    balance: float
    pools: _containers.RepeatedCompositeFieldContainer[PoolPlaces]
    def __init__(self, states: _Optional[_Mapping[str, int]] = ..., slots_used: _Optional[int] = ..., slots_total: _Optional[int] = ..., balance: _Optional[float] = ..., pools: _Optional[_Iterable[_Union[PoolPlaces, _Mapping]]] = ...) -> None: ...

class PoolPlaces(_message.Message):
    __slots__ = ("pool", "nodes", "slots_used", "slots_total", "balance")
    POOL_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_USED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BALANCE_FIELD_NUMBER: _ClassVar[int]
    pool: str
    nodes: int
    slots_used: int
    slots_total: int
    balance: float
    def __init__(self, pool: _Optional[str] = ..., nodes: _Optional[int] = ..., slots_used: _Optional[int] = ..., slots_total: _Optional[int] = ..., balance: _Optional[float] = ...) -> None: ...

class ControldOverview(_message.Message):
    __slots__ = ("controld", "answered", "started_ms", "at_ms", "shards", "racks", "loop_lag_s", "cpu_s", "pools")
    CONTROLD_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    RACKS_FIELD_NUMBER: _ClassVar[int]
    LOOP_LAG_S_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    controld: str
    answered: bool
    started_ms: int
    at_ms: int
    shards: int
    racks: int
    loop_lag_s: float
    cpu_s: float
    pools: _containers.RepeatedCompositeFieldContainer[PoolCounts]
    def __init__(self, controld: _Optional[str] = ..., answered: _Optional[bool] = ..., started_ms: _Optional[int] = ..., at_ms: _Optional[int] = ..., shards: _Optional[int] = ..., racks: _Optional[int] = ..., loop_lag_s: _Optional[float] = ..., cpu_s: _Optional[float] = ..., pools: _Optional[_Iterable[_Union[PoolCounts, _Mapping]]] = ...) -> None: ...

class PoolCounts(_message.Message):
    __slots__ = ("pool", "queued", "in_flight", "placed", "finished", "not_admitted", "home", "requeued", "waits")
    class HomeEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RequeuedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    POOL_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    NOT_ADMITTED_FIELD_NUMBER: _ClassVar[int]
    HOME_FIELD_NUMBER: _ClassVar[int]
    REQUEUED_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    queued: int
    in_flight: int
    placed: int
    finished: int
    not_admitted: int
    home: _containers.ScalarMap[str, int]
    requeued: _containers.ScalarMap[str, int]
    waits: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pool: _Optional[str] = ..., queued: _Optional[int] = ..., in_flight: _Optional[int] = ..., placed: _Optional[int] = ..., finished: _Optional[int] = ..., not_admitted: _Optional[int] = ..., home: _Optional[_Mapping[str, int]] = ..., requeued: _Optional[_Mapping[str, int]] = ..., waits: _Optional[_Iterable[int]] = ...) -> None: ...
