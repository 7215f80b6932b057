"""The agent of a pool without code: the stages of a turn.

    intake -> context -> ( infer -> select -> act -> merge )* -> infer -> select -> reply

`infer` and `act` are the steps of the model and of the tool; the others are stages of
their own in the journal, with the time that they took.
"""

from __future__ import annotations

import msgspec

from agentd.worker.state import window
from corefleet.agent import Agent, Inference, Message, ToolChoice, Turn
from corefleet.errors import InferFailed, InvalidInput, ToolFailed
from corefleet.messages.records import PoolSpec

_ANSWER_NOW = Message("user", "Answer my question in one sentence, using that result.")
"""Said when the model may call nothing more: small models go on calling otherwise."""


class DeclaredAgent(Agent):
    """Asks the model, calls the tools that it names, until it answers or may do no more.

    A model that repeats a call it has the result of is asked for its answer instead.
    """

    def __init__(self, spec: PoolSpec) -> None:
        self._spec = spec

    async def run(self, turn: Turn) -> str:
        with turn.stage("intake"):
            question = turn.input.strip()
            if not question:
                raise InvalidInput("input", turn.input, "a text that is not empty")
        with turn.stage("context"):
            asked = Message("user", question)
            messages = [*window(turn.history, (), self._spec.history_turns), asked]
        used = 0
        calls: list[Inference] = []
        repeats = False
        while True:
            choice = "none" if repeats else self._choice(turn, used)
            asking = [*messages, *turn.exchanges]
            if calls and choice == "none":
                asking.append(_ANSWER_NOW)
            answer = await turn.infer(asking, tools=turn.tools, tool_choice=choice)
            used += 1
            with turn.stage("select"):
                done = not answer.tool
                repeats = any(_same_call(answer, call) for call in calls)
            if done:
                break
            if repeats:
                continue
            calls.append(answer)
            result = await self._act(turn, answer)
            used += 1
            with turn.stage("merge"):
                called = msgspec.json.encode(answer.arguments).decode()
                turn.exchanges.append(Message("assistant", called, answer.tool))
                turn.exchanges.append(Message("tool", result, answer.tool))
        with turn.stage("reply"):
            return _reply(answer)

    def _choice(self, turn: Turn, used: int) -> ToolChoice:
        """What the model may do now: its last step is kept for an answer."""
        room = self._spec.max_steps - used
        if not turn.tools or self._spec.tool_choice == "none" or room < 3:
            return "none"
        first = used == 0 and self._spec.tool_choice == "required_first"
        return "required" if first else "auto"

    async def _act(self, turn: Turn, answer: Inference) -> str:
        try:
            result = await turn.call(answer.tool, **answer.arguments)
        except ToolFailed as error:
            return f"error: {error}"
        return result if isinstance(result, str) else msgspec.json.encode(result).decode()


def _same_call(one: Inference, other: Inference) -> bool:
    return (one.tool, one.arguments) == (other.tool, other.arguments)


def _reply(answer: Inference) -> str:
    text = answer.text.strip()
    if not text:
        raise InferFailed("the model's answer is empty")
    return text
