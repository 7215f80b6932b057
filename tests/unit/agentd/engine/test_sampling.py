"""Which token is chosen, with and without a grammar."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from agentd.engine.output import Output
from agentd.engine.sampling import CANDIDATES, choose
from agentd.engine.schema import compile_schema
from corefleet.errors import CorefleetError, ModelUnusable
from tests.unit.agentd.engine.fakes import END, MARK, SIZE, Bytes

VOCABULARY = Bytes()


def row(*likely: int) -> npt.NDArray[np.float32]:
    values = np.linspace(-1, 0, SIZE, dtype=np.float32)
    for rank, token in enumerate(likely):
        values[token] = 100 - 10 * rank
    return values


def greedy(values: npt.NDArray[np.float32], output: Output) -> int:
    return choose(values, VOCABULARY, output, 0.0, None)


def constant(value: object) -> Output:
    return Output("json", compile_schema({"const": value}))


def test_the_likeliest_token_is_taken_when_nothing_forbids_it() -> None:
    assert greedy(row(65, 66), Output("text")) == 65
    assert greedy(row(END, 66), Output("text")) == END


def test_a_forbidden_token_gives_way_to_the_likeliest_allowed() -> None:
    output = Output("json", compile_schema({"enum": ["x", 1]}))
    assert greedy(row(65, END, ord("1"), ord('"')), output) == ord("1")


def test_a_token_far_down_is_found() -> None:
    output = constant("x")
    output.take(b'"')
    values = row()
    values[ord("x")] = -50
    assert np.argsort(-values).tolist().index(ord("x")) > CANDIDATES
    assert greedy(values, output) == ord("x")


def test_only_an_end_may_follow_a_complete_number() -> None:
    output = Output("json", compile_schema({"enum": [1, 12]}))
    output.take(b"1")
    values = row(65)
    values[[MARK, END]] = -50, -40
    assert greedy(values, output) == ord("2")
    values[ord("2")] = -60
    assert greedy(values, output) == END


def test_an_end_is_no_choice_before_the_document_is_whole() -> None:
    output = constant("x")
    output.take(b'"')
    assert greedy(row(END, MARK, ord('"')), output) == ord("x")


def test_a_vocabulary_that_lacks_the_next_byte_is_a_clear_error() -> None:
    class Letters(Bytes):
        def piece(self, token: int) -> bytes:
            return b"a" if token < 256 else b""

    with pytest.raises(CorefleetError, match="no token"):
        choose(row(), Letters(), constant("x"), 0.0, None)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_logits_that_are_no_numbers_condemn_the_model(temperature: float, bad: str) -> None:
    values = np.full(SIZE, np.float32(bad))
    with pytest.raises(ModelUnusable, match="damaged"):
        choose(values, VOCABULARY, Output("text"), temperature, np.random.default_rng(0))


def test_drawing_follows_the_seed_and_the_weights() -> None:
    values = row()
    values[[65, 66, 67]] = 5.0, 4.0, -50.0

    def draws(seed: int, temperature: float) -> list[int]:
        random = np.random.default_rng(seed)
        return [choose(values, VOCABULARY, Output("text"), temperature, random) for _ in range(300)]

    assert draws(1, 1.0) == draws(1, 1.0)
    assert draws(1, 1.0) != draws(2, 1.0)
    drawn = draws(3, 0.5)
    assert drawn.count(65) > drawn.count(66) > 0
    assert 67 not in drawn
    assert set(draws(4, 0.01)) == {65}


def test_drawing_keeps_to_the_grammar() -> None:
    output = Output("json", compile_schema({"enum": ["x", 1]}))
    values = row(65, ord("1"))
    values[65], values[ord("1")], values[ord('"')] = 5, 4, 4
    random = np.random.default_rng(0)
    drawn = {choose(values, VOCABULARY, output, 1.0, random) for _ in range(50)}
    assert drawn == {ord("1"), ord('"')}
    assert choose(row(65, 66), VOCABULARY, constant("é"), 1.0, random) == ord('"')
