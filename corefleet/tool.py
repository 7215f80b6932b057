"""Tools: Python functions that agents may call.

    @tool
    def add(a: int, b: int) -> int:
        "Add two integers."
        return a + b

The JSON Schema of the arguments comes from the type hints, the description from the
docstring, whose `Args:` section describes single arguments.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, overload

import msgspec

from corefleet.errors import InvalidInput, ToolFailed

KEY_PARAMETER = "idempotency_key"
"""A parameter of this name receives the step's key; the model is not told of it."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}\Z")
_ARGUMENT_LINE = re.compile(r"\s+(\w+)(?:\s*\([^)]*\))?:\s*(.+)")


@dataclass(frozen=True, slots=True)
class Tool:
    """What an agent may call. Calling a Tool calls its function.

    `parameters` is the JSON Schema of the arguments object. `arguments` is the same as a
    type when the schema was derived from type hints; a tool that is described by its
    schema alone leaves it None and gets the arguments as they are.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    function: Callable[..., Any]
    at_most_once: bool = False
    """Never called twice for one step: a task that cannot tell whether it ran fails."""
    timeout_s: float | None = None
    arguments: type[msgspec.Struct] | None = None
    takes_key: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def is_async(self) -> bool:
        """Whether the function runs on the event loop; a plain one runs in a thread."""
        return inspect.iscoroutinefunction(self.function)

    def typed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return keyword arguments of the types that the function's hints name.

        Raises ToolFailed that says which argument is wrong and what would be right.
        """
        if self.arguments is None:
            return arguments
        try:
            values = msgspec.convert(arguments, self.arguments)
        except msgspec.ValidationError as error:
            raise ToolFailed(f"{self.name}: arguments: {error}") from error
        return {name: getattr(values, name) for name in self.arguments.__struct_fields__}


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str = "",
    description: str = "",
    at_most_once: bool = False,
    timeout_s: float | None = None,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str = "",
    description: str = "",
    at_most_once: bool = False,
    timeout_s: float | None = None,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a Tool of a function, plain or async; used with or without arguments.

    Raise ToolFailed in the function for an error that the agent can do something about.
    Raises InvalidInput when the function cannot be a tool.
    """

    def decorate(wrapped: Callable[..., Any]) -> Tool:
        arguments, takes_key = _arguments_type(wrapped)
        called = name or wrapped.__name__
        if not _NAME.match(called):
            raise InvalidInput("tool name", called, "1 to 64 of A-Z a-z 0-9 _ -, no digit first")
        return Tool(
            name=called,
            description=description or _description(wrapped),
            parameters=_schema(arguments),
            function=wrapped,
            at_most_once=at_most_once,
            timeout_s=timeout_s,
            arguments=arguments,
            takes_key=takes_key,
        )

    return decorate if function is None else decorate(function)


def _arguments_type(function: Callable[..., Any]) -> tuple[type[msgspec.Struct], bool]:
    """Return the struct of the function's arguments, and whether it takes the step's key."""
    where = f"tool {function.__name__}"
    hints = typing.get_type_hints(function, include_extras=True)
    told = _argument_descriptions(function)
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    takes_key = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == KEY_PARAMETER:
            takes_key = True
            continue
        if parameter.kind not in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}:
            raise InvalidInput(where, str(parameter), "parameters that can be passed by name")
        if parameter.name not in hints:
            raise InvalidInput(where, parameter.name, "a type hint for every parameter")
        kind = hints[parameter.name]
        if parameter.name in told:
            kind = Annotated[kind, msgspec.Meta(description=told[parameter.name])]
        if parameter.default is parameter.empty:
            fields.append((parameter.name, kind))
        else:
            fields.append((parameter.name, kind, parameter.default))
    try:
        made = msgspec.defstruct(
            function.__name__, fields, kw_only=True, forbid_unknown_fields=True
        )
        msgspec.json.schema(made)
    except TypeError as error:
        raise InvalidInput(where, str(error), "parameters of types that JSON has") from error
    return made, takes_key


def _schema(arguments: type[msgspec.Struct]) -> dict[str, Any]:
    (_,), parts = msgspec.json.schema_components([arguments])
    schema = parts.pop(arguments.__name__)
    del schema["title"]
    return {**schema, "$defs": parts} if parts else schema


def _description(function: Callable[..., Any]) -> str:
    """The docstring's first paragraph, on one line."""
    paragraph = (inspect.getdoc(function) or "").split("\n\n", 1)[0]
    return " ".join(paragraph.split())


def _argument_descriptions(function: Callable[..., Any]) -> dict[str, str]:
    found = {}
    _, _, section = (inspect.getdoc(function) or "").partition("Args:\n")
    for line in section.splitlines():
        match = _ARGUMENT_LINE.match(line)
        if match is None:
            break
        found[match[1]] = match[2].strip()
    return found
