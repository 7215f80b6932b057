"""The tools that every pool can list with `source = "builtin"`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from datetime import UTC, datetime

from corefleet.errors import ToolFailed
from corefleet.tool import Tool, tool

MAX_EXPRESSION = 200
MAX_EXPONENT = 512
MAX_BITS = 2048

Number = int | float

_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


@tool
async def calculator(expression: str) -> str:
    """Work out an arithmetic expression exactly, such as (12 + 3) * 4 / 7.

    Args:
        expression: Numbers with + - * / // % ** and parentheses.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ToolFailed(f"expression of {len(expression)} characters; at most {MAX_EXPRESSION}")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        raise ToolFailed(
            f"{expression!r} is not arithmetic; expected such as 2 * (3 + 4)"
        ) from None
    except RecursionError:
        raise ToolFailed("the expression is nested too deeply") from None
    except ZeroDivisionError:
        raise ToolFailed(f"{expression}: division by zero") from None
    except OverflowError:
        raise ToolFailed(f"{expression}: the result is too large") from None
    return f"{value:.12g}" if isinstance(value, float) else str(value)


@tool
async def utc_clock() -> str:
    """Tell the current date and time in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


BUILTIN: dict[str, Tool] = {made.name: made for made in (calculator, utc_clock)}


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(type(op), _value(left), _value(right))
    raise ValueError(ast.dump(node))


def _bounded(op: type[ast.operator], left: Number, right: Number) -> Number:
    """Apply `op`, refusing before the work what would take long or give no number."""
    if op is ast.Pow:
        if abs(right) > MAX_EXPONENT:
            raise ToolFailed(f"exponent {right}; at most {MAX_EXPONENT}")
        if isinstance(left, int) and left.bit_length() * abs(right) > MAX_BITS:
            raise ToolFailed(f"the result would have more than {MAX_BITS} bits")
    result = _OPERATORS[op](left, right)
    if isinstance(result, complex):
        raise ToolFailed("the result is not a real number")
    if isinstance(result, int) and result.bit_length() > MAX_BITS:
        raise ToolFailed(f"the result would have more than {MAX_BITS} bits")
    if isinstance(result, float) and (result != result or abs(result) == float("inf")):
        raise ToolFailed("the result is not a finite number")
    return result
