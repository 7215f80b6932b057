from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TaskState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_STATE_UNSPECIFIED: _ClassVar[TaskState]
    TASK_STATE_QUEUED: _ClassVar[TaskState]
    TASK_STATE_PLACED: _ClassVar[TaskState]
    TASK_STATE_RUNNING: _ClassVar[TaskState]
    TASK_STATE_DONE: _ClassVar[TaskState]
    TASK_STATE_FAILED: _ClassVar[TaskState]
    TASK_STATE_CANCELLED: _ClassVar[TaskState]
TASK_STATE_UNSPECIFIED: TaskState
TASK_STATE_QUEUED: TaskState
TASK_STATE_PLACED: TaskState
TASK_STATE_RUNNING: TaskState
TASK_STATE_DONE: TaskState
TASK_STATE_FAILED: TaskState
TASK_STATE_CANCELLED: TaskState

class SubmitRequest(_message.Message):
    __slots__ = ("pool", "session", "request_id", "input", "deadline_ms", "kind", "follow", "tenant")
    POOL_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    pool: str
    session: str
    request_id: str
    input: bytes
    deadline_ms: int
    kind: str
    follow: bool
    tenant: str
    def __init__(self, pool: _Optional[str] = ..., session: _Optional[str] = ..., request_id: _Optional[str] = ..., input: _Optional[bytes] = ..., deadline_ms: _Optional[int] = ..., kind: _Optional[str] = ..., follow: _Optional[bool] = ..., tenant: _Optional[str] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ("task", "session", "duplicate")
    TASK_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    task: str
    session: str
    duplicate: bool
    def __init__(self, task: _Optional[str] = ..., session: _Optional[str] = ..., duplicate: _Optional[bool] = ...) -> None: ...

class SubmitBatch(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[SubmitRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[SubmitRequest, _Mapping]]] = ...) -> None: ...

class SubmitEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[SubmitEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[SubmitEvent, _Mapping]]] = ...) -> None: ...

class SubmitEvent(_message.Message):
    __slots__ = ("request_id", "accepted", "refused", "event")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    accepted: SubmitReply
    refused: Refusal
    event: TaskEvent
    def __init__(self, request_id: _Optional[str] = ..., accepted: _Optional[_Union[SubmitReply, _Mapping]] = ..., refused: _Optional[_Union[Refusal, _Mapping]] = ..., event: _Optional[_Union[TaskEvent, _Mapping]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("code", "message", "field", "retry_after_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    field: str
    retry_after_ms: int
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("task",)
    TASK_FIELD_NUMBER: _ClassVar[int]
    task: str
    def __init__(self, task: _Optional[str] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("task",)
    TASK_FIELD_NUMBER: _ClassVar[int]
    task: str
    def __init__(self, task: _Optional[str] = ...) -> None: ...

class TaskTrace(_message.Message):
    __slots__ = ("task", "attempts")
    TASK_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    task: Task
    attempts: _containers.RepeatedCompositeFieldContainer[Attempt]
    def __init__(self, task: _Optional[_Union[Task, _Mapping]] = ..., attempts: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("attempt", "node", "domain", "placed_ms", "why", "ended_ms", "cause", "reason")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    PLACED_MS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    ENDED_MS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    node: str
    domain: int
    placed_ms: int
    why: str
    ended_ms: int
    cause: str
    reason: str
    def __init__(self, attempt: _Optional[int] = ..., node: _Optional[str] = ..., domain: _Optional[int] = ..., placed_ms: _Optional[int] = ..., why: _Optional[str] = ..., ended_ms: _Optional[int] = ..., cause: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("task", "no_tokens")
    TASK_FIELD_NUMBER: _ClassVar[int]
    NO_TOKENS_FIELD_NUMBER: _ClassVar[int]
    task: str
    no_tokens: bool
    def __init__(self, task: _Optional[str] = ..., no_tokens: _Optional[bool] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("task", "reason")
    TASK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    task: str
    reason: str
    def __init__(self, task: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("pool", "session", "state", "page_size", "page_token")
    POOL_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    pool: str
    session: str
    state: TaskState
    page_size: int
    page_token: str
    def __init__(self, pool: _Optional[str] = ..., session: _Optional[str] = ..., state: _Optional[_Union[TaskState, str]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("tasks", "next_page_token")
    TASKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[Task]
    next_page_token: str
    def __init__(self, tasks: _Optional[_Iterable[_Union[Task, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("task", "pool", "session", "request_id", "state", "attempt", "node", "domain", "created_ms", "finished_ms", "output", "failure", "reason", "steps", "submitted_by")
    TASK_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_MS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_BY_FIELD_NUMBER: _ClassVar[int]
    task: str
    pool: str
    session: str
    request_id: str
    state: TaskState
    attempt: int
    node: str
    domain: int
    created_ms: int
    finished_ms: int
    output: str
    failure: Failure
    reason: str
    steps: _containers.RepeatedCompositeFieldContainer[Step]
    submitted_by: str
    def __init__(self, task: _Optional[str] = ..., pool: _Optional[str] = ..., session: _Optional[str] = ..., request_id: _Optional[str] = ..., state: _Optional[_Union[TaskState, str]] = ..., attempt: _Optional[int] = ..., node: _Optional[str] = ..., domain: _Optional[int] = ..., created_ms: _Optional[int] = ..., finished_ms: _Optional[int] = ..., output: _Optional[str] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., reason: _Optional[str] = ..., steps: _Optional[_Iterable[_Union[Step, _Mapping]]] = ..., submitted_by: _Optional[str] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("step", "kind", "name", "attempt", "node", "started_ms", "wall_us", "tokens_in", "tokens_out", "summary", "cpu_us")
    STEP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    WALL_US_FIELD_NUMBER: _ClassVar[int]
    TOKENS_IN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_OUT_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    CPU_US_FIELD_NUMBER: _ClassVar[int]
    step: int
    kind: str
    name: str
    attempt: int
    node: str
    started_ms: int
    wall_us: int
    tokens_in: int
    tokens_out: int
    summary: str
    cpu_us: int
    def __init__(self, step: _Optional[int] = ..., kind: _Optional[str] = ..., name: _Optional[str] = ..., attempt: _Optional[int] = ..., node: _Optional[str] = ..., started_ms: _Optional[int] = ..., wall_us: _Optional[int] = ..., tokens_in: _Optional[int] = ..., tokens_out: _Optional[int] = ..., summary: _Optional[str] = ..., cpu_us: _Optional[int] = ...) -> None: ...

class TaskEvent(_message.Message):
    __slots__ = ("task", "at_ms", "snapshot", "waiting", "placed", "step", "token", "published", "requeued", "finished")
    TASK_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    REQUEUED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    task: str
    at_ms: int
    snapshot: Task
    waiting: Waiting
    placed: Placed
    step: Step
    token: Token
    published: Published
    requeued: Requeued
    finished: Task
    def __init__(self, task: _Optional[str] = ..., at_ms: _Optional[int] = ..., snapshot: _Optional[_Union[Task, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., placed: _Optional[_Union[Placed, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., token: _Optional[_Union[Token, _Mapping]] = ..., published: _Optional[_Union[Published, _Mapping]] = ..., requeued: _Optional[_Union[Requeued, _Mapping]] = ..., finished: _Optional[_Union[Task, _Mapping]] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Placed(_message.Message):
    __slots__ = ("attempt", "node", "domain", "why")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    node: str
    domain: int
    why: str
    def __init__(self, attempt: _Optional[int] = ..., node: _Optional[str] = ..., domain: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("step", "text")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    step: int
    text: str
    def __init__(self, step: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class Published(_message.Message):
    __slots__ = ("step", "topic", "data")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    step: int
    topic: str
    data: str
    def __init__(self, step: _Optional[int] = ..., topic: _Optional[str] = ..., data: _Optional[str] = ...) -> None: ...

class Requeued(_message.Message):
    __slots__ = ("attempt", "node", "reason")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    node: str
    reason: str
    def __init__(self, attempt: _Optional[int] = ..., node: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...
