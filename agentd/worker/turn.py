"""The Turn that an agent is given: each step is answered by the journal, or done and journaled."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from time import thread_time_ns, time_ns
from typing import Any, NoReturn, Protocol

import msgspec

from agentd.worker.commit import Commit
from agentd.worker.engine_client import EngineGone, Generator
from agentd.worker.meter import Meter, Metered
from agentd.worker.order import Order
from agentd.worker.pool import LoadedPool
from agentd.worker.replay import Asked, NonDeterministic, Replay
from agentd.worker.state import Memory, pack
from corefleet.agent import Inference, Message, ToolChoice, Turn
from corefleet.codec import decode
from corefleet.errors import CorefleetError, InferFailed, InvalidInput, SendFailed, ToolFailed
from corefleet.ids import check_name, step_key
from corefleet.messages.links import EmitEvents, Frame, Generate, GenerateDone, MessageSent, RunTask
from corefleet.messages.records import Failure, Step, StepKind
from corefleet.messages.wire import AgentPublished, TaskEvent, TaskWaiting, TokenText

MAX_PUBLISHED_BYTES = 64 * 1024


class Services(Protocol):
    """What the worker does for its attempts."""

    @property
    def node(self) -> str:
        """The node that steps name as where they ran."""

    @property
    def engine(self) -> Generator | None:
        """None when the pool has no model."""

    def send(self, message: Frame) -> None:
        """Queue `message` for agentd."""

    async def submit(self, pool: str, session: str, request_id: str, text: str) -> MessageSent:
        """Have agentd submit a task; return its answer."""


class Ending(Protocol):
    """What a turn may ask of the attempt that it belongs to."""

    @property
    def over(self) -> bool:
        """Whether it has ended, or is about to: no step may begin."""

    def fail(self, failure: Failure) -> None:
        """End the task, whatever its agent does now."""

    def give_back(self, reason: str) -> None:
        """End the attempt so that another goes on from the journal."""


@dataclass(slots=True)
class Effect:
    """How a step ended: `result` is MessagePack, or `error` says why there is none."""

    result: bytes = b""
    error: str = ""
    tokens_in: int = 0
    tokens_out: int = 0


class LiveTurn(Turn):
    """The Turn of one attempt. All of its methods run on the event loop."""

    def __init__(
        self, run: RunTask, pool: LoadedPool, services: Services, commit: Commit, ending: Ending
    ) -> None:
        record = run.record
        self.task = record.task
        self.pool = record.pool
        self.session = record.session
        self.input = record.input
        self.history = run.head.state.history if run.head else ()
        self.tools = pool.toolbox.names
        self.exchanges: list[Message] = []
        self.memory = Memory(run.head.state.memory if run.head else {})
        self.replay = Replay(run.journal)
        self.order = Order(asyncio.get_running_loop(), self.replay, commit.flush_urgent)
        self.stop_reason = ""
        self._busy = 0
        self._parked = 0
        self._record = record
        self._loaded = pool
        self._services = services
        self._commit = commit
        self._ending = ending
        self._random: random.Random | None = None

    @property
    def step_key(self) -> str:
        return step_key(self.task, self.replay.next_step)

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
        spec = self._loaded.spec
        turns = (Message("user", messages),) if isinstance(messages, str) else tuple(messages)
        definitions = self._loaded.toolbox.definitions(tuple(tools))
        asked = self._ask(
            "infer", spec.model, (turns, system, tools, tool_choice, json_schema, max_tokens)
        )
        request = Generate(
            call=0,
            session=f"{self.pool}/{self.session}",
            system=spec.prompt if system is None else system,
            turns=turns,
            tools=definitions,
            tool_choice=tool_choice,
            json_schema=json_schema,
            max_tokens=max_tokens or spec.max_tokens,
            temperature=spec.temperature,
            seed=_seed(step_key(self.task, asked.step)),
            deadline_s=self._seconds_left(),
        )
        data = await self._do(
            asked, lambda meter: self._generate(asked, request, meter), InferFailed
        )
        return decode(data, Inference)

    async def call(self, tool: str, /, **arguments: Any) -> Any:
        asked = self._ask("tool", tool, arguments)

        async def act(meter: Meter) -> Effect:
            if asked.intent:
                self._refuse_repetition(asked)
            loaded = self._loaded.toolbox.get(tool)
            values = loaded.check(arguments)
            if loaded.at_most_once:
                intent = Step(
                    step=asked.step, kind="intent", name=tool, fingerprint=asked.fingerprint,
                    attempt=self._record.attempt, node=self._services.node,
                    started_ms=meter.started_ms,
                )  # fmt: skip
                self._commit.outbox.add(intent)
                self._commit.seen(self._commit.outbox.added)
            await self._commit.durable()
            return Effect(await loaded.run(values, step_key(self.task, asked.step), meter))

        return decode(await self._do(asked, act, ToolFailed), object)

    async def remember(self, key: str, value: Any) -> None:
        data = pack(value, f"value of remember({key!r})")
        self.memory.check(key, data)
        asked = self._ask("remember", key, data)
        self.memory.write(key, data)
        if asked.known is None:
            self._note(asked, Meter())

    async def recall(self, key: str, default: Any = None) -> Any:
        data = self.memory.read(key)
        return default if data is None else decode(data, object)

    async def send(self, pool: str, session: str, text: str) -> str:
        check_name("pool", pool)
        check_name("session", session)
        asked = self._ask("send", f"{pool}/{session}", text)

        async def act(meter: Meter) -> Effect:
            await self._commit.durable()
            key = step_key(self.task, asked.step)
            sent = await self._services.submit(pool, session, key, text)
            if sent.error:
                raise SendFailed(f"to {pool}/{session}: {sent.error}")
            return Effect(pack(sent.task))

        return decode(await self._do(asked, act, SendFailed), str)

    async def publish(self, topic: str, data: Any) -> None:
        try:
            text = msgspec.json.encode(data).decode()
        except (TypeError, UnicodeDecodeError) as error:
            raise InvalidInput("data of publish", data, f"what JSON has ({error})") from error
        if len(text) > MAX_PUBLISHED_BYTES:
            raise InvalidInput("data of publish", text, f"at most {MAX_PUBLISHED_BYTES} bytes")
        asked = self._ask("publish", topic, text)
        if asked.known is None:
            event = AgentPublished(
                task=self.task, at_ms=_now_ms(), step=asked.step, topic=topic, data=text
            )
            self._note(asked, Meter(), event)
            self.order.moved()

    def stage(self, name: str) -> AbstractContextManager[None]:
        return Stage(name, self._stage_ended)

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._record.created_ms / 1000, UTC)

    def random(self) -> random.Random:
        if self._random is None:
            self._random = random.Random(_seed(self.task))
        return self._random

    def stop(self, reason: str) -> None:
        """Begin no step any more; give the attempt back once none is being done."""
        self.stop_reason = self.stop_reason or reason
        if not self._busy:
            self._ending.give_back(self.stop_reason)

    def _ask(self, kind: StepKind, name: str, request: Any) -> Asked:
        if self._ending.over:
            raise asyncio.CancelledError(f"{self.task} has ended")
        self.order.asked()
        try:
            return self.replay.ask(kind, name, request)
        except NonDeterministic as error:
            self._end_task(Failure("agent_error", str(error)))

    def _end_task(self, failure: Failure) -> NoReturn:
        self._ending.fail(failure)
        raise asyncio.CancelledError(failure.message)

    async def _do(
        self,
        asked: Asked,
        act: Callable[[Meter], Coroutine[Any, Any, Effect]],
        failed: type[CorefleetError],
    ) -> bytes:
        """Return the result of a step that takes time; raises `failed` for its error.

        Both come from the journal if it has them. The caller decodes what the journal
        holds in any case, so that no run sees another value than the next.
        """
        known = asked.known
        if known is None:
            known = await self._perform(asked, act, failed)
            place = self._commit.outbox.added
            await self.order.ended()
            self._commit.seen(place)
        else:
            await self.order.replayed(asked.step)
        if known.error:
            raise failed(known.error)
        return known.result

    async def _perform(
        self,
        asked: Asked,
        act: Callable[[Meter], Coroutine[Any, Any, Effect]],
        failed: type[CorefleetError],
    ) -> Step:
        if self.stop_reason:
            await self._park()
        meter = Meter()
        self._busy += 1
        try:
            effect = await act(meter)
        except failed as error:
            effect = Effect(error=str(error) or type(error).__name__)
        except EngineGone as error:
            self.stop_reason = self.stop_reason or str(error)
            effect = None
        finally:
            self._busy -= 1
            self._return_if_stopped()
        if effect is None:
            await self._park()
        return self._add(asked, meter, effect)

    async def _park(self) -> NoReturn:
        """Wait for the end of the attempt: it begins no step any more."""
        self._parked += 1
        self._return_if_stopped()
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nothing sets a parked step's future")

    def _return_if_stopped(self) -> None:
        if self.stop_reason and self._parked and not self._busy:
            self._ending.give_back(self.stop_reason)

    def _note(self, asked: Asked, meter: Meter, event: TaskEvent | None = None) -> None:
        """Journal a step that takes no time: with an event soon, else with the next append."""
        self._add(asked, meter, Effect(), event, urgent=event is not None)
        self._commit.seen(self._commit.outbox.added)

    def _add(
        self,
        asked: Asked,
        meter: Meter,
        effect: Effect,
        event: TaskEvent | None = None,
        urgent: bool = True,
    ) -> Step:
        step = Step(
            step=asked.step,
            kind=asked.kind,
            name=asked.name,
            fingerprint=asked.fingerprint,
            result=effect.result,
            error=effect.error,
            attempt=self._record.attempt,
            node=self._services.node,
            started_ms=meter.started_ms,
            wall_us=meter.wall_us,
            cpu_us=meter.cpu_us,
            tokens_in=effect.tokens_in,
            tokens_out=effect.tokens_out,
        )
        self._commit.outbox.add(step, event, urgent)
        return step

    async def _generate(self, asked: Asked, request: Generate, meter: Meter) -> Effect:
        engine = self._services.engine
        if engine is None:
            raise InferFailed(f"pool {self.pool} has no model")

        def heard(text: str) -> None:
            self._emit(TokenText(task=self.task, at_ms=_now_ms(), step=asked.step, text=text))

        def waits(reason: str) -> None:
            self._emit(TaskWaiting(task=self.task, at_ms=_now_ms(), reason=reason))

        generation = Metered(engine.generate(request, heard, waits), meter)
        done = generation.result if generation.begin() else await generation
        return Effect(
            pack(_inference(done)),
            tokens_in=done.tokens_in,
            tokens_out=done.tokens_out,
        )

    def _emit(self, event: TaskEvent) -> None:
        self._services.send(
            EmitEvents(task=self.task, attempt=self._record.attempt, events=(event,))
        )

    def _refuse_repetition(self, asked: Asked) -> NoReturn:
        self._end_task(
            Failure(
                "tool_at_most_once",
                f"step {asked.step}: tool {asked.name!r} was begun by an earlier attempt, "
                "which cannot tell whether it ran; it may not be called twice",
            )
        )

    def _stage_ended(self, name: str, meter: Meter) -> None:
        asked = self._ask("stage", name, None)
        if asked.known is None:
            self._note(asked, meter)

    def _seconds_left(self) -> float:
        if not self._record.deadline_ms:
            return 0.0
        return max(0.001, (self._record.deadline_ms - _now_ms()) / 1000)


class Stage(AbstractContextManager[None]):
    """A measured part of the program; reports itself when it ends well."""

    __slots__ = ("_cpu_began", "_ended", "_meter", "_name")

    def __init__(self, name: str, ended: Callable[[str, Meter], None]) -> None:
        self._name = name
        self._ended = ended

    def __enter__(self) -> None:
        self._meter = Meter()
        self._cpu_began = thread_time_ns()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._meter.cpu_ns = thread_time_ns() - self._cpu_began
            self._ended(self._name, self._meter)


def _inference(done: GenerateDone) -> Inference:
    """Raises InferFailed for an answer that is none."""
    if done.finish in {"deadline", "cancelled"}:
        raise InferFailed(f"no answer: {done.finish}")
    arguments: dict[str, Any] = {}
    if done.tool:
        try:
            arguments = msgspec.json.decode(done.arguments, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise InferFailed(f"arguments for {done.tool} are no JSON object: {error}") from error
    return Inference(
        text=done.text,
        tool=done.tool,
        arguments=arguments,
        truncated=done.finish == "length",
        tokens_in=done.tokens_in,
        tokens_out=done.tokens_out,
        cached_tokens=done.cached_tokens,
    )


def _seed(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def _now_ms() -> int:
    return time_ns() // 1_000_000
