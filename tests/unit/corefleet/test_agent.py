"""The public face of agents."""

from __future__ import annotations

import inspect

import pytest

from corefleet.agent import Agent, Inference, Message, Turn
from corefleet.codec import decode, encode


def test_an_agent_must_have_run() -> None:
    class Idle(Agent):
        pass

    with pytest.raises(TypeError, match="run"):
        Idle()  # type: ignore[abstract]


def test_an_inference_is_kept_as_message_pack() -> None:
    answer = Inference(text="t", tool="add", arguments={"a": [1, "x"]}, tokens_out=3)
    assert decode(encode(answer), Inference) == answer


def test_messages_are_those_of_the_sessions_history() -> None:
    assert Message("user", "hi").role == "user"


def test_everything_that_an_agent_can_ask_says_what_it_does() -> None:
    for name, member in inspect.getmembers(Turn):
        if not name.startswith("_"):
            assert inspect.getdoc(member), f"Turn.{name} has no docstring"
