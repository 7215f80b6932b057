"""What one generation has written so far, and what it may write next.

The text is followed as bytes, for a token may end within a character. A grammar, where
there is one, is asked about the token that was sampled, not about the whole vocabulary.
"""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass
from typing import Literal

from agentd.engine import grammar
from agentd.engine.schema import CallNode, Node

CALL_OPEN = b"<tool_call>"
CALL_CLOSE = b"</tool_call>"
_BARE_CALLS = (b"{", b"```json\n{", b"```\n{")

Mode = Literal["text", "json", "call", "auto"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a generation. `tool` with valid `arguments`, or text alone."""

    text: str
    tool: str = ""
    arguments: str = ""


class Output:
    """Follows one answer.

    `text`: anything; `json`: one document of `node`; `call`: one call, of which the prompt
    holds the beginning `given`; `auto`: text, or a call once CALL_OPEN was written.
    """

    def __init__(self, mode: Mode, node: Node | None = None, given: bytes = b"") -> None:
        self.mode = mode
        self._node = node
        self._text = bytearray()
        self._call_at = -1
        self._streamed = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._written: list[str] = []
        self._state: grammar.State | None = None
        if node is not None and mode != "auto":
            self._state = grammar.advance(grammar.start(node), given)
        self._given = given

    @property
    def finished(self) -> bool:
        """Whether nothing can follow any more."""
        return self._state == grammar.COMPLETE

    @property
    def free(self) -> bool:
        """Whether any token will do for now."""
        return self._state is None

    def next_bytes(self) -> frozenset[int]:
        """Return the bytes that the grammar lets follow; all when it is not active."""
        return frozenset(range(256)) if self._state is None else grammar.next_bytes(self._state)

    def allows(self, piece: bytes) -> bool:
        """Return whether the text may go on with `piece`."""
        if not piece:
            return False
        if self._state is not None:
            return bool(grammar.advance(self._state, piece))
        call = self._call_in(piece)
        return call is None or bool(grammar.advance(self._call_start(), call))

    def allows_end(self) -> bool:
        """Return whether the text may end here."""
        return self._state is None or grammar.can_end(self._state)

    def take(self, piece: bytes) -> None:
        """Add `piece`, which `allows` has accepted."""
        if self._state is not None:
            self._state = grammar.advance(self._state, piece)
        elif (call := self._call_in(piece)) is not None:
            self._state = grammar.advance(self._call_start(), call)
            self._call_at = len(self._text) + len(piece) - len(call)
        self._text += piece

    def fresh(self) -> str:
        """Return the text to stream since the last time: whole characters only.

        Calls are not streamed, nor is what may yet turn out to be one.
        """
        end = self._stream_end()
        if end <= self._streamed:
            return ""
        text = self._decoder.decode(bytes(self._text[self._streamed : end]))
        self._streamed = end
        if text:
            self._written.append(text)
        return text

    def outcome(self, whole: bool) -> Outcome:
        """Return what was written; `whole` says that it was not cut short."""
        if self.mode == "call" or self._call_at >= 0:
            call = self._given if self.mode == "call" else b""
            call += bytes(self._text[max(self._call_at, 0) :])
            tool, arguments = _split(call) if whole and self.finished else ("", "")
            return Outcome(self._rest() if self.mode == "auto" else "", tool, arguments)
        if self.mode == "auto" and whole and (bare := self._bare_call()) is not None:
            return Outcome("", *bare)
        return Outcome(self._rest())

    def _call_start(self) -> grammar.State:
        return () if self._node is None else grammar.start(self._node)

    def _call_in(self, piece: bytes) -> bytes | None:
        """Return what `piece` holds after a CALL_OPEN that it completes, else None."""
        if self.mode != "auto":
            return None
        tail = bytes(self._text[-(len(CALL_OPEN) - 1) :])
        before, mark, after = (tail + piece).partition(CALL_OPEN)
        return after if mark and len(before) + len(mark) > len(tail) else None

    def _stream_end(self) -> int:
        if self.mode == "call":
            return 0
        if self.mode != "auto":
            return len(self._text)
        if self._call_at >= 0:
            return self._text.rindex(CALL_OPEN, 0, self._call_at)
        start = bytes(self._text[:64]).lstrip()
        if any(bare.startswith(start) or start.startswith(bare) for bare in _BARE_CALLS):
            return 0
        for length in range(min(len(CALL_OPEN) - 1, len(self._text)), 0, -1):
            if self._text.endswith(CALL_OPEN[:length]):
                return len(self._text) - length
        return len(self._text)

    def _rest(self) -> str:
        """Return all text; a character that was cut short at the end is left out."""
        self.fresh()
        if self._call_at < 0 and self._streamed < len(self._text):
            self._written.append(self._decoder.decode(bytes(self._text[self._streamed :])))
            self._streamed = len(self._text)
        return "".join(self._written)

    def _bare_call(self) -> tuple[str, str] | None:
        """Return the call that the whole text is, which models write without marks too."""
        text = bytes(self._text).strip()
        for fence in (b"```json", b"```"):
            if text.startswith(fence) and text.endswith(b"```"):
                text = text.removeprefix(fence).removesuffix(b"```").strip()
        text = text.removesuffix(CALL_CLOSE).strip()
        try:
            call = json.loads(text)
        except ValueError:  # plain text, as it mostly is
            return None
        if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
            return None
        arguments = json.dumps(call["arguments"], ensure_ascii=False)
        if not isinstance(self._node, CallNode):
            return None
        canonical = b'{"name": ' + json.dumps(call["name"], ensure_ascii=False).encode()
        canonical += b', "arguments": ' + arguments.encode() + b"}"
        return (call["name"], arguments) if grammar.accepts(self._node, canonical) else None


def _split(call: bytes) -> tuple[str, str]:
    """Return tool and arguments, as they were written, of a complete call."""
    text = call.decode().lstrip()
    name: str = json.loads(text)["name"]
    head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
    return name, text[len(head) : -1]
