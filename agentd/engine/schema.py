"""Bounded JSON Schema, compiled to nodes that `grammar` follows byte by byte.

What is accepted can always be finished: every limit that a schema may set is one that a
prefix of a document can be checked against. What is not supported is refused by name.
The language of the nodes is a subset of the schema's: objects are closed, enum values
are spelled in one way, numbers are of bounded length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from corefleet.errors import InvalidInput

MAX_DEPTH = 12
MAX_NODES = 512
MAX_PROPERTIES = 64
MAX_WIDTH = 32
MAX_LITERALS = 256
MAX_LITERAL_BYTES = 1024
MAX_FREE_DEPTH = 6
"""Levels of nesting where the schema leaves the value free."""
FRACTION_DIGITS = 12
"""Digits after the point of a number that has bounds."""

_UNBOUNDED = 1 << 30
_ANNOTATIONS = frozenset(
    {
        "$comment", "$defs", "$id", "$schema", "additionalProperties", "default", "definitions",
        "deprecated", "description", "example", "examples", "format", "readOnly", "title",
        "writeOnly", "contentEncoding", "contentMediaType",
    }
)  # fmt: skip
_KEYWORDS = {
    "object": frozenset({"properties", "required"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}


@dataclass(frozen=True, slots=True, eq=False)
class AnyNode:
    """Any JSON value of at most `depth` levels."""

    depth: int


@dataclass(frozen=True, slots=True, eq=False)
class LiteralNode:
    """One of these JSON texts."""

    texts: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StringNode:
    """A string of `least` to `most` characters."""

    least: int = 0
    most: int = _UNBOUNDED


@dataclass(frozen=True, slots=True, eq=False)
class NumberNode:
    """A number; bounds are in units of 10**-FRACTION_DIGITS, or of 1 for an integer."""

    integer: bool
    low: int | None = None
    high: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ArrayNode:
    """`least` to `most` items."""

    item: Node
    least: int = 0
    most: int = _UNBOUNDED


@dataclass(frozen=True, slots=True, eq=False)
class ObjectNode:
    """The named properties in any order, those in `required` all; and no others.

    `keys` are JSON texts, quotes included; bit n of `required` stands for `keys[n]`.
    """

    keys: tuple[bytes, ...]
    values: tuple[Node, ...]
    required: int


@dataclass(frozen=True, slots=True, eq=False)
class MapNode:
    """An object of any keys, whose values are all alike."""

    value: Node


@dataclass(frozen=True, slots=True, eq=False)
class UnionNode:
    """A value of any of the options."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CallNode:
    """A call of one of the tools, spelled `{"name": "<tool>", "arguments": <arguments>}`.

    `heads` are the texts up to and with the space before the arguments.
    """

    heads: tuple[bytes, ...]
    arguments: tuple[Node, ...]


Node = (
    AnyNode
    | LiteralNode
    | StringNode
    | NumberNode
    | ArrayNode
    | ObjectNode
    | MapNode
    | UnionNode
    | CallNode
)


def compile_schema(schema: object, field: str = "json_schema") -> Node:
    """Return the node of a JSON Schema; raises InvalidInput naming the place in it."""
    compiler = _Compiler(schema, field)
    node = compiler.node(schema, field, 0)
    if width(node) > MAX_WIDTH:
        raise InvalidInput(field, width(node), f"at most {MAX_WIDTH} alternatives side by side")
    return node


def compile_calls(tools: Mapping[str, object], field: str = "tools") -> CallNode:
    """Return the node of a call of one of `tools`: name -> schema of its arguments.

    Raises InvalidInput when a schema is not usable or is not one of an object.
    """
    arguments = []
    for name, schema in tools.items():
        where = f"{field}.{name}.parameters"
        node = compile_schema(schema, where)
        if isinstance(node, AnyNode):
            node = MapNode(AnyNode(MAX_FREE_DEPTH))
        if not isinstance(node, ObjectNode | MapNode):
            raise InvalidInput(where, schema, "a schema of type object")
        arguments.append(node)
    heads = tuple(call_head(name) for name in tools)
    return CallNode(heads=heads, arguments=tuple(arguments))


def call_head(name: str) -> bytes:
    """Return the text of a call of tool `name` up to its arguments."""
    return b'{"name": ' + dump(name) + b', "arguments": '


def dump(value: object) -> bytes:
    """Return the one spelling of `value` as JSON that enum and const accept."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 1.0 and 1 are one value of JSON
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def width(node: Node) -> int:
    """Return how many readings of one text can be open at once, at most."""
    if isinstance(node, UnionNode):
        return sum(width(option) for option in node.options)
    if isinstance(node, ArrayNode):
        return width(node.item)
    if isinstance(node, MapNode):
        return width(node.value)
    if isinstance(node, ObjectNode):
        return max((width(value) for value in node.values), default=1)
    if isinstance(node, CallNode):
        return max(len(node.heads), *(width(value) for value in node.arguments))
    return 1


class _Compiler:
    def __init__(self, root: object, field: str) -> None:
        self._root = root
        self._field = field
        self._nodes = 0

    def node(self, schema: object, at: str, depth: int) -> Node:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise InvalidInput(self._field, "a larger one", f"at most {MAX_NODES} subschemas")
        if depth > MAX_DEPTH:
            raise InvalidInput(at, "deeper nesting", f"at most {MAX_DEPTH} levels, no recursion")
        if schema is True:
            return AnyNode(MAX_FREE_DEPTH)
        if not isinstance(schema, dict):
            raise InvalidInput(at, schema, "a JSON Schema object")
        if "$ref" in schema:
            return self.node(self._resolve(schema["$ref"], at), at, depth + 1)
        for word in ("enum", "const"):
            if word in schema:
                return self._literals(schema, word, at)
        for word in ("anyOf", "oneOf", "allOf"):
            if word in schema:
                return self._union(schema, word, at, depth)
        kind = schema.get("type", self._guess(schema))
        if isinstance(kind, list):
            options = tuple(self._typed(schema, one, kind, at, depth) for one in kind)
            return _union_of(options, at)
        if kind is None:
            self._refuse_unknown(schema, frozenset(), at)
            return AnyNode(MAX_FREE_DEPTH)
        return self._typed(schema, kind, [kind], at, depth)

    def _resolve(self, ref: object, at: str) -> object:
        if not isinstance(ref, str) or not ref.startswith("#/"):
            raise InvalidInput(f"{at}.$ref", ref, "a reference within the schema, #/$defs/...")
        found: Any = self._root
        for part in ref[2:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or key not in found:
                raise InvalidInput(f"{at}.$ref", ref, "a reference to a part that is there")
            found = found[key]
        return found

    def _literals(self, schema: dict[str, Any], word: str, at: str) -> Node:
        self._refuse_unknown(schema, frozenset({word, "type"}), at)
        values = schema["enum"] if word == "enum" else [schema["const"]]
        if not isinstance(values, list) or not 1 <= len(values) <= MAX_LITERALS:
            raise InvalidInput(f"{at}.{word}", values, f"a list of 1 to {MAX_LITERALS} values")
        kinds = schema.get("type", list(_KEYWORDS))
        names = kinds if isinstance(kinds, list) else [kinds]
        fitting = [value for value in values if any(_is_a(value, name) for name in names)]
        texts = tuple(dict.fromkeys(dump(value) for value in fitting))
        if not texts:
            raise InvalidInput(f"{at}.{word}", values, f"a value of type {kinds}")
        if max(map(len, texts)) > MAX_LITERAL_BYTES:
            raise InvalidInput(f"{at}.{word}", values, f"values of {MAX_LITERAL_BYTES} bytes each")
        return LiteralNode(texts)

    def _union(self, schema: dict[str, Any], word: str, at: str, depth: int) -> Node:
        self._refuse_unknown(schema, frozenset({word}), at)
        parts = schema[word]
        most = 1 if word == "allOf" else MAX_WIDTH
        if not isinstance(parts, list) or not 1 <= len(parts) <= most:
            raise InvalidInput(f"{at}.{word}", parts, f"a list of 1 to {most} schemas")
        options = tuple(
            self.node(part, f"{at}.{word}[{number}]", depth + 1)
            for number, part in enumerate(parts)
        )
        if word == "oneOf":
            _require_disjoint(options, f"{at}.oneOf")
        return _union_of(options, at)

    def _guess(self, schema: dict[str, Any]) -> str | None:
        for kind in ("object", "array"):
            if _KEYWORDS[kind] & schema.keys():
                return kind
        return None

    def _typed(
        self, schema: dict[str, Any], kind: object, kinds: list[Any], at: str, depth: int
    ) -> Node:
        if not isinstance(kind, str) or kind not in _KEYWORDS:
            raise InvalidInput(f"{at}.type", kind, f"one of {', '.join(_KEYWORDS)}")
        known = frozenset({"type"}).union(*(_KEYWORDS.get(one, ()) for one in kinds))
        self._refuse_unknown(schema, known, at)
        if kind == "object":
            return self._object(schema, at, depth)
        if kind == "array":
            least, most = _span(schema, "minItems", "maxItems", at)
            return ArrayNode(
                self.node(schema.get("items", True), f"{at}.items", depth + 1), least, most
            )
        if kind == "string":
            return StringNode(*_span(schema, "minLength", "maxLength", at))
        if kind in ("number", "integer"):
            return _number(schema, kind == "integer", at)
        return LiteralNode((b"true", b"false") if kind == "boolean" else (b"null",))

    def _object(self, schema: dict[str, Any], at: str, depth: int) -> Node:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        extra = schema.get("additionalProperties", True)
        if not isinstance(properties, dict) or len(properties) > MAX_PROPERTIES:
            raise InvalidInput(
                f"{at}.properties", properties, f"an object of up to {MAX_PROPERTIES} schemas"
            )
        if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
            raise InvalidInput(f"{at}.required", required, "a list of property names")
        undeclared = [key for key in dict.fromkeys(required) if key not in properties]
        if undeclared and extra is False:
            raise InvalidInput(f"{at}.required", undeclared[0], "names that `properties` has")
        free = "additionalProperties" in schema or "properties" not in schema
        if free and not properties and not undeclared and extra is not False:
            return MapNode(self.node(extra, f"{at}.additionalProperties", depth + 1))
        names = [*properties, *undeclared]
        values = [
            self.node(properties.get(name, extra), f"{at}.properties.{name}", depth + 1)
            for name in names
        ]
        mask = sum(1 << number for number, name in enumerate(names) if name in required)
        return ObjectNode(tuple(dump(name) for name in names), tuple(values), mask)

    def _refuse_unknown(self, schema: dict[str, Any], known: frozenset[str], at: str) -> None:
        for word in schema:
            if word not in known and word not in _ANNOTATIONS:
                others = f"; here: {', '.join(sorted(known))}" if known else ""
                raise InvalidInput(
                    f"{at}.{word}", schema[word], f"no such keyword in a bounded schema{others}"
                )


def _union_of(options: tuple[Node, ...], at: str) -> Node:
    if not options:
        raise InvalidInput(f"{at}.type", [], "at least one type")
    flat: list[Node] = []
    for option in options:
        flat.extend(option.options if isinstance(option, UnionNode) else (option,))
    return flat[0] if len(flat) == 1 else UnionNode(tuple(flat))


def _span(schema: dict[str, Any], low: str, high: str, at: str) -> tuple[int, int]:
    least, most = schema.get(low, 0), schema.get(high, _UNBOUNDED)
    for word, value in ((low, least), (high, most)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InvalidInput(f"{at}.{word}", value, "a whole number from 0 on")
    if least > most:
        raise InvalidInput(f"{at}.{low}", least, f"at most {high}, {most}")
    return least, most


def _number(schema: dict[str, Any], integer: bool, at: str) -> NumberNode:
    scale = 1 if integer else 10**FRACTION_DIGITS
    lows: list[int] = []
    highs: list[int] = []
    for word, bounds, exclusive in (
        ("minimum", lows, False),
        ("exclusiveMinimum", lows, True),
        ("maximum", highs, False),
        ("exclusiveMaximum", highs, True),
    ):
        if word not in schema:
            continue
        value = schema[word]
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e15:
            raise InvalidInput(f"{at}.{word}", value, "a number between -1e15 and 1e15")
        scaled = Fraction(repr(value)) * scale
        if bounds is lows:
            bounds.append(math.floor(scaled) + 1 if exclusive else math.ceil(scaled))
        else:
            bounds.append(math.ceil(scaled) - 1 if exclusive else math.floor(scaled))
    low, high = max(lows, default=None), min(highs, default=None)
    if low is not None and high is not None and low > high:
        raise InvalidInput(f"{at}.minimum", schema.get("minimum"), "bounds with a number between")
    return NumberNode(integer, low, high)


def _is_a(value: object, kind: object) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, int):
        return kind in ("integer", "number")
    if isinstance(value, float):
        return kind == "number" or (kind == "integer" and value.is_integer())
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return kind == names.get(type(value))


def _require_disjoint(options: tuple[Node, ...], at: str) -> None:
    for number, one in enumerate(options):
        for other in options[number + 1 :]:
            if not _disjoint(one, other):
                raise InvalidInput(
                    at,
                    "overlapping schemas",
                    "alternatives told apart by type or by a required const property, or anyOf",
                )


def _disjoint(one: Node, other: Node) -> bool:
    for union, against in ((one, other), (other, one)):
        if isinstance(union, UnionNode):
            return all(_disjoint(option, against) for option in union.options)
    if _starts(one).isdisjoint(_starts(other)):
        return True
    if isinstance(one, LiteralNode) and isinstance(other, LiteralNode):
        return set(one.texts).isdisjoint(other.texts)
    if isinstance(one, ObjectNode) and isinstance(other, ObjectNode):
        for key in set(one.keys) & set(other.keys):
            mine, theirs = one.keys.index(key), other.keys.index(key)
            both = one.required >> mine & 1 and other.required >> theirs & 1
            if both and _disjoint(one.values[mine], other.values[theirs]):
                return True
    return False


def _starts(node: Node) -> frozenset[str]:
    """Kinds of JSON values that the node accepts, told apart by the first byte."""
    if isinstance(node, LiteralNode):
        return frozenset(_start(text[:1]) for text in node.texts)
    if isinstance(node, StringNode):
        return frozenset({"string"})
    if isinstance(node, NumberNode):
        return frozenset({"number"})
    if isinstance(node, ArrayNode):
        return frozenset({"array"})
    if isinstance(node, ObjectNode | MapNode | CallNode):
        return frozenset({"object"})
    return frozenset({"string", "number", "array", "object", "true", "false", "null"})


def _start(first: bytes) -> str:
    names = {
        b'"': "string",
        b"[": "array",
        b"{": "object",
        b"t": "true",
        b"f": "false",
        b"n": "null",
    }
    return names.get(first, "number")
