"""The batcher's rules: the budget holds, nobody starves, cells are accounted for."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentd.engine.schedule import (
    MIN_SHARE,
    Batch,
    Copy,
    Ended,
    Job,
    Keep,
    Limits,
    Sample,
    Schedule,
)
from corefleet.errors import Exhausted, InvalidInput


class Cache:
    """What a KV cache does with a batch; complains where the library would."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.cells: list[list[int]] = [[] for _ in range(limits.sequences)]

    def decode(self, batch: Batch) -> None:
        for move in batch.moves:
            if isinstance(move, Keep):
                del self.cells[move.sequence][move.length :]
            else:
                assert self.cells[move.target] == [], "copied over cells that are in use"
                assert len(self.cells[move.source]) >= move.length
                self.cells[move.target] = self.cells[move.source][: move.length]
        assert len(batch.rows) <= self.limits.batch_tokens
        for row in batch.rows:
            assert row.position == len(self.cells[row.sequence])
            self.cells[row.sequence].append(row.token)
        assert sum(map(len, self.cells)) <= self.limits.cells
        assert len(batch.sampling) == sum(row.logits for row in batch.rows)


class Bench:
    """A schedule over a cache, with answers that a seed decides."""

    def __init__(self, limits: Limits, seed: int = 0) -> None:
        self.limits = limits
        self.schedule = Schedule(limits)
        self.cache = Cache(limits)
        self.jobs: dict[int, Job] = {}
        self.answers: dict[int, list[int]] = {}
        self.ended: dict[int, Ended] = {}
        self.rng = random.Random(seed)
        self.endings = 0.0
        self.steps = 0

    def submit(
        self, key: int, prompt: tuple[int, ...], max_tokens: int = 4, deadline: float = math.inf
    ) -> None:
        job = Job(key, prompt, max_tokens, deadline)
        self.schedule.submit(job)
        self.jobs[key] = job
        self.answers[key] = []

    def note(self, ended: tuple[Ended, ...]) -> None:
        for one in ended:
            assert one.key not in self.ended
            self.ended[one.key] = one

    def step(self) -> Batch:
        batch = self.schedule.plan()
        self.cache.decode(batch)
        for key, row in zip(batch.sampling, [row for row in batch.rows if row.logits], strict=True):
            whole = [*self.jobs[key].prompt, *self.answers[key]]
            assert self.cache.cells[row.sequence] == whole, "the model sees another text"
        samples = {key: self.sample(key) for key in batch.sampling}
        self.note(self.schedule.apply(batch, samples))
        assert self.schedule.cells <= self.limits.cells
        self.steps += 1
        return batch

    def sample(self, key: int) -> Sample:
        if self.rng.random() < self.endings:
            return Sample(0, end=True)
        token = self.rng.randrange(1000, 2000)
        self.answers[key].append(token)
        return Sample(token, last=self.rng.random() < self.endings)

    def run(self, most: int = 10_000) -> None:
        while len(self.ended) < len(self.jobs):
            assert self.steps < most, "somebody starves"
            batch = self.step()
            assert batch.rows, "nothing to do, though jobs wait"


def limits(**changes: int | bool) -> Limits:
    values: dict[str, int | bool] = {
        "sequences": 4, "cells": 400, "sequence_tokens": 400, "batch_tokens": 32,
        "chunk_tokens": 16, "queue": 1000, **changes,
    }  # fmt: skip
    return Limits(**values)  # type: ignore[arg-type]  # bool only for share


def prompt(length: int, start: int = 0) -> tuple[int, ...]:
    return tuple(range(start, start + length))


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Limits, list[tuple[int, tuple[int, ...], int]], int, float]:
    sequences = draw(st.integers(1, 5))
    cells = draw(st.integers(40, 300))
    chosen = limits(
        sequences=sequences,
        cells=cells,
        sequence_tokens=draw(st.integers(20, cells)),
        batch_tokens=draw(st.integers(sequences + 1, 64)),
        chunk_tokens=draw(st.integers(1, 64)),
        share=draw(st.booleans()),
    )
    jobs = draw(
        st.lists(
            st.tuples(
                st.integers(0, 30),  # the step that it comes at
                st.builds(
                    lambda head, common, own: (prompt(common, head * 100) + prompt(own, 500))[
                        : chosen.sequence_tokens - 1
                    ],
                    st.integers(0, 1),
                    st.integers(0, 60),
                    st.integers(1, 60),
                ),
                st.integers(1, 40),
            ),
            max_size=15,
        )
    )
    return chosen, jobs, draw(st.integers(0, 2**16)), draw(st.sampled_from([0.0, 0.1]))


@settings(max_examples=80)
@given(workloads())
def test_every_job_ends_within_the_limits(
    workload: tuple[Limits, list[tuple[int, tuple[int, ...], int]], int, float],
) -> None:
    chosen, jobs, seed, endings = workload
    bench = Bench(chosen, seed)
    bench.endings = endings
    coming = deque(sorted(enumerate(jobs), key=lambda job: job[1][0]))
    while coming:
        key, (_, tokens, most) = coming.popleft()
        bench.submit(key, tokens, most)
        if coming and coming[0][1][0] > bench.steps:
            bench.step()
    bench.run()
    for key, ended in bench.ended.items():
        job = bench.jobs[key]
        room = min(job.max_tokens, chosen.sequence_tokens - len(job.prompt))
        assert ended.tokens_in == len(job.prompt)
        assert ended.tokens_out == len(bench.answers[key]) <= room
        assert ended.cached < len(job.prompt)
        assert chosen.share or ended.cached == 0
        if ended.finish == "length":
            assert ended.tokens_out == room
    assert bench.schedule.running == bench.schedule.waiting == 0


@settings(max_examples=50)
@given(workloads(), st.data())
def test_cancelling_and_interrupting_anywhere_keeps_the_books(
    workload: tuple[Limits, list[tuple[int, tuple[int, ...], int]], int, float], data: st.DataObject
) -> None:
    chosen, jobs, seed, _ = workload
    bench = Bench(chosen, seed)
    for key, (_, tokens, most) in enumerate(jobs):
        bench.submit(key, tokens, most)
    for _ in range(20):
        what = data.draw(st.sampled_from(["step", "cancel", "interrupt"]))
        if what == "step":
            bench.step()
        elif what == "cancel" and jobs:
            key = data.draw(st.integers(0, len(jobs) - 1))
            bench.note(bench.schedule.cancel(key))
            assert bench.ended[key].finish in ("cancelled", "length")
        elif what == "interrupt":
            planned = bench.schedule.plan()
            bench.cache.decode(Batch(moves=planned.moves))
    bench.run()


def test_generation_goes_on_while_a_long_prompt_is_read() -> None:
    bench = Bench(limits(cells=2000, sequence_tokens=2000, batch_tokens=64, chunk_tokens=16))
    bench.submit(1, prompt(4), max_tokens=100)
    bench.step()
    bench.submit(2, prompt(300, 500), max_tokens=4)
    while not bench.answers[2]:
        batch = bench.step()
        assert 1 in batch.sampling
        assert sum(row.sequence == batch.rows[-1].sequence for row in batch.rows) <= 16
    assert len(bench.answers[1]) >= 300 // 16


def test_a_prompt_alone_gets_the_whole_batch() -> None:
    bench = Bench(limits(batch_tokens=64, chunk_tokens=8))
    bench.submit(1, prompt(200))
    assert len(bench.step().rows) == 64


def test_a_short_prompt_passes_a_long_one_that_still_goes_on() -> None:
    bench = Bench(limits(cells=2000, sequence_tokens=2000))
    bench.submit(1, prompt(600))
    bench.submit(2, prompt(20, 900), max_tokens=1)
    for _ in range(2):
        batch = bench.step()
        long = [row for row in batch.rows if row.sequence == batch.rows[0].sequence]
        assert len(long) >= 16
    assert 2 in bench.ended
    assert not bench.answers[1]


def test_jobs_join_and_leave_while_others_run() -> None:
    bench = Bench(limits())
    bench.submit(1, prompt(5), max_tokens=10)
    bench.step()
    bench.submit(2, prompt(5, 50), max_tokens=3)
    assert set(bench.step().jobs) == {1, 2}
    bench.step()
    bench.step()
    assert set(bench.ended) == {2}
    assert set(bench.step().jobs) == {1}


def test_a_job_waits_for_cells_and_in_order() -> None:
    bench = Bench(limits(cells=100, sequence_tokens=100))
    bench.submit(1, prompt(50), max_tokens=20)
    bench.submit(2, prompt(50, 100), max_tokens=20)
    bench.submit(3, prompt(5, 200), max_tokens=2)
    bench.step()
    assert (bench.schedule.running, bench.schedule.waiting) == (1, 2)
    bench.run()
    assert list(bench.ended) == [1, 3, 2]


def test_a_conversation_goes_on_in_its_own_cells() -> None:
    bench = Bench(limits())
    bench.submit(1, prompt(40), max_tokens=4)
    bench.run()
    again = (*prompt(40), *bench.answers[1], *prompt(10, 300))
    bench.submit(2, again)
    batch = bench.step()
    assert batch.moves == ()
    assert len(batch.rows) == len(again) - 43  # the last answer's token was not decoded
    bench.run()
    assert bench.ended[2].cached == 43


def test_a_common_beginning_is_copied_and_its_owner_spared() -> None:
    bench = Bench(limits())
    bench.submit(1, prompt(100), max_tokens=2)
    bench.run()
    bench.submit(2, (*prompt(30), *prompt(20, 300)), max_tokens=2)
    moves = bench.step().moves
    assert moves == (Copy(0, 1, 30),)
    bench.run()
    bench.submit(3, prompt(101), max_tokens=2)
    bench.run()
    assert (bench.ended[2].cached, bench.ended[3].cached) == (30, 100)


def test_prompts_that_begin_alike_wait_for_the_first_of_them() -> None:
    bench = Bench(limits())
    for key in range(4):
        bench.submit(key, (*prompt(60), *prompt(5, 100 * key + 100)), max_tokens=8)
    bench.run()
    assert [bench.ended[key].cached for key in range(4)] == [0, 60, 60, 60]


def test_the_same_prompt_again_decodes_one_token() -> None:
    bench = Bench(limits())
    for key in range(2):
        bench.submit(key, prompt(50), max_tokens=3)
        bench.run()
    assert bench.ended[1].cached == 49


def test_little_in_common_is_not_shared() -> None:
    bench = Bench(limits())
    bench.submit(1, prompt(MIN_SHARE - 1) + (900,) * 20)
    bench.run()
    bench.submit(2, prompt(MIN_SHARE - 1) + (800,) * 20)
    bench.run()
    assert bench.ended[2].cached == 0


def test_the_longest_unused_cells_go_first() -> None:
    bench = Bench(limits(cells=200, sequence_tokens=200, sequences=3))
    for key in (1, 2, 3):
        bench.submit(key, prompt(50, key * 200), max_tokens=2)
        bench.run()
    bench.submit(4, prompt(52, 600), max_tokens=60)
    bench.submit(5, prompt(52, 400), max_tokens=2)
    bench.run()
    assert bench.ended[4].cached == 50
    assert bench.ended[5].cached == 50


def test_a_beginning_too_large_to_copy_is_taken_over() -> None:
    bench = Bench(limits(cells=100, sequence_tokens=100))
    bench.submit(1, prompt(80), max_tokens=2)
    bench.run()
    bench.submit(2, (*prompt(30), *prompt(30, 300)), max_tokens=2)
    bench.run()
    assert bench.ended[2].cached == 30


def test_deadlines_end_those_who_run_and_those_who_wait() -> None:
    bench = Bench(limits(sequences=1))
    bench.submit(1, prompt(5), max_tokens=50, deadline=10.0)
    bench.submit(2, prompt(5, 20), deadline=5.0)
    bench.submit(3, prompt(5, 40))
    bench.step()
    assert bench.schedule.expire(4.9) == ()
    late = bench.schedule.expire(5.0)
    assert [(one.key, one.finish, one.tokens_out) for one in late] == [(2, "deadline", 0)]
    late += bench.schedule.expire(11.0)
    bench.note(late)
    assert late[1].tokens_out == 1
    bench.run()
    assert bench.ended[3].finish == "length"


def test_a_full_cache_gives_idle_cells_back_before_a_job() -> None:
    bench = Bench(limits())
    bench.submit(1, prompt(20), max_tokens=2)
    bench.run()
    bench.submit(2, prompt(20, 100), max_tokens=9)
    bench.submit(3, prompt(20, 200), max_tokens=9)
    bench.step()
    assert bench.schedule.overfull() is None
    assert bench.schedule.overfull() == 3
    assert Keep(0, 0) in bench.schedule.plan().moves
    assert bench.schedule.running == 1


def test_what_can_never_run_is_refused() -> None:
    schedule = Schedule(limits(cells=60, sequence_tokens=50, queue=1))
    with pytest.raises(InvalidInput, match="1 to 49"):
        schedule.submit(Job(1, prompt(50), 4))
    with pytest.raises(InvalidInput, match="prompt tokens"):
        schedule.submit(Job(1, (), 4))
    with pytest.raises(InvalidInput, match="max_tokens"):
        schedule.submit(Job(1, prompt(3), 0))
    schedule.submit(Job(1, prompt(49), 4))
    with pytest.raises(Exhausted, match="1 generations wait"):
        schedule.submit(Job(2, prompt(3), 4))


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"batch_tokens": 4}, "batch_tokens"), ({"cells": 0}, "cells"), ({"queue": 0}, "queue")],
)
def test_impossible_limits_are_refused(changes: Mapping[str, int], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        limits(**changes)
    assert caught.value.field == field
