"""A model of bytes that writes what a script says: the batcher without llama.cpp."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from agentd.engine.chat import Part
from agentd.engine.schedule import Batch, Keep, Limits, Schedule
from corefleet.messages.links import Generate, ToolDefinition
from corefleet.messages.records import Turn

MARK, END = 256, 257
"""Tokens before each control part of a prompt, and at the end of an answer."""
PAIRS = (b'{"', b"}}", b"<tool_call>")
SIZE = 258 + len(PAIRS)
NO_NUMBER = "not a number"
"""A script that makes the logits NaN."""


class Bytes:
    """One token for each byte, two control tokens and a few longer ones."""

    @cached_property
    def first_bytes(self) -> npt.NDArray[np.int16]:
        pieces = [self.piece(token) for token in range(SIZE)]
        return np.array([piece[0] if piece else -1 for piece in pieces], np.int16)

    def piece(self, token: int) -> bytes:
        if token < 256:
            return bytes((token,))
        return PAIRS[token - 258] if token > END else b""

    def ends(self, token: int) -> bool:
        return token in (MARK, END)


class ScriptedModel:
    """Answers the prompt in which a script's key stands with that script."""

    def __init__(self, scripts: dict[str, str]) -> None:
        self.vocabulary = Bytes()
        self.scripts = {key.encode(): text.encode() for key, text in scripts.items()}
        self.cells: dict[int, list[int]] = {}
        self.prompts: list[tuple[int, ...]] = []
        self.full = 0
        """So many of the next decode calls find no room."""
        self.closed = False
        self.gate: threading.Event | None = None
        """While it is not set, decode calls last, unless interrupted."""
        self.decoding = threading.Event()
        self.interrupted = threading.Event()
        self.interrupts = 0

    def tokenize(self, parts: Sequence[Part]) -> tuple[int, ...]:
        tokens: list[int] = []
        for part in parts:
            tokens += [MARK, *part.text.encode()] if part.control else part.text.encode()
        self.prompts.append(tuple(tokens))
        return tuple(tokens)

    def decode(self, batch: Batch) -> str:
        for move in batch.moves:
            if isinstance(move, Keep):
                del self.cells[move.sequence][move.length :]
            else:
                self.cells[move.target] = self.cells[move.source][: move.length]
        if self.full:
            self.full -= 1
            return "full"
        if batch.rows and self.gate is not None and not self._pass(self.gate):
            return "interrupted"
        for row in batch.rows:
            self.cells.setdefault(row.sequence, []).append(row.token)
        self._rows = [self._row(self.cells[row.sequence]) for row in batch.rows if row.logits]
        return "done"

    def logits(self, batch: Batch) -> npt.NDArray[np.float32]:
        return np.array(self._rows, np.float32)

    def warm(self) -> bool:
        return True

    def interrupt(self) -> None:
        self.interrupts += 1
        self.interrupted.set()

    def close(self) -> None:
        self.closed = True

    def _pass(self, gate: threading.Event) -> bool:
        self.interrupted.clear()
        self.decoding.set()
        while not gate.wait(0.001):
            if self.interrupted.is_set():
                return False
        return True

    def _row(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        whole = tuple(tokens)
        prompt = max((one for one in self.prompts if whole[: len(one)] == one), key=len)
        data = bytes(token for token in prompt if token < 256)
        script = next(text for key, text in self.scripts.items() if key in data)
        row = np.linspace(0, 1, SIZE, dtype=np.float32)
        if script == NO_NUMBER.encode():
            return row * np.float32("nan")
        written = len(whole) - len(prompt)
        row[script[written] if written < len(script) else END] = 10
        return row


def schedule(sequences: int = 4, cells: int = 20_000, queue: int = 10) -> Schedule:
    limits = Limits(
        sequences=sequences,
        cells=cells,
        sequence_tokens=5_000,
        batch_tokens=512,
        chunk_tokens=256,
        queue=queue,
    )
    return Schedule(limits)


ADD = ToolDefinition("add", "Adds.", {"properties": {"n": {"type": "integer"}}, "required": ["n"]})


def ask(call: int, text: str, **changes: object) -> Generate:
    fields: dict[str, object] = {"max_tokens": 64, **changes}
    return Generate(
        call=call,
        session="pool/session",
        system="system",
        turns=(Turn("user", text),),
        **fields,  # type: ignore[arg-type]  # the fields that a test changes
    )
