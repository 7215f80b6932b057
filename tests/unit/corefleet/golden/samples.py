"""One fully set value of every message, and the list of all message types."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import msgspec

from corefleet.messages import links, records, wire
from corefleet.messages.links import (
    AppendSteps,
    AttemptOver,
    CancelGenerate,
    EmitEvents,
    EngineAlive,
    EnginePing,
    FinishTask,
    Generate,
    Generated,
    GenerateDone,
    GenerateFailed,
    MessageSent,
    Ping,
    ReturnTask,
    RunResumed,
    RunTask,
    SendMessage,
    StepsAppended,
    Stop,
    ToolDefinition,
    Welcome,
    WelcomeBack,
    WorkerAlive,
    WorkerHello,
    YieldTask,
)
from corefleet.messages.records import (
    ClusterSettings,
    ControldRegistration,
    DomainInfo,
    Drain,
    Ending,
    Failure,
    JournalEntry,
    LostNode,
    NodeRegistration,
    OwnerMark,
    Ownership,
    PastAttempt,
    PoolSpec,
    RequestRecord,
    ResultRecord,
    SessionHead,
    SessionState,
    Step,
    TaskRecord,
    ToolSpec,
    Turn,
)
from corefleet.messages.wire import (
    AgentPublished,
    AskOverview,
    AssignAnswer,
    AssignAnswers,
    AssignBatch,
    Assignment,
    CancelAnswer,
    CancelTask,
    CandidateLine,
    ControldOverview,
    DropAttempt,
    EventBatch,
    ExplainAnswer,
    ExplainTask,
    Heartbeat,
    HeldAttempt,
    InventoryAnswer,
    InventoryQuery,
    ListTasks,
    LoadVector,
    LossVote,
    NodeObserved,
    NodeRegistered,
    NodeView,
    ObserveNode,
    PeerSuspected,
    PoolCounts,
    PoolsChanged,
    QuotaReport,
    RackDigest,
    RegisterNode,
    SlotUse,
    SlowTask,
    StepEnded,
    SubmitAnswer,
    SubmitMessage,
    TaskFinished,
    TaskLine,
    TaskList,
    TaskPlaced,
    TaskRequeued,
    TaskReturned,
    TaskWaiting,
    TokenText,
    Verdict,
    YieldAttempt,
)

_BASES = {records.Record, wire.Message, wire.Event, links.Frame}

TASK = "3f-01j5x0c9k2m4n6p8q0r2s4t6v8"
NOW_MS = 1_700_000_000_123

_failure = Failure("tool_error", "calculator: division by zero")
_past = PastAttempt(
    1, "n1", "lost: three missed beats", domain=1, placed_ms=NOW_MS + 10, ended_ms=NOW_MS + 900,
    why="best of 8",
)  # fmt: skip
_step = Step(
    step=3,
    kind="tool",
    name="calculator",
    fingerprint=bytes(range(16)),
    result=b"\x82\xa1a\x01",
    error="slow",
    attempt=2,
    node="n2",
    started_ms=NOW_MS,
    wall_us=1500,
    cpu_us=140,
    tokens_in=201,
    tokens_out=32,
)
_turn = Turn("tool", "42", "calculator")
_state = SessionState({"seen": b"\x03"}, (Turn("user", "Zwölf mal zwölf?"), _turn))
_ending = Ending(
    state="failed",
    failure=_failure,
    result=b"\x81\xa1r\x01",
    head=b"\x81\xa1h\x01",
    head_revision=41,
    number=3,
    journaled=True,
)
_record = TaskRecord(
    task=TASK,
    pool="support",
    session="s1",
    request_id="r-1",
    input="What is zwölf times 12?",
    state="placed",
    pool_class="batch",
    kind="tool",
    tenant="acme",
    origin="c1",
    created_ms=NOW_MS,
    deadline_ms=NOW_MS + 60_000,
    max_attempts=3,
    result_ttl_s=60,
    create_seq=17,
    attempt=2,
    node="n2",
    node_epoch=5,
    domain=1,
    owner_epoch=9,
    why="home of the session",
    placed_ms=NOW_MS + 950,
    past=(_past,),
    yields=1,
    failure=_failure,
    ending=_ending,
    digest=bytes(range(4)),
    submitted_by="client/batch",
)
_head = SessionHead(
    pool="support",
    session="s1",
    version=4,
    last_task=TASK,
    home_node="n2",
    home_domain=1,
    state=_state,
)
_counts = PoolCounts(
    pool="support", queued=3, in_flight=4, placed=120, finished=110, not_admitted=6,
    home={"hit": 100, "new": 20}, requeued={"lost": 2}, waits=(0, 118, 2),
)  # fmt: skip
_result = ResultRecord(
    task=TASK,
    pool="support",
    session="s1",
    request_id="r-1",
    state="failed",
    output="144",
    failure=_failure,
    attempt=2,
    node="n2",
    domain=1,
    why="home of the session",
    placed_ms=NOW_MS + 950,
    past=(_past,),
    created_ms=NOW_MS,
    finished_ms=NOW_MS + 2000,
    steps=(_step,),
    digest=bytes(range(4)),
    tenant="acme",
    submitted_by="client/batch",
)
_tool = ToolSpec(name="pay", source="shop.tools:pay", at_most_once=True, timeout_s=5.5)
_pool = PoolSpec(
    name="support",
    agent="shop.agents:Support",
    python_path=("/srv/agents",),
    model="qwen2.5-coder-0.5b",
    prompt="You help.",
    tools=(_tool,),
    tool_choice="required_first",
    max_steps=4,
    max_tokens=64,
    temperature=0.5,
    pool_class="batch",
    kind="tool",
    labels={"disk": "nvme"},
    slots=4,
    workers=2,
    spares=0,
    max_attempts=3,
    deadline_s=30.0,
    progress_timeout_s=10.0,
    result_ttl_s=60,
    rate_per_s=100.0,
    burst=200,
    tenant_rate_per_s=10.0,
    backlog_limit=5000,
    weight=3,
    max_in_flight=400,
    max_in_flight_per_tenant=40,
    arch="aarch64",
    features=("sve",),
    accelerator="npu",
    exclusive=True,
    history_turns=8,
    worker_memory_bytes=2**31,
)
_domain = DomainInfo(domain=1, cpus="0-3,8", memory_bytes=2**33, slots={"support": 4})
_registration = NodeRegistration(
    node="n2",
    epoch=5,
    rack="r7",
    probe_address="127.0.0.1:7171",
    arch="aarch64",
    features=("asimd", "sve"),
    labels={"disk": "nvme"},
    domains=(_domain,),
    models=("qwen2.5-coder-0.5b",),
    version="0.1.0",
    started_ms=NOW_MS,
    warnings=("no cgroup v2",),
    isolation=("memory bandwidth: canary",),
    draining=True,
    accelerators={"npu": 8},
    draining_reason="heat, package 0: 9 a minute",
    draining_since_ms=NOW_MS,
)
_load = LoadVector(0.5, 0.25, 0.125, 0.0625, 0.75, 0.875, 0.375, 0.625)
_slots = SlotUse("support", 1, 8, 3)
_slow = SlowTask(TASK, 2, 12.5)
_view = NodeView(
    provisional=True,
    node="n2",
    epoch=5,
    state="suspect",
    load=_load,
    running=3,
    queued=1,
    slots=(_slots,),
    slow=(_slow,),
    beat_age_s=0.45,
)
_assignment = Assignment(record=_record, revision=18, create_seq=17, head=_head, head_revision=11)
_held = HeldAttempt(TASK, 2)
_candidate = CandidateLine(node="n2", domain=1, eligible=True, score=1.5, line="home")
_event = StepEnded(task=TASK, at_ms=NOW_MS, step=_step, summary="42")
_definition = ToolDefinition("calculator", "Computes.", {"type": "object"})

SAMPLES: list[msgspec.Struct] = [
    # records
    _failure,
    _past,
    _ending,
    _step,
    _turn,
    _state,
    _record,
    _head,
    _result,
    _tool,
    _pool,
    _domain,
    _registration,
    JournalEntry(task=TASK, attempt=2, number=1, steps=(_step,), finish=True),
    RequestRecord(request_id="r-1", task=TASK, session="s1", digest=bytes(range(8))),
    OwnerMark(shard=63, epoch=9, controld="c1"),
    ClusterSettings(shards=16, streams=2, replicas=3, max_input_bytes=1024, generation=2),
    ControldRegistration(
        controld="c1", address="127.0.0.1:7070", started_ms=NOW_MS, version="0.1.0"
    ),
    Ownership(controld="c1", epoch=9),
    LostNode(node="n1", epoch=4, by="c1", at_ms=NOW_MS, reason="three missed beats"),
    Drain(node="n1", by="ops", reason="new disks", at_ms=NOW_MS, deadline_ms=NOW_MS + 600_000),
    # wire
    _load,
    _slots,
    _slow,
    _view,
    _assignment,
    _held,
    _candidate,
    _event,
    Heartbeat(
        node="n2",
        rack="r7",
        epoch=5,
        number=77,
        sent_ms=NOW_MS,
        loop_age_s=0.01,
        restart_grace_s=5.0,
        load=_load,
        running=3,
        queued=1,
        slots=(_slots,),
        slow=(_slow,),
    ),
    RackDigest(rack="r7", controld="c1", epoch=2, number=5, nodes=(_view,)),
    Verdict(
        rack="r7",
        rack_epoch=2,
        node="n1",
        node_epoch=4,
        state="lost",
        reason="no answer",
        provisional=True,
    ),
    RegisterNode(registration=_registration),
    NodeRegistered(
        epoch=5, shards=16, streams=2, pools=(_pool,), pools_revision=3, error="old version"
    ),
    PoolsChanged(pools=(_pool,), pools_revision=3),
    AssignBatch(controld="c1", items=(_assignment,)),
    AssignAnswer(TASK, 2, False, "no free slot"),
    AssignAnswers(items=(AssignAnswer(TASK, 2, True),)),
    DropAttempt(task=TASK, attempt=2, reason="requeued"),
    YieldAttempt(task=TASK, attempt=2, reason="preempted: by an online task"),
    ObserveNode(node="n1", node_epoch=4, address="127.0.0.1:7171"),
    NodeObserved(node="n1", node_epoch=4, observer="c2", alive=True, reached=False),
    LossVote(controld="c2", number=3, unreachable=("n1",), reachable=("n2",)),
    PeerSuspected(controld="c1", by="c2"),
    _counts,
    AskOverview(asked_by="c1", number=4),
    ControldOverview(
        controld="c2",
        number=4,
        started_ms=NOW_MS,
        at_ms=NOW_MS + 5,
        shards=8,
        loop_lag_s=0.002,
        cpu_s=12.5,
        pools=(_counts,),
    ),
    QuotaReport(
        controld="c2",
        number=3,
        demand={"rate/support": 120.5},
        spend={"rate/support": 60.0},
        holders={"rate/support": "c1"},
        seen={"c1": 7},
        members="0a1b2c3d",
        grants={"rate/chat": {"c1": 12.5}},
        backlog={"support": 31},
    ),
    TaskReturned(task=TASK, attempt=2, node="n2", node_epoch=5, reason="draining"),
    InventoryQuery(shard=63, owner_epoch=9, held=(_held,)),
    InventoryAnswer(node_epoch=5, absent=(_held,)),
    CancelTask(task=TASK, reason="not wanted"),
    CancelAnswer(found=True, cancelled=True, state="cancelled"),
    ExplainTask(task=TASK),
    ExplainAnswer(found=True, chosen="n2", why="home", candidates=(_candidate,)),
    ListTasks(pool="support", session="s1", state="queued", limit=10, node="n2"),
    TaskLine(record=_record, reason="no node", state="running", asked_ms=NOW_MS),
    TaskList(tasks=(TaskLine(record=_record),), draining=True),
    SubmitMessage(
        pool="support", session="s1", request_id=f"{TASK}/3", input="hello", tenant="acme"
    ),
    SubmitAnswer(task=TASK, session="s1", duplicate=True, error="busy", retry_after_s=0.5),
    TaskWaiting(task=TASK, at_ms=NOW_MS, reason="no node serves the pool"),
    TaskPlaced(task=TASK, at_ms=NOW_MS, attempt=2, node="n2", domain=1, why="home"),
    TaskRequeued(task=TASK, at_ms=NOW_MS, attempt=2, node="n1", reason="lost"),
    TokenText(task=TASK, at_ms=NOW_MS, step=0, text="zw\u00f6lf"),
    AgentPublished(task=TASK, at_ms=NOW_MS, step=4, topic="progress", data='{"done":1}'),
    TaskFinished(task=TASK, at_ms=NOW_MS, result=_result),
    EventBatch(events=(_event, TaskFinished(task=TASK, at_ms=NOW_MS, result=_result))),
    # links
    WorkerHello(version=1, worker="w-support-d1-a", pid=4711, held=(_assignment,)),
    AppendSteps(task=TASK, attempt=2, steps=(_step,), events=(_event,)),
    FinishTask(
        task=TASK,
        attempt=2,
        output="144",
        failure=_failure,
        steps=(_step,),
        state=_state,
        events=(_event,),
    ),
    ReturnTask(task=TASK, attempt=2, reason="stopping"),
    EmitEvents(task=TASK, attempt=2, events=(TokenText(task=TASK, step=0, text="a"),)),
    SendMessage(call=7, pool="support", session="s2", request_id=f"{TASK}/4", input="hi"),
    WorkerAlive(number=9, cpu_us=1234),
    Welcome(
        node="n2",
        domain=1,
        pool=_pool,
        engine_socket="/run/e.sock",
        active=False,
        orphan_s=600.0,
    ),
    WelcomeBack(),
    RunTask(
        record=_record,
        head=_head,
        journal=(_step,),
        revision=17,
        create_seq=12,
        head_revision=11,
    ),
    RunResumed(task=TASK, attempt=2),
    StepsAppended(task=TASK, attempt=2),
    AttemptOver(task=TASK, attempt=2, outcome="dropped", reason="fenced"),
    YieldTask(task=TASK, attempt=2, reason="draining: new disks"),
    MessageSent(call=7, task=TASK, error="no such pool"),
    Ping(number=9),
    Stop(reason="replaced", grace_s=1.5),
    _definition,
    Generate(
        call=8,
        session="support/s1",
        system="You help.",
        turns=(_turn,),
        tools=(_definition,),
        tool_choice="required",
        json_schema={"type": "string"},
        max_tokens=64,
        temperature=0.5,
        seed=1,
        stream=False,
        deadline_s=2.5,
    ),
    CancelGenerate(call=8),
    EnginePing(number=3),
    Generated(call=8, text="zw\u00f6"),
    GenerateDone(
        call=8,
        text="",
        tool="calculator",
        arguments='{"expression":"12*12"}',
        finish="tool",
        tokens_in=201,
        tokens_out=32,
        cached_tokens=149,
    ),
    GenerateFailed(call=8, reason="context full", retry=True),
    EngineAlive(number=3, running=2, waiting=1, steps=1000),
]


def name_of(kind: type[Any]) -> str:
    """Return e.g. `records.TaskRecord`."""
    return f"{kind.__module__.rsplit('.', 1)[1]}.{kind.__name__}"


def message_types() -> dict[str, type[msgspec.Struct]]:
    """Return every message type of corefleet.messages by name, bases left out."""
    found = {}
    for module in (records, wire, links):
        found.update(_types_of(module))
    return found


def _types_of(module: ModuleType) -> dict[str, type[msgspec.Struct]]:
    return {
        name_of(kind): kind
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, msgspec.Struct)
        and kind.__module__ == module.__name__
        and kind not in _BASES
    }
