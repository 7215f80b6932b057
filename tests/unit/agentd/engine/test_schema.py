"""Which JSON Schemas are taken, and that the others are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from agentd.engine import grammar
from agentd.engine.schema import MAX_DEPTH, MAX_NODES, compile_calls, compile_schema, width
from corefleet.errors import InvalidInput


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "string", "pattern": "a+"}, "json_schema.pattern"),
        ({"type": "number", "multipleOf": 3}, "json_schema.multipleOf"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "json_schema.properties.a.not"),
        ({"type": "array", "uniqueItems": True}, "json_schema.uniqueItems"),
        ({"type": "array", "items": {"type": "file"}}, "json_schema.items.type"),
        ({"type": []}, "json_schema.type"),
        ({"enum": []}, "json_schema.enum"),
        ({"enum": ["a"], "type": "integer"}, "json_schema.enum"),
        ({"enum": list(range(300))}, "json_schema.enum"),
        ({"const": "x" * 2000}, "json_schema.const"),
        ({"type": "string", "minLength": 5, "maxLength": 4}, "json_schema.minLength"),
        ({"type": "string", "maxLength": -1}, "json_schema.maxLength"),
        ({"type": "array", "minItems": True}, "json_schema.minItems"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "json_schema.minimum"),
        ({"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 3}, "json_schema"),
        ({"type": "number", "minimum": "0"}, "json_schema.minimum"),
        ({"type": "number", "maximum": 1e300}, "json_schema.maximum"),
        ({"type": "object", "required": "a"}, "json_schema.required"),
        ({"type": "object", "properties": []}, "json_schema.properties"),
        (
            {"properties": {}, "required": ["b"], "additionalProperties": False},
            "json_schema.required",
        ),
        ({"$ref": "https://example.org/schema"}, "json_schema.$ref"),
        ({"$ref": "#/$defs/absent"}, "json_schema.$ref"),
        ({"allOf": [{}, {}]}, "json_schema.allOf"),
        ({"anyOf": []}, "json_schema.anyOf"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "json_schema.oneOf"),
        ({"oneOf": [{"type": "object"}, {"type": "object"}]}, "json_schema.oneOf"),
        (nested(MAX_DEPTH + 1), "items"),
        ({"anyOf": [{"type": "string"}] * 33}, "json_schema.anyOf"),
        ({"anyOf": [{"anyOf": [{"type": "string"}] * 20}] * 2}, "json_schema"),
        ("string", "json_schema"),
        (False, "json_schema"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_place(schema: object, place: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        compile_schema(schema)
    assert place in caught.value.field


def test_a_recursive_schema_is_refused() -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}}
    with pytest.raises(InvalidInput, match="no recursion"):
        compile_schema({"$ref": "#/$defs/tree", "$defs": {"tree": tree}})


def test_a_schema_that_references_multiply_is_refused() -> None:
    defs: dict[str, Any] = {"d0": {"type": "null"}}
    for level in range(1, 6):
        ref = {"$ref": f"#/$defs/d{level - 1}"}
        defs[f"d{level}"] = {"type": "object", "properties": {str(n): ref for n in range(8)}}
    with pytest.raises(InvalidInput, match=f"at most {MAX_NODES} subschemas"):
        compile_schema({"$ref": "#/$defs/d5", "$defs": defs})


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"const": 1}}}, b"1", b"2"),
        ({"type": ["string", "null"]}, b"null", b"1"),
        ({"allOf": [{"type": "boolean"}], "description": "x"}, b"true", b"null"),
        ({"enum": ["a", 1, None, 2.0], "type": ["string", "number"]}, b"2", b"null"),
        ({"properties": {"a": {"const": 1}}}, b'{"a":1}', b'{"a":2}'),
        ({"properties": {}}, b"{}", b'{"a":2}'),
        ({"type": "object"}, b'{"a":{"b":[1]}}', b"[]"),
        ({"items": {"type": "null"}}, b"[null, null]", b"[1]"),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            b'{"x": 1, "y": 2}',
            b'{"x": "1"}',
        ),
        (
            {"type": "object", "required": ["a"], "additionalProperties": {"type": "integer"}},
            b'{"a": 1}',
            b"{}",
        ),
        (True, b'{"a": [1, "x", null]}', b"{1}"),
    ],
)
def test_what_is_supported_means_what_it_says(schema: Any, valid: bytes, invalid: bytes) -> None:
    node = compile_schema(schema)
    assert grammar.accepts(node, valid)
    assert not grammar.accepts(node, invalid)


def test_one_of_is_told_apart_by_a_required_const() -> None:
    def kind(name: str, required: list[str]) -> dict[str, Any]:
        return {"properties": {"kind": {"const": name}}, "required": required}

    node = compile_schema({"oneOf": [kind("a", ["kind"]), kind("b", ["kind"])]})
    assert grammar.accepts(node, b'{"kind": "b"}')
    with pytest.raises(InvalidInput, match="told apart"):
        compile_schema({"oneOf": [kind("a", ["kind"]), kind("b", [])]})


def test_width_counts_readings_that_can_be_open_at_once() -> None:
    string = {"type": "string"}
    pair = {"anyOf": [string, string]}
    assert width(compile_schema(string)) == 1
    assert width(compile_schema({"properties": {"a": pair, "b": pair}})) == 2
    assert width(compile_schema({"anyOf": [pair, {"items": pair}]})) == 4


def test_arguments_of_a_tool_are_an_object() -> None:
    with pytest.raises(InvalidInput, match="of type object") as caught:
        compile_calls({"t": {"type": "string"}})
    assert caught.value.field == "tools.t.parameters"
    assert grammar.accepts(compile_calls({"t": {}}), b'{"name": "t", "arguments": {"x": 1}}')
