"""Continuous batching: which tokens the next decode call carries.

Jobs wait in order of arrival until a sequence and enough cells of the KV cache are free.
From then on a job has a part in every batch: one token when it generates, a chunk of its
prompt before that. A finished job leaves its cells behind, so that a later one whose
prompt begins alike takes them over.

Pure: `plan` says what to decode, the caller decodes and samples, `apply` takes the result.
A batch that was planned but not decoded is forgotten by planning anew.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from corefleet.errors import Exhausted, InvalidInput

MIN_SHARE = 16
"""Tokens alike from the start for which taking over cells is worth it."""

Finish = Literal["stop", "length", "cancelled", "deadline"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the library's context was made for, and how batches are cut."""

    sequences: int
    cells: int
    """Tokens that the KV cache holds, over all sequences."""
    sequence_tokens: int
    """Longest prompt with its answer."""
    batch_tokens: int
    chunk_tokens: int
    """Prompt tokens in a batch that also generates: what a step may cost the others."""
    queue: int
    share: bool = True
    """False for models whose cells cannot be cut or copied (sliding window, recurrent)."""

    def __post_init__(self) -> None:
        for name in ("sequences", "cells", "sequence_tokens", "chunk_tokens", "queue"):
            if getattr(self, name) < 1:
                raise InvalidInput(name, getattr(self, name), "1 or more")
        if self.batch_tokens <= self.sequences:
            raise InvalidInput(
                "batch_tokens", self.batch_tokens, f"more than sequences, {self.sequences}"
            )


@dataclass(frozen=True, slots=True)
class Job:
    """One generation. `deadline` is on the clock that `plan` is given."""

    key: int
    prompt: tuple[int, ...]
    max_tokens: int
    deadline: float = math.inf


@dataclass(frozen=True, slots=True)
class Keep:
    """Drop the cells of `sequence` from position `length` on."""

    sequence: int
    length: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Let `target` share the first `length` cells of `source`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Row:
    """One token of a batch; `logits` when its successor is to be sampled."""

    sequence: int
    token: int
    position: int
    logits: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """Do `moves` in order, then decode `rows`, then sample once for each of `sampling`.

    `sampling` has the jobs' keys in the order of the rows with logits. `jobs` are all
    that have a part.
    """

    moves: tuple[Keep | Copy, ...] = ()
    rows: tuple[Row, ...] = ()
    sampling: tuple[int, ...] = ()
    jobs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """A sampled token. `last`: it ends the answer and belongs to it; `end`: it does not."""

    token: int
    last: bool = False
    end: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """A job is over; `cached` of its prompt's tokens were not decoded for it."""

    key: int
    finish: Finish
    tokens_in: int
    tokens_out: int
    cached: int


@dataclass(slots=True)
class _Running:
    job: Job
    reserved: int
    cached: int
    pending: deque[int]
    """Tokens to decode: the rest of the prompt, or the one that was sampled last."""
    generated: int = 0

    @property
    def prefilling(self) -> bool:
        return self.generated == 0


@dataclass(slots=True)
class _Slot:
    index: int
    tokens: list[int] = field(default_factory=list)
    """What its cells hold."""
    running: _Running | None = None
    used_at: int = 0

    @property
    def cells(self) -> int:
        """Cells to count for it: those it may come to need, shared ones included."""
        return self.running.reserved if self.running else len(self.tokens)


class Schedule:
    """Which jobs run, which wait, and what the KV cache holds."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._slots = [_Slot(index) for index in range(limits.sequences)]
        self._waiting: deque[Job] = deque()
        self._active: list[_Slot] = []  # oldest first
        self._moves: list[Keep | Copy] = []
        self._steps = 0

    @property
    def running(self) -> int:
        """Jobs that have a sequence."""
        return len(self._active)

    @property
    def waiting(self) -> int:
        """Jobs that wait for one."""
        return len(self._waiting)

    @property
    def cells(self) -> int:
        """Cells that are held or reserved; never more than the limit."""
        return sum(slot.cells for slot in self._slots)

    def check(self, prompt_tokens: int) -> None:
        """Raise InvalidInput for a prompt that can never run, Exhausted when too many wait."""
        most = min(self.limits.sequence_tokens, self.limits.cells) - 1
        if not 1 <= prompt_tokens <= most:
            raise InvalidInput("prompt tokens", prompt_tokens, f"1 to {most} with this context")
        if len(self._waiting) >= self.limits.queue:
            raise Exhausted(f"{len(self._waiting)} generations wait already", retry_after_s=1.0)

    def submit(self, job: Job) -> None:
        """Queue `job`; raises as `check`. Its answer is cut to what the context leaves."""
        self.check(len(job.prompt))
        if job.max_tokens < 1:
            raise InvalidInput("max_tokens", job.max_tokens, "1 or more")
        self._waiting.append(job)

    def cancel(self, key: int, finish: Finish = "cancelled") -> tuple[Ended, ...]:
        """End the job `key`; nothing when it is over already."""
        for slot in self._active:
            if slot.running and slot.running.job.key == key:
                return (self._end(slot, slot.running, finish),)
        for job in self._waiting:
            if job.key == key:
                self._waiting.remove(job)
                return (Ended(key, finish, len(job.prompt), 0, 0),)
        return ()

    def expire(self, now: float) -> tuple[Ended, ...]:
        """End the jobs whose deadline has passed."""
        late = [job.key for job in self._waiting if job.deadline <= now]
        late += [
            slot.running.job.key
            for slot in self._active
            if slot.running and slot.running.job.deadline <= now
        ]
        return tuple(ended for key in late for ended in self.cancel(key, "deadline"))

    def plan(self) -> Batch:
        """Admit what fits and return the next batch; empty when nothing runs."""
        while self._waiting and self._admit(self._waiting[0]):
            self._waiting.popleft()
        rows: list[Row] = []
        sampling: list[int] = []
        jobs: list[int] = []
        for slot, running, count in self._shares():
            jobs.append(running.job.key)
            position = len(slot.tokens)
            for offset in range(count):
                wants_logits = offset + 1 == len(running.pending)
                token = running.pending[offset]
                rows.append(Row(slot.index, token, position + offset, wants_logits))
                if wants_logits:
                    sampling.append(running.job.key)
        moves, self._moves = tuple(self._moves), []
        return Batch(moves, tuple(rows), tuple(sampling), tuple(jobs))

    def apply(self, batch: Batch, samples: Mapping[int, Sample]) -> tuple[Ended, ...]:
        """Take in that `batch` was decoded, and what was sampled for each of `sampling`."""
        self._steps += 1
        for row in batch.rows:
            slot = self._slots[row.sequence]
            if slot.running:
                slot.running.pending.popleft()
            slot.tokens.append(row.token)
        ended = []
        for slot in list(self._active):
            running = slot.running
            if running is None or running.job.key not in samples:
                continue
            sample = samples[running.job.key]
            if sample.end:
                ended.append(self._end(slot, running, "stop"))
                continue
            running.generated += 1
            running.pending.append(sample.token)
            if sample.last:
                ended.append(self._end(slot, running, "stop"))
            elif len(running.job.prompt) + running.generated >= running.reserved:
                ended.append(self._end(slot, running, "length"))
        return tuple(ended)

    def overfull(self) -> int | None:
        """Give cells back when the library found no room for a batch.

        Returns the job that has to go, the youngest, when nothing idle could be dropped.
        """
        idle = [slot for slot in self._slots if slot.running is None and slot.tokens]
        for slot in idle:
            self._drop(slot, 0)
        if idle or not self._active:
            return None
        youngest = self._active[-1]
        key = youngest.running.job.key if youngest.running else None
        if key is not None:
            self.cancel(key)
            self._drop(youngest, 0)
        return key

    def _shares(self) -> list[tuple[_Slot, _Running, int]]:
        """Return who decodes how many tokens: generation first, then prompts.

        The oldest prompt gets half of what is left or more, so it ends however many come
        after it; the others share the rest, the shortest first, so that they need not
        wait for a long one.
        """
        shares: list[tuple[_Slot, _Running, int]] = []
        prompts: list[tuple[_Slot, _Running]] = []
        for slot in self._active:
            if slot.running and slot.running.prefilling:
                prompts.append((slot, slot.running))
            elif slot.running:
                shares.append((slot, slot.running, len(slot.running.pending)))
        room = self.limits.batch_tokens - len(shares)
        if shares:
            room = min(room, self.limits.chunk_tokens)
        counts = _divide(room, [len(running.pending) for _, running in prompts])
        shares += [
            (slot, running, count)
            for (slot, running), count in zip(prompts, counts, strict=True)
            if count
        ]
        return shares

    def _admit(self, job: Job) -> bool:
        free = [slot for slot in self._slots if slot.running is None]
        if not free or self._worth_waiting(job):
            return False
        source, shared = self._best_prefix(job)
        target = self._target(free, source, shared)
        reserved = min(
            len(job.prompt) + job.max_tokens, self.limits.sequence_tokens, self.limits.cells
        )
        if not self._make_room(reserved, keep=target, source=source):
            if source.running or not self._make_room(reserved, keep=source, source=source):
                return False
            target = source
        if source is target:
            self._drop(target, shared)
        else:
            self._drop(target, 0)
            if shared:
                self._moves.append(Copy(source.index, target.index, shared))
                target.tokens = list(job.prompt[:shared])
        target.running = _Running(job, reserved, shared, deque(job.prompt[shared:]))
        self._active.append(target)
        return True

    def _worth_waiting(self, job: Job) -> bool:
        """Whether a prompt that is being decoded will soon leave more cells to share."""
        if not self.limits.share:
            return False
        for slot in self._active:
            if slot.running and slot.running.prefilling:
                alike = _alike(slot.running.job.prompt, job.prompt[:-1])
                if alike - len(slot.tokens) >= MIN_SHARE:
                    return True
        return False

    def _best_prefix(self, job: Job) -> tuple[_Slot, int]:
        """Return the slot whose cells begin most like the prompt; one token is always left."""
        best, shared = self._slots[0], 0
        if self.limits.share:
            for slot in self._slots:
                alike = _alike(slot.tokens, job.prompt[:-1])
                if alike >= MIN_SHARE and alike > shared:
                    best, shared = slot, alike
        return best, shared

    def _target(self, free: list[_Slot], source: _Slot, shared: int) -> _Slot:
        """Continue in the source when the prompt goes on from it; spare it otherwise."""
        if shared and source.running is None and 2 * shared >= len(source.tokens):
            return source
        return min(
            free,
            key=lambda slot: (slot is source and shared > 0, bool(slot.tokens), slot.used_at),
        )

    def _make_room(self, cells: int, keep: _Slot, source: _Slot) -> bool:
        """Drop idle cells, the longest unused first, until `cells` more fit beside `keep`."""
        others = [slot for slot in self._slots if slot is not keep]
        excess = sum(slot.cells for slot in others) + cells - self.limits.cells
        idle = [slot for slot in others if slot.running is None and slot.tokens]
        idle.sort(key=lambda slot: (slot is source, slot.used_at))
        if excess > sum(slot.cells for slot in idle if slot is not source):
            return False
        for slot in idle:
            if excess <= 0:
                break
            excess -= slot.cells
            self._drop(slot, 0)
        return True

    def _drop(self, slot: _Slot, length: int) -> None:
        if len(slot.tokens) > length:
            self._moves.append(Keep(slot.index, length))
            del slot.tokens[length:]

    def _end(self, slot: _Slot, running: _Running, finish: Finish) -> Ended:
        slot.running = None
        slot.used_at = self._steps
        self._active.remove(slot)
        if not self.limits.share:
            self._drop(slot, 0)
        return Ended(
            running.job.key, finish, len(running.job.prompt), running.generated, running.cached
        )


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many elements the two have in common from the start."""
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def _divide(room: int, wanted: list[int]) -> list[int]:
    """Divide `room` over `wanted`: half or more to the first, the rest shortest first."""
    counts = [0] * len(wanted)
    if not wanted:
        return counts
    others = sorted(range(1, len(wanted)), key=lambda number: wanted[number])
    counts[0] = min(wanted[0], max(room - sum(wanted[1:]), (room + 1) // 2))
    room -= counts[0]
    for number in others:
        counts[number] = min(wanted[number], room)
        room -= counts[number]
    return counts
