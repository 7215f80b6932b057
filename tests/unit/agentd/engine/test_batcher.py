"""Generations over a scripted model."""

from __future__ import annotations

import json

import pytest

from agentd.engine.batcher import Batcher, Reply
from corefleet.errors import ModelUnusable
from corefleet.messages.links import Generated, GenerateDone, GenerateFailed
from tests.unit.agentd.engine.fakes import ADD, NO_NUMBER, ScriptedModel, ask, schedule

CALL = '{"name": "add", "arguments": {"n": 12}}'


def run(batcher: Batcher, steps: int = 1000) -> list[Reply]:
    replies: list[Reply] = []
    for _ in range(steps):
        batch, late = batcher.plan(0.0)
        replies += late
        if not batch.rows:
            break
        replies += batcher.decode(batch)
    return replies


def done(replies: list[Reply]) -> dict[int, GenerateDone]:
    return {message.call: message for _, message in replies if isinstance(message, GenerateDone)}


def batcher_of(scripts: dict[str, str], sequences: int = 4, queue: int = 10) -> Batcher:
    return Batcher(ScriptedModel(scripts), schedule(sequences=sequences, queue=queue))


def test_an_answer_is_streamed_and_then_whole() -> None:
    batcher = batcher_of({"Hi": "Héllo"})
    assert batcher.generate(7, ask(1, "Hi"), 0.0) == []
    replies = run(batcher)
    assert {client for client, _ in replies} == {7}
    assert [message.text for _, message in replies if isinstance(message, Generated)] == list(
        "Héllo"
    )
    answer = done(replies)[1]
    assert (answer.text, answer.finish, answer.tokens_out) == ("Héllo", "stop", 6)
    assert not batcher.busy


def test_streaming_can_be_left_out() -> None:
    batcher = batcher_of({"Hi": "Hello"})
    batcher.generate(7, ask(1, "Hi", stream=False), 0.0)
    assert len(run(batcher)) == 1


def test_many_at_once_each_get_their_own() -> None:
    scripts = {f"question {n}.": f"answer {n}" * (n + 1) for n in range(9)}
    batcher = batcher_of(scripts)
    for n in range(9):
        batcher.generate(n % 3, ask(n, f"question {n}.", max_tokens=500), 0.0)
    replies = run(batcher)
    assert {call: one.text for call, one in done(replies).items()} == {
        n: f"answer {n}" * (n + 1) for n in range(9)
    }
    assert all(
        client == message.call % 3 for client, message in replies if isinstance(message, Generated)
    )


def test_max_tokens_ends_with_length() -> None:
    batcher = batcher_of({"Hi": "Hello"})
    batcher.generate(1, ask(1, "Hi", max_tokens=3), 0.0)
    answer = done(run(batcher))[1]
    assert (answer.text, answer.finish, answer.tokens_out) == ("Hel", "length", 3)


@pytest.mark.parametrize(
    "script", ["Certainly! The sum is:", CALL.removeprefix('{"name": "add", "arguments":')]
)
def test_a_required_call_is_made_whatever_the_model_wants(script: str) -> None:
    batcher = batcher_of({"Hi": script})
    batcher.generate(1, ask(1, "Hi", tools=(ADD,), tool_choice="required"), 0.0)
    answer = done(run(batcher))[1]
    assert (answer.finish, answer.tool, answer.text) == ("tool", "add", "")
    assert isinstance(json.loads(answer.arguments)["n"], int)


def test_a_required_call_cut_short_is_length_without_tool() -> None:
    batcher = batcher_of({"Hi": ' {"n": 123456'})
    batcher.generate(1, ask(1, "Hi", tools=(ADD,), tool_choice="required", max_tokens=9), 0.0)
    answer = done(run(batcher))[1]
    assert (answer.finish, answer.tool, answer.arguments) == ("length", "", "")


def test_auto_calls_when_the_model_opens_a_call_and_not_otherwise() -> None:
    batcher = batcher_of({"ask 1": f"So: <tool_call>\n{CALL}", "ask 2": "No need.", "ask 3": CALL})
    for call in (1, 2, 3):
        batcher.generate(1, ask(call, f"ask {call}", tools=(ADD,)), 0.0)
    answers = done(run(batcher))
    assert (answers[1].text, answers[1].tool, answers[1].arguments) == ("So: ", "add", '{"n": 12}')
    assert (answers[2].text, answers[2].tool, answers[2].finish) == ("No need.", "", "stop")
    assert (answers[3].text, answers[3].tool, answers[3].finish) == ("", "add", "tool")


def test_json_ends_at_its_end_and_is_valid() -> None:
    schema = {"properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    batcher = batcher_of({"Hi": '{"a": "z"} and so on'})
    batcher.generate(1, ask(1, "Hi", json_schema=schema), 0.0)
    answer = done(run(batcher))[1]
    assert json.loads(answer.text)["a"] in ("x", "y")
    assert answer.finish == "stop"


def test_cancelling_returns_what_there_is() -> None:
    batcher = batcher_of({"Hi": "Hello"})
    batcher.generate(1, ask(1, "Hi"), 0.0)
    run(batcher, steps=3)
    ((client, answer),) = batcher.cancel(1, 1)
    assert client == 1
    assert isinstance(answer, GenerateDone)
    assert (answer.text, answer.finish) == ("Hel", "cancelled")
    assert batcher.cancel(1, 1) == []
    assert run(batcher) == []


def test_a_deadline_counts_from_receipt() -> None:
    batcher = batcher_of({"Hi": "Hello"})
    batcher.generate(1, ask(1, "Hi", deadline_s=2.0), received=10.0)
    assert batcher.plan(11.9)[1] == []
    ((_, answer),) = batcher.plan(12.0)[1]
    assert isinstance(answer, GenerateDone)
    assert answer.finish == "deadline"


def test_a_client_that_is_gone_takes_its_generations_along() -> None:
    batcher = batcher_of({"Hi": "Hello"})
    batcher.generate(1, ask(1, "Hi"), 0.0)
    batcher.generate(2, ask(1, "Hi"), 0.0)
    run(batcher, steps=1)
    batcher.forget(1)
    assert {client for client, _ in run(batcher)} == {2}


def test_refusals_say_whether_to_try_again() -> None:
    batcher = batcher_of({"Hi": "Hello"}, queue=1)
    batcher.generate(1, ask(1, "Hi"), 0.0)
    for request, retry, reason in (
        (ask(2, "Hi"), True, "wait already"),
        (ask(1, "Hi"), False, "call"),
        (ask(3, "Hi", json_schema={"not": {}}), False, "json_schema.not"),
    ):
        ((client, failed),) = batcher.generate(1, request, 0.0)
        assert client == 1
        assert isinstance(failed, GenerateFailed)
        assert (failed.call, failed.retry) == (request.call, retry)
        assert reason in failed.reason
    run(batcher)
    for request, reason in (
        (ask(4, "x" * 6000), "prompt tokens"),
        (ask(5, "x" * 1_000_000), "prompt characters"),
        (ask(6, "Hi", max_tokens=0), "max_tokens"),
    ):
        ((_, failed),) = batcher.generate(1, request, 0.0)
        assert isinstance(failed, GenerateFailed)
        assert not failed.retry
        assert reason in failed.reason


def test_a_full_cache_costs_the_youngest_only() -> None:
    model = ScriptedModel({"one": "Hello", "two": "World"})
    batcher = Batcher(model, schedule())
    batcher.generate(1, ask(1, "one"), 0.0)
    run(batcher, steps=1)
    batcher.generate(1, ask(2, "two"), 0.0)
    run(batcher, steps=1)
    model.full = 1
    replies = run(batcher)
    (failed,) = [message for _, message in replies if isinstance(message, GenerateFailed)]
    assert (failed.call, failed.retry) == (2, True)
    assert done(replies)[1].text == "Hello"


def test_stopping_gives_everything_back() -> None:
    batcher = batcher_of({"Hi": "Hello"}, sequences=1)
    for call in range(3):
        batcher.generate(call, ask(call, "Hi"), 0.0)
    run(batcher, steps=1)
    replies = batcher.fail_all("the engine stops")
    assert [client for client, _ in replies] == [0, 1, 2]
    assert all(isinstance(one, GenerateFailed) and one.retry for _, one in replies)
    assert not batcher.busy


def test_damaged_weights_end_the_engine() -> None:
    batcher = batcher_of({"Hi": NO_NUMBER})
    batcher.generate(1, ask(1, "Hi"), 0.0)
    with pytest.raises(ModelUnusable):
        run(batcher)
