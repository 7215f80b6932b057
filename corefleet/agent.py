"""Agents in Python: what a user's agent is given and what it must be.

    class Greeter(Agent):
        async def run(self, turn: Turn) -> str:
            times = await turn.recall("times", 0) + 1
            await turn.remember("times", times)
            answer = await turn.infer(f"Greet me for the {times}. time: {turn.input}")
            return answer.text

An agent's program may be run again from its beginning, on another node, when a process
dies: steps that the journal holds are then answered from it instead of being done. So
`run` must ask the same when it is answered the same. It takes what differs between runs
(time, randomness, files, the network) from steps only, and waits for nothing but steps.
Steps may run in parallel with asyncio.gather, asyncio.TaskGroup and the like.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from random import Random
from typing import Any, Literal

import msgspec

from corefleet.messages.records import Turn as Message

__all__ = ["Agent", "Inference", "Message", "ToolChoice", "Turn"]

ToolChoice = Literal["auto", "required", "none"]


class Inference(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the model answered: text, or a call of `tool` with `arguments`."""

    text: str
    tool: str = ""
    arguments: dict[str, Any] = {}
    truncated: bool = False
    """The answer hit its limit of tokens."""
    tokens_in: int = 0
    tokens_out: int = 0
    cached_tokens: int = 0


class Turn(ABC):
    """One task of a session, as its agent sees it.

    Each of `infer`, `call`, `remember`, `send` and `publish` is a journaled step. Steps
    are numbered in the order in which the program comes to them. A task whose program
    asks something else on a repeated run fails (`agent_error`) and says which step.
    """

    task: str
    pool: str
    session: str
    input: str
    history: tuple[Message, ...]
    """The session's latest messages before this task, oldest first."""
    tools: tuple[str, ...]
    """Names of the tools that the pool allows."""
    exchanges: list[Message]
    """Messages between the input and the answer that the history is to keep, such as the
    calls of tools and their results: the agent appends them, `[]` at first."""

    @property
    @abstractmethod
    def step_key(self) -> str:
        """The idempotency key `<task>/<step>` that the next step will have."""

    @abstractmethod
    async def infer(
        self,
        messages: str | Sequence[Message],
        *,
        system: str | None = None,
        tools: Sequence[str] = (),
        tool_choice: ToolChoice = "auto",
        json_schema: dict[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> Inference:
        """Ask the pool's model; watchers see the text as it is generated.

        `messages` is the whole conversation, or one user message; `system` replaces the
        pool's prompt. With `tools`, names from `self.tools`, the model may call one
        (`auto`) or must (`required`): `Inference.tool` names it, nothing is called yet.
        With `json_schema` the text is JSON that it accepts.
        Raises InferFailed when the model cannot answer this, InvalidInput for a tool
        that the pool has not.
        """

    @abstractmethod
    async def call(self, tool: str, /, **arguments: Any) -> Any:
        """Call a tool of the pool; return its result as MessagePack gives it back.

        May be done again when a process died between the call and its journal entry,
        with the same idempotency key, unless the tool is `at_most_once`.
        Raises ToolFailed, with a text for the agent: not allowed, arguments that its
        schema refuses, no result in time, or an error of the tool itself.
        """

    @abstractmethod
    async def remember(self, key: str, value: Any) -> None:
        """Keep `value` in the session under `key`; committed when the task is done.

        Raises InvalidInput for a value that is not MessagePack or a session grown too large.
        """

    @abstractmethod
    async def recall(self, key: str, default: Any = None) -> Any:
        """Return what this session last remembered under `key`, this task included.

        No step: the committed state cannot change while a task of the session runs.
        """

    @abstractmethod
    async def send(self, pool: str, session: str, text: str) -> str:
        """Submit `text` to another session; return the id of the task that it became.

        Sent once however often this task is run: the request id is the step's key.
        Raises SendFailed when it is refused.
        """

    @abstractmethod
    async def publish(self, topic: str, data: Any) -> None:
        """Tell watchers of this task; `data` is anything that JSON has.

        Published once the step is journaled, at most once. Raises InvalidInput.
        """

    @abstractmethod
    def stage(self, name: str) -> AbstractContextManager[None]:
        """Measure a part of the program: `with turn.stage("plan"): ...` shows in the trace.

        For work between steps; time that a step inside takes is counted twice.
        """

    @abstractmethod
    def now(self) -> datetime:
        """When the task was accepted (UTC): the same on every run, so no step.

        For the time of day as it passes, call the tool `utc_clock`.
        """

    @abstractmethod
    def random(self) -> Random:
        """This task's generator, seeded by its id: the same numbers on every run."""


class Agent(ABC):
    """Base of agents. One instance serves all tasks of a worker, many at a time.

    What a task must know later belongs into `turn.remember`; attributes of the instance
    are a cache that may be gone at any time.
    """

    @abstractmethod
    async def run(self, turn: Turn) -> str:
        """Return the answer to `turn.input`. An exception fails the task."""
