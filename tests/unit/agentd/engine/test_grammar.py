"""The grammar: prefixes of valid documents are taken, everything else is not."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentd.engine import grammar
from agentd.engine.schema import MAX_WIDTH, Node, compile_calls, compile_schema, dump
from corefleet.errors import InvalidInput

_TEXTS = st.text(max_size=6)
_BOUNDS = st.integers(-2000, 2000) | st.decimals(-50, 50, places=2).map(float)


def _leaves() -> st.SearchStrategy[dict[str, Any]]:
    lengths = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(sorted)
    limits = st.tuples(_BOUNDS, _BOUNDS).map(sorted)
    return st.one_of(
        st.sampled_from([{"type": kind} for kind in ("string", "integer", "number", "null")]),
        lengths.map(lambda two: {"type": "string", "minLength": two[0], "maxLength": two[1]}),
        limits.map(lambda two: {"type": "number", "minimum": two[0], "maximum": two[1]}),
        limits.map(lambda two: {"type": "integer", "minimum": two[0], "maximum": two[1]}),
        limits.map(lambda two: {"type": "number", "exclusiveMinimum": two[0]}),
        limits.map(lambda two: {"type": "integer", "exclusiveMaximum": two[1]}),
        st.lists(_TEXTS | st.integers() | st.booleans() | st.none(), min_size=1, max_size=4).map(
            lambda values: {"enum": values}
        ),
        st.just({"type": "boolean"}),
        st.just({}),
    )


def _combined(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def closed(properties: dict[str, Any], chance: int) -> dict[str, Any]:
        required = [key for number, key in enumerate(properties) if chance >> number & 1]
        return {"type": "object", "properties": properties, "required": required}

    counts = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(sorted)
    return st.one_of(
        st.builds(closed, st.dictionaries(_TEXTS, inner, max_size=4), st.integers(0, 15)),
        st.builds(
            lambda item, two: {
                "type": "array",
                "items": item,
                "minItems": two[0],
                "maxItems": two[1],
            },
            inner,
            counts,
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
        inner.map(lambda value: {"type": "object", "additionalProperties": value}),
    )


SCHEMAS = st.recursive(_leaves(), _combined, max_leaves=8)


def compiled(schema: Any) -> Node:
    try:
        return compile_schema(schema)
    except InvalidInput:
        assume(False)
        raise


def walk(node: Node, rng: random.Random) -> bytes:
    """Write a document a byte at a time: at random first, then towards the end."""
    state, text = grammar.start(node), bytearray()
    wander = rng.randrange(40)
    while state != grammar.COMPLETE:
        choices = sorted(grammar.next_bytes(state))
        if grammar.can_end(state) and (len(text) > wander or not choices):
            break
        assert choices, f"dead end after {bytes(text)!r}"
        closing = [byte for byte in b'"}]' if byte in choices]
        if len(text) > wander or rng.random() < 0.3:
            choices = (
                closing[:1] or [byte for byte in choices if byte not in b" \t\n\r\\,."] or choices
            )
        byte = rng.choice(choices)
        text.append(byte)
        state = grammar.advance(state, bytes((byte,)))
        assert state
        assert len(state) <= MAX_WIDTH
        assert len(text) < 600, f"no end in sight: {bytes(text)!r}"
    return bytes(text)


@settings(max_examples=100)
@given(SCHEMAS, st.integers(0, 2**32))
def test_whatever_is_written_ends_as_a_valid_document(schema: Any, seed: int) -> None:
    text = walk(compiled(schema), random.Random(seed))
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@settings(max_examples=100)
@given(SCHEMAS, st.integers(0, 2**32), st.data())
def test_a_token_is_taken_as_its_bytes_are(schema: Any, seed: int, data: st.DataObject) -> None:
    node = compiled(schema)
    text = walk(node, random.Random(seed))
    cut = data.draw(st.integers(0, len(text)))
    state = grammar.advance(grammar.start(node), text[:cut])
    assert grammar.advance(state, text[cut:]) == grammar.advance(grammar.start(node), text)
    other = data.draw(st.binary(min_size=1, max_size=4))
    one_by_one = state
    for byte in other:
        one_by_one = grammar.advance(one_by_one, bytes((byte,)))
    assert grammar.advance(state, other) == one_by_one


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**15), 10**15) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(depth, inner)) if inner else isinstance(value, dict | list)


@given(_VALUES, st.sampled_from([None, 2]), st.booleans())
def test_every_json_document_fits_the_free_schema(
    value: Any, indent: int | None, ascii: bool
) -> None:
    assume(depth(value) <= 4)
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    assume(
        "\\ud" not in text
        or "\\ud8" in text
        or "\\ud9" in text
        or "\\uda" in text
        or "\\udb" in text
    )
    assert grammar.accepts(compile_schema({}), text.encode())


STRING = compile_schema({"type": "string"})


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        (rb'"\u00e9\n\"\\\/"', True),
        (rb'"\ud83d\ude00"', True),
        (rb'"\uD83D\uDE00"', True),
        (rb'"\ud83d"', False),
        (rb'"\ud83dx"', False),
        (rb'"\ud83d\n"', False),
        (rb'"\ud83d\u0041"', False),
        (rb'"\ud83d\ud83d"', False),
        (rb'"\ude00"', False),
        (rb'"\ud7ff\ue000"', True),
        (rb'"\x41"', False),
        (rb'"\u12g4"', False),
        (b'"tab\t"', False),
        (b'"\x7f"', True),
        ("'é'".replace("'", '"').encode(), True),
        ("'\U0001f600\ud7ff\ue000\uffff'".replace("'", '"').encode(), True),
        (b'"\xc3"', False),
        (b'"\xc0\x80"', False),
        (b'"\xe0\x80\x80"', False),
        (b'"\xed\xa0\x80"', False),
        (b'"\xf0\x80\x80\x80"', False),
        (b'"\xf4\x90\x80\x80"', False),
        (b'"\xf5\x80\x80\x80"', False),
        (b'"\x80"', False),
        (b'"open', False),
        (b'""x', False),
    ],
)
def test_strings_are_what_json_calls_strings(text: bytes, valid: bool) -> None:
    assert grammar.accepts(STRING, text) is valid


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {},
            ["0", "-0", "-1.5", "1e9", "1.25E-07", "123456789012345678"],
            ["01", "1.", ".5", "+1", "-", "1e", "1e999", "1234567890123456789"],
        ),
        ({"minimum": 0}, ["0", "0.5", "17"], ["-1", "-0.1", "1e3"]),
        ({"exclusiveMinimum": 0}, ["0.1", "0.000000000001", "1"], ["0", "0.0", "0.0000000000001"]),
        ({"minimum": 0.1, "maximum": 0.3}, ["0.1", "0.2", "0.30"], ["0", "0.4", "1", "0.31"]),
        ({"minimum": -5, "maximum": -2}, ["-5", "-2.0", "-3.25"], ["-1", "-5.1", "3", "-6"]),
        ({"minimum": 95, "maximum": 120}, ["95", "100", "120.0"], ["9", "94", "121", "200"]),
    ],
)
def test_numbers_keep_their_bounds(schema: Any, good: list[str], bad: list[str]) -> None:
    node = compile_schema({"type": "number", **schema})
    assert [text for text in good if not grammar.accepts(node, text.encode())] == []
    assert [text for text in bad if grammar.accepts(node, text.encode())] == []


def test_a_bounded_integer_goes_on_only_towards_its_bounds() -> None:
    node = compile_schema({"type": "integer", "minimum": 95, "maximum": 120})
    firsts = grammar.next_bytes(grammar.start(node)) - set(b" \t\n\r")
    assert firsts == set(b"19")
    assert grammar.next_bytes(grammar.advance(grammar.start(node), b"9")) == set(b"56789")
    assert grammar.next_bytes(grammar.advance(grammar.start(node), b"12")) == set(b"0")


def test_a_number_at_the_top_may_end_but_need_not() -> None:
    node = compile_schema({"type": "integer"})
    state = grammar.advance(grammar.start(node), b"12")
    assert grammar.can_end(state)
    assert state != grammar.COMPLETE
    assert grammar.advance(state, b" ") == ()


def test_literals_of_which_one_begins_another() -> None:
    node = compile_schema({"type": "array", "items": {"enum": [1, 12, "a", "ab"]}})
    assert grammar.accepts(node, b'[1, 12,"a", "ab"]')
    assert not grammar.accepts(node, b"[2]")
    assert not grammar.accepts(node, b'["abc"]')


def test_keys_come_once_and_in_any_order() -> None:
    schema = {"properties": {"a": {"const": 1}, "ab": {"const": 2}, "ü\n": {}}, "required": ["a"]}
    node = compile_schema(schema)
    assert grammar.accepts(node, b'{"ab": 2, "a": 1}')
    assert grammar.accepts(node, '{"ü\\n": [], "a": 1}'.encode())
    for text in (
        b'{"ab": 2}',
        b'{"a": 1, "a": 1}',
        b'{"a": 1,}',
        b'{"abc": 1}',
        b"{,}",
        b'{"a" 1}',
    ):
        assert not grammar.accepts(node, text)
    state = grammar.advance(grammar.start(node), b'{"a":1,"ab":2,"' + "ü".encode() + b'\\n":0')
    assert ord(",") not in grammar.next_bytes(state)


def test_white_space_is_bounded() -> None:
    node = compile_schema({"items": {}})
    assert grammar.accepts(node, b"[" + b" " * grammar.MAX_SPACE + b"1]")
    assert not grammar.accepts(node, b"[" + b" " * (grammar.MAX_SPACE + 1) + b"1]")
    assert not grammar.accepts(node, b"[] ")


def test_nesting_is_bounded_where_the_schema_is_free() -> None:
    node = compile_schema({})
    assert grammar.accepts(node, b"[" * 6 + b"]" * 6)
    assert not grammar.accepts(node, b"[" * 7 + b"]" * 7)


def test_a_call_is_of_a_tool_that_is_there_with_its_own_arguments() -> None:
    node = compile_calls(
        {
            "add": {"properties": {"n": {"type": "integer"}}, "required": ["n"]},
            "add_text": {"properties": {"t": {"type": "string"}}, "required": ["t"]},
            'odd"\n': {"properties": {}},
        }
    )
    assert grammar.accepts(node, b'\n{"name": "add", "arguments": {"n": 1}}')
    assert grammar.accepts(node, b'{"name": "add_text", "arguments": {"t": "1"}}')
    assert grammar.accepts(node, b'{"name": ' + dump('odd"\n') + b', "arguments": {}}')
    assert not grammar.accepts(node, b'{"name": "add", "arguments": {"t": "1"}}')
    assert not grammar.accepts(node, b'{"name": "sub", "arguments": {}}')
    assert not grammar.accepts(node, b'{"name": "add", "arguments": {"n": 1}')
