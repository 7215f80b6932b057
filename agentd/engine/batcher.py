"""Generations of many workers, one decode call at a time.

Synchronous: the decode thread tells it of requests, plans and decodes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from agentd.engine.chat import Part, render
from agentd.engine.output import Output
from agentd.engine.sampling import Vocabulary, choose
from agentd.engine.schedule import Batch, Ended, Job, Sample, Schedule
from corefleet.errors import CorefleetError, Exhausted, InvalidInput, ModelUnusable
from corefleet.messages.links import (
    EngineToWorker,
    Generate,
    Generated,
    GenerateDone,
    GenerateFailed,
)

_MAX_CHARS_A_TOKEN = 64

Caller = tuple[int, int]
"""A client's number and its own number of the call."""
Reply = tuple[int, EngineToWorker]
"""A client's number and a message for it."""


class Model(Protocol):
    """What a batcher needs of `llama.Llama`, whose docstrings hold here too."""

    @property
    def vocabulary(self) -> Vocabulary: ...
    def tokenize(self, parts: Sequence[Part]) -> tuple[int, ...]: ...
    def decode(self, batch: Batch) -> str: ...
    def logits(self, batch: Batch) -> npt.NDArray[np.float32]: ...


@dataclass(slots=True)
class _Generation:
    client: int
    request: Generate
    output: Output
    random: Any


class Batcher:
    """Runs generations over a model; every method returns what to tell the clients."""

    def __init__(self, model: Model, schedule: Schedule) -> None:
        self._model = model
        self._schedule = schedule
        self._keys = itertools.count(1)
        self._generations: dict[int, _Generation] = {}
        self._by_caller: dict[Caller, int] = {}
        self.steps = 0

    @property
    def running(self) -> int:
        """Generations that have a sequence."""
        return self._schedule.running

    @property
    def waiting(self) -> int:
        """Generations that wait for one."""
        return self._schedule.waiting

    @property
    def busy(self) -> bool:
        """Whether there is something to decode."""
        return bool(self._generations)

    def generate(self, client: int, request: Generate, received: float) -> list[Reply]:
        """Take on a request that came at `received`; a failure when it cannot be."""
        caller = (client, request.call)
        try:
            if caller in self._by_caller:
                raise InvalidInput("call", request.call, "a number that no running call has")
            parts, output = render(request)
            self._check_length(parts)
            job = Job(
                key=next(self._keys),
                prompt=self._model.tokenize(parts),
                max_tokens=request.max_tokens,
                deadline=received + request.deadline_s if request.deadline_s > 0 else math.inf,
            )
            self._schedule.submit(job)
        except (InvalidInput, Exhausted) as error:
            retry = isinstance(error, Exhausted)
            return [(client, GenerateFailed(call=request.call, reason=str(error), retry=retry))]
        random = np.random.default_rng(request.seed & (2**63 - 1))
        self._generations[job.key] = _Generation(client, request, output, random)
        self._by_caller[caller] = job.key
        return []

    def cancel(self, client: int, call: int) -> list[Reply]:
        """End a generation early; nothing when it is over already."""
        key = self._by_caller.get((client, call))
        return [] if key is None else self._finish(self._schedule.cancel(key))

    def forget(self, client: int) -> None:
        """End what a client has running; it is gone and is told nothing."""
        for caller in [caller for caller in self._by_caller if caller[0] == client]:
            self.cancel(*caller)

    def fail_all(self, reason: str) -> list[Reply]:
        """Give every generation back: the same request can succeed elsewhere or later."""
        return [
            reply
            for key in list(self._generations)
            for reply in self._fail(key, reason, retry=True)
        ]

    def plan(self, now: float) -> tuple[Batch, list[Reply]]:
        """Return the next batch to decode, and who ran out of time before it."""
        replies = self._finish(self._schedule.expire(now))
        return self._schedule.plan(), replies

    def callers(self, batch: Batch) -> frozenset[Caller]:
        """Return whose generations have a part in the batch."""
        known = (self._generations[key] for key in batch.jobs)
        return frozenset((one.client, one.request.call) for one in known)

    def decode(self, batch: Batch) -> list[Reply]:
        """Decode and sample. Raises ModelUnusable when the model turns out to be damaged."""
        result = self._model.decode(batch)
        self.steps += 1
        if result == "full":
            key = self._schedule.overfull()
            return [] if key is None else self._fail(key, "the KV cache is full", retry=True)
        if result == "interrupted":
            return []
        replies: list[Reply] = []
        samples: dict[int, Sample] = {}
        failed: dict[int, str] = {}
        rows = self._model.logits(batch) if batch.sampling else ()
        for key, row in zip(batch.sampling, rows, strict=True):
            try:
                samples[key] = self._sample(self._generations[key], row)
            except ModelUnusable:
                raise
            except CorefleetError as error:
                failed[key] = str(error)
                samples[key] = Sample(0, end=True)
        over = self._schedule.apply(batch, samples)
        for key in samples:
            replies += self._stream(key)
        for key, reason in failed.items():
            replies += self._fail(key, reason, retry=False)
        return replies + self._finish(over)

    def _sample(self, generation: _Generation, row: npt.NDArray[np.float32]) -> Sample:
        output, vocabulary = generation.output, self._model.vocabulary
        token = choose(row, vocabulary, output, generation.request.temperature, generation.random)
        if vocabulary.ends(token):
            return Sample(token, end=True)
        output.take(vocabulary.piece(token))
        return Sample(token, last=output.finished)

    def _stream(self, key: int) -> list[Reply]:
        generation = self._generations[key]
        text = generation.output.fresh()
        if not text or not generation.request.stream:
            return []
        return [(generation.client, Generated(call=generation.request.call, text=text))]

    def _finish(self, over: Sequence[Ended]) -> list[Reply]:
        replies: list[Reply] = []
        for ended in over:
            generation = self._remove(ended.key)
            if generation is None:
                continue
            outcome = generation.output.outcome(whole=ended.finish == "stop")
            done = GenerateDone(
                call=generation.request.call,
                text=outcome.text,
                tool=outcome.tool,
                arguments=outcome.arguments,
                finish="tool" if outcome.tool else ended.finish,
                tokens_in=ended.tokens_in,
                tokens_out=ended.tokens_out,
                cached_tokens=ended.cached,
            )
            replies.append((generation.client, done))
        return replies

    def _fail(self, key: int, reason: str, retry: bool) -> list[Reply]:
        self._schedule.cancel(key)
        generation = self._remove(key)
        if generation is None:
            return []
        failed = GenerateFailed(call=generation.request.call, reason=reason, retry=retry)
        return [(generation.client, failed)]

    def _remove(self, key: int) -> _Generation | None:
        generation = self._generations.pop(key, None)
        if generation is not None:
            del self._by_caller[generation.client, generation.request.call]
        return generation

    def _check_length(self, parts: Sequence[Part]) -> None:
        """Spare the tokeniser texts that cannot fit anyway, and refuse when too many wait."""
        chars = sum(len(part.text) for part in parts)
        most = self._schedule.limits.sequence_tokens * _MAX_CHARS_A_TOKEN
        if chars > most:
            raise InvalidInput("prompt characters", chars, f"at most {most} with this context")
        self._schedule.check(1)
