"""Tools are described by their type hints and docstrings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest

from corefleet.builtin_tools import BUILTIN, calculator, utc_clock
from corefleet.errors import InvalidInput, ToolFailed
from corefleet.tool import Tool, tool


@tool
def book(room: str, nights: int = 1, view: Literal["sea", "yard"] = "sea") -> str:
    """Book a room
    for some nights.

    Longer explanation that the model is spared.

    Args:
        room: Number of the room.
        nights (int): How long.
    """
    return f"{room} {nights} {view}"


def test_a_tool_is_described_by_hints_and_docstring() -> None:
    assert isinstance(book, Tool)
    assert (book.name, book.description) == ("book", "Book a room for some nights.")
    assert book.parameters == {
        "type": "object",
        "properties": {
            "room": {"type": "string", "description": "Number of the room."},
            "nights": {"type": "integer", "description": "How long.", "default": 1},
            "view": {"enum": ["sea", "yard"], "default": "sea"},
        },
        "required": ["room"],
        "additionalProperties": False,
    }
    assert not book.is_async
    assert book("7") == "7 1 sea"


def test_options() -> None:
    @tool(name="pay", description="Pay.", at_most_once=True, timeout_s=3.0)
    async def transfer(amount: float, idempotency_key: str) -> None: ...

    assert (transfer.name, transfer.description) == ("pay", "Pay.")
    assert (transfer.at_most_once, transfer.timeout_s) == (True, 3.0)
    assert transfer.takes_key
    assert transfer.is_async
    assert list(transfer.parameters["properties"]) == ["amount"]


class Point(msgspec.Struct):
    x: int
    y: int = 0


def test_arguments_become_the_types_of_the_hints() -> None:
    @tool
    def move(to: Point, by: Annotated[int, msgspec.Meta(ge=1)]) -> None: ...

    assert "Point" in move.parameters["$defs"]
    assert move.parameters["properties"]["by"] == {"type": "integer", "minimum": 1}
    assert move.typed({"to": {"x": 1}, "by": 2}) == {"to": Point(1), "by": 2}
    with pytest.raises(ToolFailed, match=r"move: arguments: Expected `int` >= 1 - at `\$.by`"):
        move.typed({"to": {"x": 1}, "by": 0})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "missing required field `room`"),
        ({"room": 7}, r"Expected `str`, got `int` - at `\$.room`"),
        ({"room": "7", "nights": "2"}, r"Expected `int`, got `str` - at `\$.nights`"),
        ({"room": "7", "view": "wall"}, r"Invalid enum value 'wall' - at `\$.view`"),
        ({"room": "7", "bed": 1}, "unknown field `bed`"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ToolFailed, match=f"book: arguments: .*{says}"):
        book.typed(arguments)


def test_a_tool_of_a_schema_takes_arguments_as_they_are() -> None:
    made = Tool("t", "", {"type": "object"}, print)
    assert made.typed({"a": 1}) == {"a": 1}


def test_functions_that_cannot_be_tools() -> None:
    def without_hint(a) -> None: ...  # type: ignore[no-untyped-def]
    def rest(*a: int) -> None: ...
    def odd(a: type) -> None: ...

    for function, says in (
        (without_hint, "'a' is not valid; expected a type hint for every parameter"),
        (rest, "parameters that can be passed by name"),
        (odd, "parameters of types that JSON has"),
    ):
        with pytest.raises(InvalidInput, match=says):
            tool(function)
    with pytest.raises(InvalidInput, match="tool name: '<lambda>'"):
        tool(lambda: None)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("17 * 23", "391"),
        ("(12 + 3) * 4 / 8", "7.5"),
        ("0.1 + 0.2", "0.3"),
        ("-7 // 2", "-4"),
        ("7 % 4", "3"),
        ("2 ** 100", "1267650600228229401496703205376"),
        ("2 ** -1", "0.5"),
        (" +5 ", "5"),
    ],
)
async def test_calculator(expression: str, result: str) -> None:
    assert await calculator(expression) == result


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("", "is not arithmetic"),
        ("two", "is not arithmetic"),
        ("__import__('os')", "is not arithmetic"),
        ("'a' * 9", "is not arithmetic"),
        ("True + 1", "is not arithmetic"),
        ("1j", "is not arithmetic"),
        ("1 if 1 else 2", "is not arithmetic"),
        ("1 / 0", "division by zero"),
        ("2 ** 9999", "at most 512"),
        ("99999999 ** 400", "more than 2048 bits"),
        ("(2 ** 500) * (2 ** 500) * (2 ** 500) * (2 ** 500) * (2 ** 500)", "more than 2048 bits"),
        ("1e308 * 10", "not a finite number"),
        ("(-8) ** 0.5", "not a real number"),
        ("1e300 ** 2", "too large"),
        ("1" * 300, "300 characters; at most 200"),
        ("(" * 150 + "1" + ")" * 40, "is not arithmetic"),
    ],
)
async def test_calculator_refuses(expression: str, says: str) -> None:
    with pytest.raises(ToolFailed, match=says):
        await calculator(expression)


async def test_builtin_tools() -> None:
    assert set(BUILTIN) == {"calculator", "utc_clock"}
    text = await utc_clock()
    assert (len(text), text[-1]) == (20, "Z")
    assert utc_clock.parameters["properties"] == {}
