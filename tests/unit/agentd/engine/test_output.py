"""What is streamed, what is held back, and what an answer turns out to be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd.engine.output import Outcome, Output
from agentd.engine.schema import compile_calls, compile_schema

ADD = compile_calls({"add": {"properties": {"n": {"type": "integer"}}, "required": ["n"]}})
CALL = b'{"name": "add", "arguments": {"n": 12}}'


def write(output: Output, *pieces: bytes) -> list[str]:
    streamed = []
    for piece in pieces:
        assert output.allows(piece), piece
        output.take(piece)
        streamed.append(output.fresh())
    return streamed


def test_a_character_is_streamed_when_it_is_whole() -> None:
    output = Output("text")
    data = "aé😀b".encode()
    assert write(output, *[data[at : at + 1] for at in range(len(data))]) == [
        "a", "", "é", "", "", "", "😀", "b",
    ]  # fmt: skip
    assert output.outcome(whole=True) == Outcome("aé😀b")


@given(st.text(max_size=30), st.lists(st.integers(0, 60), max_size=5), st.booleans())
def test_what_is_streamed_is_what_was_written(text: str, cuts: list[int], auto: bool) -> None:
    data = text.encode()
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    output = Output("auto", ADD) if auto else Output("text")
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    streamed = write(output, *pieces)
    outcome = output.outcome(whole=True)
    assert outcome.text == text
    assert text.startswith("".join(streamed))


def test_a_character_cut_short_is_left_out() -> None:
    output = Output("text")
    write(output, b"ab", "é".encode()[:1])
    assert output.outcome(whole=False).text == "ab"


def test_bytes_that_are_no_text_are_replaced() -> None:
    output = Output("text")
    assert write(output, b"a\xff", b"b") == ["a\ufffd", "b"]


def test_json_streams_and_is_finished_at_its_last_brace() -> None:
    output = Output("json", compile_schema({"properties": {"a": {"type": "string"}}}))
    assert not output.allows(b"Sure")
    assert not output.allows_end()
    assert write(output, b'{"a"', b': "x', b'"', b"}") == ['{"a"', ': "x', '"', "}"]
    assert output.finished
    assert not output.allows(b"\n")
    assert output.outcome(whole=True) == Outcome('{"a": "x"}')


def test_a_required_call_is_not_streamed() -> None:
    output = Output("call", ADD, b'{"name": "')
    assert not output.allows(b"sub")
    assert write(output, b'add", ', b'"arguments": {"n": 12', b"}}") == ["", "", ""]
    assert output.finished
    assert output.outcome(whole=True) == Outcome("", "add", '{"n": 12}')


def test_a_call_cut_short_is_no_call() -> None:
    output = Output("call", ADD, b'{"name": "')
    write(output, b'add", "arguments": {"n": 1')
    assert output.outcome(whole=False) == Outcome("")


def test_auto_streams_text_and_enforces_the_call_that_follows() -> None:
    output = Output("auto", ADD)
    assert write(output, b"I add ", b"< it: <tool", b"_call>") == ["I add ", "< it: ", ""]
    assert not output.free
    assert not output.allows(b"\nadd")
    assert not output.allows_end()
    assert write(output, b"\n", CALL) == ["", ""]
    assert output.finished
    assert output.outcome(whole=True) == Outcome("I add < it: ", "add", '{"n": 12}')


def test_a_piece_that_opens_a_call_has_to_go_on_as_one() -> None:
    output = Output("auto", ADD)
    write(output, b"<tool_ca")
    assert not output.allows(b"ll>x")
    assert output.allows(b'll>\n{"na')
    assert output.allows(b"lls>")


def test_text_held_back_as_a_possible_mark_comes_out_in_the_end() -> None:
    output = Output("auto", ADD)
    assert write(output, b"a <tool_") == ["a "]
    assert output.outcome(whole=True).text == "a <tool_"


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        b"```json\n" + CALL + b"\n```",
        b"```\n" + CALL + b"\n```",
        b'{\n  "arguments": {"n": 12},\n  "name": "add"\n}',
        CALL + b"\n</tool_call>",
    ],
)
def test_a_call_without_marks_is_a_call(text: bytes) -> None:
    output = Output("auto", ADD)
    assert write(output, text[:9], text[9:]) == ["", ""]
    assert output.outcome(whole=True) == Outcome("", "add", '{"n": 12}')


@pytest.mark.parametrize(
    "text",
    [
        b'{"name": "add", "arguments": {"n": "12"}}',
        b'{"name": "sub", "arguments": {"n": 12}}',
        b'{"name": ["add"], "arguments": {"n": 12}}',
        b'{"name": "add"}',
        b"[1]",
        b"{",
        CALL + b" and more",
        b"Call " + CALL,
    ],
)
def test_what_is_no_valid_call_stays_text(text: bytes) -> None:
    output = Output("auto", ADD)
    write(output, text)
    assert output.outcome(whole=True) == Outcome(text.decode())


def test_a_bare_call_cut_short_stays_text() -> None:
    output = Output("auto", ADD)
    write(output, CALL)
    assert output.outcome(whole=False) == Outcome(CALL.decode())


def test_marks_mean_nothing_without_tools() -> None:
    output = Output("text")
    assert write(output, b"<tool_call>", CALL) == ["<tool_call>", CALL.decode()]
    assert output.outcome(whole=True).tool == ""


def test_a_piece_without_text_goes_nowhere() -> None:
    assert not Output("text").allows(b"")
