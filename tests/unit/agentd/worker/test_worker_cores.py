"""The worker's pure parts by themselves: replay, outbox, state."""

from __future__ import annotations

import pytest

from agentd.worker.outbox import MAX_APPEND_BYTES, Outbox
from agentd.worker.replay import NonDeterministic, Replay, digest
from agentd.worker.state import MAX_HISTORY_BYTES, MAX_MEMORY_BYTES, Memory, pack, window
from agentd.worker.summary import MAX_CHARACTERS, events_of, summary
from corefleet.agent import Inference
from corefleet.codec import encode
from corefleet.errors import InvalidInput
from corefleet.messages.records import Step, StepKind, Turn
from corefleet.messages.wire import AgentPublished


def made(number: int, kind: StepKind = "tool", size: int = 0) -> Step:
    return Step(
        step=number, kind=kind, name="n", fingerprint=digest(kind, "n", number), result=b"x" * size
    )


def test_a_first_run_is_answered_by_nothing() -> None:
    replay = Replay(())
    asked = [replay.ask("tool", "n", 0), replay.ask("infer", "m", 1)]
    assert [(a.step, a.known, a.intent) for a in asked] == [(0, None, False), (1, None, False)]
    assert replay.due({0, 1}) is None
    replay.check_end()


def test_results_are_due_in_the_order_of_the_journal() -> None:
    replay = Replay([made(2), made(0, "remember"), made(1), made(0, "open")])
    assert replay.due({0, 1, 2}) == 2
    assert replay.due({1}) == 1
    replay.delivered(2)
    assert replay.due({0, 1, 2}) == 1
    replay.delivered(1)
    assert replay.due({0, 1, 2}) is None


def test_an_intent_alone_is_a_step_that_may_have_run() -> None:
    replay = Replay([made(0, "intent")])
    with pytest.raises(NonDeterministic):
        replay.ask("tool", "n", 0)
    replay = Replay([Step(step=0, kind="intent", name="n", fingerprint=digest("tool", "n", 0))])
    asked = replay.ask("tool", "n", 0)
    assert (asked.known, asked.intent) == (None, True)


def test_a_request_is_the_same_however_its_arguments_are_ordered() -> None:
    assert digest("tool", "n", {"a": 1, "b": {"x": 1, "y": 2}}) == digest(
        "tool", "n", {"b": {"y": 2, "x": 1}, "a": 1}
    )
    assert digest("tool", "n", 1) != digest("tool", "m", 1)
    assert digest("tool", "n", 1) != digest("send", "n", 1)


def test_a_long_request_is_shown_in_part() -> None:
    replay = Replay([made(0)])
    with pytest.raises(NonDeterministic) as caught:
        replay.ask("tool", "other", "y" * 5000)
    assert "step 0 was tool 'n' in attempt 0, and is now tool 'other'" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_run_that_ends_early_is_told_by_the_first_step_that_is_missing() -> None:
    replay = Replay([made(0), made(1), made(2)])
    replay.ask("tool", "n", 0)
    with pytest.raises(NonDeterministic, match="it ended before step 1"):
        replay.check_end()


def test_one_append_flies_at_a_time() -> None:
    outbox = Outbox()
    assert outbox.take() is None
    outbox.add(made(0))
    batch = outbox.take()
    assert batch is not None
    assert [step.step for step in batch.steps] == [0]
    outbox.add(made(1))
    outbox.add(made(2))
    assert outbox.take() is None
    assert (outbox.added, outbox.durable) == (3, 0)
    outbox.acknowledged()
    assert (outbox.added, outbox.durable) == (3, 1)
    batch = outbox.take()
    assert batch is not None
    assert [step.step for step in batch.steps] == [1, 2]
    outbox.acknowledged()
    assert outbox.durable == 3


def test_what_costs_nothing_to_repeat_is_not_urgent() -> None:
    outbox = Outbox()
    urgent = []
    outbox.add(made(0, "remember"), urgent=False)
    urgent.append(outbox.urgent)
    outbox.add(made(1))
    urgent.append(outbox.urgent)
    assert [step.step for step in outbox.take_rest()] == [0, 1]
    urgent.append(outbox.urgent)
    assert urgent == [False, True, False]


def test_events_make_an_append_necessary_and_leave_with_the_last_step() -> None:
    outbox = Outbox()
    event = AgentPublished(task="t", step=0, topic="x", data="1")
    outbox.add(made(0, "publish", MAX_APPEND_BYTES), event)
    outbox.add(made(1, "tool", MAX_APPEND_BYTES))
    assert outbox.must_append
    first = outbox.take()
    outbox.acknowledged()
    second = outbox.take()
    assert first is not None
    assert second is not None
    assert (len(first.steps), first.events) == (1, ())
    assert (len(second.steps), second.events) == (1, (event,))
    assert not outbox.must_append


def test_memory_reads_its_own_writes_and_keeps_the_rest() -> None:
    memory = Memory({"a": b"1", "b": b"2"})
    assert not memory.changed
    memory.write("a", b"3")
    assert (memory.read("a"), memory.read("b"), memory.read("c")) == (b"3", b"2", None)
    assert memory.merged() == {"a": b"3", "b": b"2"}


def test_memory_counts_what_is_replaced_once() -> None:
    memory = Memory({"a": b"x" * (MAX_MEMORY_BYTES - 1)})
    memory.check("a", b"y" * (MAX_MEMORY_BYTES - 1))
    memory.write("a", b"y")
    memory.check("b", b"z" * (MAX_MEMORY_BYTES - 3))
    with pytest.raises(InvalidInput, match=r"remember\('b'\)"):
        memory.check("b", b"z" * (MAX_MEMORY_BYTES - 2))


def test_the_window_keeps_the_latest_messages() -> None:
    old = [Turn("user", str(n)) for n in range(5)]
    assert [t.text for t in window(old, (Turn("user", "new"),), 3)] == ["3", "4", "new"]
    assert window(old, (), 0) == ()
    large = Turn("user", "x" * (MAX_HISTORY_BYTES - 1))
    assert [t.text for t in window([*old, large], (Turn("user", "n"),), 9)] == [large.text, "n"]


@pytest.mark.parametrize("value", [object(), 1 << 70, {1: object()}])
def test_what_message_pack_has_not_is_refused(value: object) -> None:
    with pytest.raises(InvalidInput, match="what MessagePack has"):
        pack(value)


@pytest.mark.parametrize(
    ("kind", "result", "says"),
    [
        ("infer", Inference(text="two\n words"), "two words"),
        ("infer", Inference(text="", tool="add", arguments={"a": 1}), 'add({"a":1})'),
        ("tool", {"b": [1]}, '{"b":[1]}'),
        ("tool", {1: {2: None}}, '{"1":{"2":null}}'),
        ("tool", "x" * 500, "x" * (MAX_CHARACTERS - 3) + "..."),
        ("send", "task-7", "task-7"),
    ],
)
def test_summaries(kind: StepKind, result: object, says: str) -> None:
    assert summary(Step(step=0, kind=kind, result=encode(result))) == says


def test_watchers_are_told_of_each_step_once_and_without_its_result() -> None:
    steps = (made(0, "stage"), made(1, "intent"), made(1, "tool"), made(2, "remember"))
    failed = Step(step=3, kind="tool", error="no\nluck", wall_us=5, result=b"\x01")
    events = events_of("t", (*steps[:2], steps[3], failed), 9)
    assert [(e.step.step, e.step.kind, e.summary) for e in events] == [
        (2, "remember", ""),
        (3, "tool", "no luck"),
    ]
    assert (events[1].at_ms, events[1].step.wall_us, events[1].step.result) == (9, 5, b"")
