"""Following a JSON document byte by byte, against a compiled schema.

A state is the tuple of readings that are still open, each a stack of frames (a linked
list of pairs, innermost first). No reading left: the text is no prefix of a valid
document. The empty stack: the document is complete. States are values: trying a token
costs nothing to undo.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from agentd.engine.schema import (
    FRACTION_DIGITS,
    MAX_FREE_DEPTH,
    AnyNode,
    ArrayNode,
    CallNode,
    LiteralNode,
    MapNode,
    Node,
    NumberNode,
    StringNode,
    UnionNode,
)

Stack = tuple[Any, ...]
"""() or (frame, rest); a frame is (handler, its fields...)."""
State = tuple[Stack, ...]

COMPLETE: State = ((),)
MAX_SPACE = 24
"""Bytes of white space in one place."""
MAX_INTEGER_DIGITS = 18

_SPACE = frozenset(b" \t\n\r")
_PLAIN = re.compile(rb"[ !#-\[\]-~]*")
_ESCAPES = frozenset(b'"\\/bfnrt')
_HEX = frozenset(b"0123456789abcdefABCDEF")
_INTEGER = rb"-?(?:0|[1-9][0-9]{0,%d})" % (MAX_INTEGER_DIGITS - 1)
_COMPLETE = {
    True: re.compile(_INTEGER),
    False: re.compile(_INTEGER + rb"(?:\.[0-9]{1,%d})?(?:[eE][+-]?[0-9]{1,2})?" % FRACTION_DIGITS),
}
_PREFIX = {
    True: re.compile(rb"-|" + _INTEGER),
    False: re.compile(
        rb"-|" + _INTEGER + rb"(?:\.[0-9]{0,%d})?|" % FRACTION_DIGITS
        + _INTEGER + rb"(?:\.[0-9]{1,%d})?[eE][+-]?[0-9]{0,2}" % FRACTION_DIGITS
    ),
}  # fmt: skip

_FREE_MAPS = [MapNode(AnyNode(depth - 1)) for depth in range(MAX_FREE_DEPTH + 1)]
_FREE_ARRAYS = [ArrayNode(AnyNode(depth - 1)) for depth in range(MAX_FREE_DEPTH + 1)]
_FREE_STRING = StringNode()
_FREE_NUMBER = NumberNode(integer=False)
_FREE_WORDS = LiteralNode((b"true", b"false", b"null"))


def start(node: Node) -> State:
    """Return the state before a document of `node`."""
    return (((_value, node, 0), ()),)


def advance(state: State, data: bytes) -> State:
    """Return the state after `data`; () when no valid document goes on so."""
    at, end = 0, len(data)
    while at < end and state:
        if len(state) == 1 and state[0] and state[0][0][0] is _string:
            state, at = _skip_plain(state, data, at)
            if at == end:
                break
        state = _step_all(state, data[at])
        at += 1
    return state


def can_end(state: State) -> bool:
    """Return whether the text so far is a valid document."""
    return any(not stack or (not stack[1] and _is_whole(stack[0])) for stack in state)


def accepts(node: Node, text: bytes) -> bool:
    """Return whether `text` is one valid document of `node`."""
    return can_end(advance(start(node), text))


def next_bytes(state: State) -> frozenset[int]:
    """Return the bytes that the text can go on with."""
    return frozenset(byte for byte in range(256) if _step_all(state, byte))


def _step_all(state: State, byte: int) -> State:
    if len(state) == 1:
        return tuple(_step(state[0], byte))
    after: dict[Stack, None] = {}
    for stack in state:
        after.update(dict.fromkeys(_step(stack, byte)))
    return tuple(after)


def _step(stack: Stack, byte: int) -> list[Stack]:
    if not stack:
        return []
    frame, rest = stack
    handler: Callable[[Stack, Stack, int], list[Stack]] = frame[0]
    return handler(frame, rest, byte)


def _value(frame: Stack, rest: Stack, byte: int) -> list[Stack]:
    """(_value, node, space): a value begins here."""
    _, node, space = frame
    if byte in _SPACE:
        return [((_value, node, space + 1), rest)] if space < MAX_SPACE else []
    return _begin(node, rest, byte)


def _begin(node: Node, rest: Stack, byte: int) -> list[Stack]:
    if isinstance(node, UnionNode):
        return [stack for option in node.options for stack in _begin(option, rest, byte)]
    if isinstance(node, AnyNode):
        return _begin_any(node.depth, rest, byte)
    if isinstance(node, StringNode):
        return [((_string, node.least, node.most, 0, ()), rest)] if byte == 0x22 else []
    if isinstance(node, NumberNode):
        return _number((_number, node, b""), rest, byte)
    if isinstance(node, LiteralNode):
        return _literal((_literal, node.texts, 0), rest, byte)
    if isinstance(node, ArrayNode):
        return [((_array, node, 0, False, 0), rest)] if byte == 0x5B else []
    if isinstance(node, CallNode):
        return _head((_head, node, 0, (1 << len(node.heads)) - 1), rest, byte)
    if byte != 0x7B:
        return []
    if isinstance(node, MapNode):
        return [((_map, node, 0, 0), rest)]
    return [((_object, node, 0, 0, 0), rest)]


def _begin_any(depth: int, rest: Stack, byte: int) -> list[Stack]:
    if byte == 0x22:
        return _begin(_FREE_STRING, rest, byte)
    if byte in b"-0123456789":
        return _begin(_FREE_NUMBER, rest, byte)
    if byte == 0x7B and depth > 0:
        return _begin(_FREE_MAPS[depth], rest, byte)
    if byte == 0x5B and depth > 0:
        return _begin(_FREE_ARRAYS[depth], rest, byte)
    return _begin(_FREE_WORDS, rest, byte)


def _literal(frame: Stack, rest: Stack, byte: int) -> list[Stack]:
    """(_literal, texts, position): within one of the texts, alike up to the position."""
    _, texts, at = frame
    going = tuple(text for text in texts if len(text) > at and text[at] == byte)
    if not going:
        return _step(rest, byte) if at and _is_whole(frame) else []
    if len(going) == 1 and len(going[0]) == at + 1:
        return [rest]
    return [((_literal, going, at + 1), rest)]


def _number(frame: Stack, rest: Stack, byte: int) -> list[Stack]:
    """(_number, node, text): within a number; it ends with the byte after it."""
    _, node, text = frame
    longer = text + bytes((byte,))
    if number_goes_on(node, longer):
        return [((_number, node, longer), rest)]
    return _step(rest, byte) if number_ends(node, text) else []


def number_ends(node: NumberNode, text: bytes) -> bool:
    """Return whether `text` is a number of `node`."""
    if not _COMPLETE[node.integer].fullmatch(text):
        return False
    if node.low is None and node.high is None:
        return True
    value, _ = _scaled(node, text)
    value = -value if text.startswith(b"-") else value
    return _meets(node, value, value)


def number_goes_on(node: NumberNode, text: bytes) -> bool:
    """Return whether `text` is a number of `node` or can become one."""
    if not _PREFIX[node.integer].fullmatch(text):
        return False
    if node.low is None and node.high is None:
        return True
    if b"e" in text.lower():
        return False
    if text == b"-":
        return node.low is None or node.low < 0
    value, span = _scaled(node, text)
    digits = text.removeprefix(b"-")
    spans = [(value, value + span - 1)]
    if b"." not in text and digits != b"0":
        spans += [
            (value * 10**more, (value + span) * 10**more - 1)
            for more in range(1, MAX_INTEGER_DIGITS - len(digits) + 1)
        ]
    if text.startswith(b"-"):
        spans = [(-high, -low) for low, high in spans]
    return any(_meets(node, low, high) for low, high in spans)


def _scaled(node: NumberNode, text: bytes) -> tuple[int, int]:
    """Return the magnitude of `text` in the node's units, and how many its next digits span."""
    whole, _, fraction = text.removeprefix(b"-").partition(b".")
    if node.integer:
        return int(whole), 1
    span = 10 ** (FRACTION_DIGITS - len(fraction))
    return int(whole + fraction) * span, span


def _meets(node: NumberNode, low: int, high: int) -> bool:
    return (node.high is None or low <= node.high) and (node.low is None or high >= node.low)


def _string(frame: Stack, rest: Stack, byte: int) -> list[Stack]:
    """(_string, least, most, characters, mode): after the opening quote.

    Modes: () between characters, else what is expected next; see `_string_inner`.
    """
    _, least, most, count, mode = frame
    if mode:
        after = _string_inner(mode, byte)
        if after is None:
            return []
        done = after == ()
        return [((_string, least, most, count + done, after), rest)]
    if byte == 0x22:
        return [rest] if count >= least else []
    if count >= most or byte < 0x20:
        return []
    if byte == 0x5C:
        return [((_string, least, most, count, ("escape",)), rest)]
    if byte < 0x80:
        return [((_string, least, most, count + 1, ()), rest)]
    lead = _utf8_lead(byte)
    return [((_string, least, most, count, lead), rest)] if lead else []


def _string_inner(mode: Stack, byte: int) -> Stack | None:
    """Return the mode after `byte` within one character; None when it may not follow."""
    kind = mode[0]
    if kind == "utf8":
        _, left, low, high = mode
        if not low <= byte <= high:
            return None
        return ("utf8", left - 1, 0x80, 0xBF) if left > 1 else ()
    if kind == "escape":
        if byte == 0x75:
            return ("hex", b"", False)
        return () if byte in _ESCAPES else None
    if kind == "hex":
        return _hex_digit(mode[1], mode[2], byte)
    if kind == "pair":
        return ("pair-u",) if byte == 0x5C else None
    return ("hex", b"", True) if byte == 0x75 else None


def _hex_digit(digits: bytes, second: bool, byte: int) -> Stack | None:
    r"""Follow \uXXXX; surrogates come in pairs only, high before low."""
    if byte not in _HEX:
        return None
    digits += bytes((byte,))
    surrogate = digits[:1] in (b"d", b"D")
    low = surrogate and digits[1:2].lower() in (b"c", b"d", b"e", b"f")
    high = surrogate and digits[1:2].lower() in (b"8", b"9", b"a", b"b")
    may_be_low = surrogate and (low or len(digits) == 1)
    if (second and not may_be_low) or (low and not second):
        return None
    if len(digits) < 4:
        return ("hex", digits, second)
    return ("pair",) if high else ()


def _utf8_lead(byte: int) -> Stack:
    """Return the mode after the first byte of a character of several; () for a bad one."""
    if 0xC2 <= byte <= 0xDF:
        return ("utf8", 1, 0x80, 0xBF)
    if 0xE0 <= byte <= 0xEF:
        return ("utf8", 2, 0xA0 if byte == 0xE0 else 0x80, 0x9F if byte == 0xED else 0xBF)
    if 0xF0 <= byte <= 0xF4:
        return ("utf8", 3, 0x90 if byte == 0xF0 else 0x80, 0x8F if byte == 0xF4 else 0xBF)
    return ()


def _skip_plain(state: State, data: bytes, at: int) -> tuple[State, int]:
    """Take the run of plain ASCII characters at `at` in one go: most of a string is that."""
    (frame, rest) = state[0]
    _, least, most, count, mode = frame
    if mode:
        return state, at
    found = _PLAIN.match(data, at)
    run = min(found.end() - at if found else 0, most - count)
    return (((_string, least, most, count + run, ()), rest),), at + run


def _array(frame: Stack, rest: Stack, byte: int) -> list[Stack]:
    """(_array, node, items, after_item, space): after `[` or after an item."""
    _, node, count, after_item, space = frame
    if byte in _SPACE:
        return [((_array, node, count, after_item, space + 1), rest)] if space < MAX_SPACE else []
    if byte == 0x5D:
        return [rest] if count >= node.least else []
    if count >= node.most:
        return []
    then = ((_array, node, count + 1, True, 0), rest)
    if not after_item:
        return _begin(node.item, then, byte)
    return [((_value, node.item, 0), then)] if byte == 0x2C else []


_FIRST, _AFTER_COMMA, _AFTER_KEY, _AFTER_VALUE = range(4)


def _object(frame: Stack, rest: Stack, byte: int) -> list[Stack]:
    """(_object, node, seen, place, space): between the tokens of an object.

    `seen` has a bit for each key; after a key, `place` is _AFTER_KEY + 4 * its number.
    """
    _, node, seen, place, space = frame
    if byte in _SPACE:
        return [((_object, node, seen, place, space + 1), rest)] if space < MAX_SPACE else []
    if place & 3 == _AFTER_KEY:
        number = place >> 2
        then = ((_object, node, seen | 1 << number, _AFTER_VALUE, 0), rest)
        return [((_value, node.values[number], 0), then)] if byte == 0x3A else []
    if byte == 0x7D and place != _AFTER_COMMA:
        return [rest] if node.required & ~seen == 0 else []
    unseen = ((1 << len(node.keys)) - 1) & ~seen
    if place == _AFTER_VALUE:
        return [((_object, node, seen, _AFTER_COMMA, 0), rest)] if byte == 0x2C and unseen else []
    return [((_key, node, seen, 1, unseen), rest)] if byte == 0x22 and unseen else []


def _key(frame: Stack, rest: Stack, byte: int) -> list[Stack]:
    """(_key, node, seen, position, candidates): within a key, after its quote."""
    _, node, seen, at, candidates = frame
    going, whole = _match(node.keys, at, candidates, byte)
    if whole >= 0:
        return [((_object, node, seen, _AFTER_KEY + 4 * whole, 0), rest)]
    return [((_key, node, seen, at + 1, going), rest)] if going else []


def _map(frame: Stack, rest: Stack, byte: int) -> list[Stack]:
    """(_map, node, place, space): between the tokens of an object of any keys."""
    _, node, place, space = frame
    if byte in _SPACE:
        return [((_map, node, place, space + 1), rest)] if space < MAX_SPACE else []
    if place == _AFTER_KEY:
        then = ((_map, node, _AFTER_VALUE, 0), rest)
        return [((_value, node.value, 0), then)] if byte == 0x3A else []
    if byte == 0x7D and place != _AFTER_COMMA:
        return [rest]
    if place == _AFTER_VALUE:
        return [((_map, node, _AFTER_COMMA, 0), rest)] if byte == 0x2C else []
    return _begin(_FREE_STRING, ((_map, node, _AFTER_KEY, 0), rest), byte)


def _head(frame: Stack, rest: Stack, byte: int) -> list[Stack]:
    """(_head, node, position, candidates): a tool call, up to its arguments."""
    _, node, at, candidates = frame
    going, whole = _match(node.heads, at, candidates, byte)
    if whole >= 0:
        return [((_value, node.arguments[whole], MAX_SPACE), ((_tail,), rest))]
    return [((_head, node, at + 1, going), rest)] if going else []


def _tail(frame: Stack, rest: Stack, byte: int) -> list[Stack]:
    """(_tail,): the brace that ends a tool call."""
    return [rest] if byte == 0x7D else []


def _match(texts: tuple[bytes, ...], at: int, candidates: int, byte: int) -> tuple[int, int]:
    """Return the candidates that go on with `byte`, and which of them is whole now, or -1."""
    going, whole = 0, -1
    for number, text in enumerate(texts):
        if candidates >> number & 1 and text[at] == byte:
            going |= 1 << number
            if len(text) == at + 1:
                whole = number
    return going, whole


def _is_whole(frame: Stack) -> bool:
    """Return whether the value of the innermost frame may end here."""
    if frame[0] is _number:
        return number_ends(frame[1], frame[2])
    if frame[0] is _literal:
        return any(len(text) == frame[2] for text in frame[1])
    return False
