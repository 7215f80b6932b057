"""The conversation as a prompt: ChatML, with tools as Qwen's and Hermes' models know them.

A prompt is a list of parts. Control parts are the template's own words; text parts hold
what people, tools and models wrote, in which nothing is ever a control token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from agentd.engine.output import Output
from agentd.engine.schema import call_head, compile_calls, compile_schema, dump
from corefleet.errors import InvalidInput
from corefleet.messages.links import Generate, ToolDefinition
from corefleet.messages.records import Turn

_TOOLS_BEFORE = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a prompt; control tokens are looked for in `control` parts only."""

    text: str
    control: bool = False


def render(request: Generate) -> tuple[tuple[Part, ...], Output]:
    """Return the prompt of a request and what its answer may be.

    A turn of the assistant with a `name` is its call of that tool, `text` the arguments;
    the turn of role tool that follows holds what the tool answered.
    Tools that may not be called now are told all the same: they belong to the beginning
    that a conversation's prompts share. Raises InvalidInput for tools or a schema that
    cannot be enforced.
    """
    tools = request.tools if request.tool_choice != "none" else ()
    parts = _head(request.system, request.tools)
    for number, turn in enumerate(request.turns):
        before = request.turns[number - 1].role if number else ""
        after = request.turns[number + 1].role if number + 1 < len(request.turns) else ""
        parts += _turn(turn, before == "tool", after == "tool")
    parts.append(_control("<|im_start|>assistant\n"))
    output = _output(request, tools)
    if output.mode == "call":
        parts.append(_control("<tool_call>\n"))
        parts.append(Part(_given(tools)))
    return tuple(parts), output


def _output(request: Generate, tools: Sequence[ToolDefinition]) -> Output:
    if tools:
        names = [tool.name for tool in tools]
        for number, name in enumerate(names):
            if not name or name in names[:number]:
                raise InvalidInput("tools", name, "names that are not empty and differ")
        node = compile_calls({tool.name: tool.parameters for tool in tools})
        if request.tool_choice == "required":
            return Output("call", node, _given(tools).encode())
        return Output("auto", node)
    if request.tool_choice == "required":
        raise InvalidInput("tool_choice", "required", "tools to choose from")
    if request.json_schema is not None:
        return Output("json", compile_schema(request.json_schema))
    return Output("text")


def _given(tools: Sequence[ToolDefinition]) -> str:
    """Return how every call begins: up to where the model has a choice.

    Without the space before the arguments: models write it in one token with the brace.
    """
    if len(tools) == 1:
        return call_head(tools[0].name).decode().rstrip()
    return '{"name": "'


def _head(system: str, tools: Sequence[ToolDefinition]) -> list[Part]:
    parts = [_control("<|im_start|>system\n"), Part(system)]
    if tools:
        parts.append(_control(_TOOLS_BEFORE))
        for tool in tools:
            function = {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
            }
            listed = json.dumps({"type": "function", "function": function}, ensure_ascii=False)
            parts += [_control("\n"), Part(listed)]
        parts.append(_control(_TOOLS_AFTER))
    parts.append(_control("<|im_end|>\n"))
    return parts


def _turn(turn: Turn, after_tool: bool, before_tool: bool) -> list[Part]:
    if turn.role == "tool":
        start = "\n<tool_response>\n" if after_tool else "<|im_start|>user\n<tool_response>\n"
        end = "\n</tool_response>" if before_tool else "\n</tool_response><|im_end|>\n"
        return [_control(start), Part(turn.text), _control(end)]
    if turn.role == "assistant" and turn.name:
        call = f'{{"name": {dump(turn.name).decode()}, "arguments": {turn.text}}}'
        return [
            _control("<|im_start|>assistant\n<tool_call>\n"),
            Part(call),
            _control("\n</tool_call><|im_end|>\n"),
        ]
    return [_control(f"<|im_start|>{turn.role}\n"), Part(turn.text), _control("<|im_end|>\n")]


def _control(text: str) -> Part:
    return Part(text, control=True)
