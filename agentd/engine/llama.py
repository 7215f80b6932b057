"""The one module that touches llama.cpp.

Many wrong calls abort or hang the process: everything is checked here before the library
sees it. One thread alone makes a `Llama`, uses it and closes it, since a second calling
thread would start a second team of OpenMP threads; `interrupt` is the exception.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import structlog

from agentd.engine.chat import Part
from agentd.engine.gguf import check_header
from agentd.engine.schedule import Batch, Copy
from corefleet.errors import CorefleetError, InvalidInput, ModelUnusable

Decoded = Literal["done", "interrupted", "full"]

_NUMA_DISABLED = 0  # any strategy turns the prefetch of mapped files off
_LOG_WARN, _LOG_ERROR = 3, 4
_MAX_SEQUENCES = 256
_LONGEST_PIECE_BYTES = 512
_WARM_TOKENS = 1000
_CACHED_PARTS = 512
_CACHED_PART_CHARS = 16_384

_log = structlog.get_logger(__name__)


class Library:
    """The loaded shared library, its backends and what it last complained of.

    The environment is set for the C libraries, which read it when they are loaded.
    """

    def __init__(self, passive: bool) -> None:
        os.putenv("GGML_NO_BACKTRACE", "1")  # else an abort starts a debugger
        os.putenv("OMP_WAIT_POLICY", "passive" if passive else "active")
        try:
            import llama_cpp.llama_cpp as api
        except (ImportError, OSError, RuntimeError) as error:
            raise ModelUnusable(f"llama-cpp-python is not usable here: {error}") from error
        self.api: Any = api
        self.complaints: deque[str] = deque(maxlen=4)
        self._keep_log = api.llama_log_callback(self._on_log)
        api.llama_log_set(self._keep_log, None)
        # By default backends are searched in the current directory too.
        folder = Path(api.__file__).parent / "lib"
        load = api._lib.ggml_backend_load_all_from_path
        load.argtypes, load.restype = [ctypes.c_char_p], None
        load(os.fsencode(folder))
        api.llama_backend_init()
        api.llama_numa_init(_NUMA_DISABLED)

    def _on_log(self, level: int, text: bytes, _: Any) -> None:
        if level in (_LOG_WARN, _LOG_ERROR):
            line = text.decode(errors="replace").strip()
            if level == _LOG_ERROR and line:
                self.complaints.append(line)
            _log.debug("llama.cpp complains", text=line)


class Llama:
    """A model with a context: tokenises, decodes batches, hands out logits.

    `threads` should be the number of physical cores given to the process. `cells` is the
    size of the KV cache, shared by `sequences` sequences. `passive` lets threads sleep
    while they wait for each other: some percent slower on cores of their own, and many
    times faster on cores that other processes use too.
    Raises ModelUnusable, naming the file and why, when the model cannot be used.
    """

    def __init__(
        self,
        path: Path,
        *,
        threads: int,
        cells: int,
        sequences: int,
        batch_tokens: int,
        passive: bool = True,
    ) -> None:
        if not 1 <= sequences <= _MAX_SEQUENCES:
            raise InvalidInput("sequences", sequences, f"1 to {_MAX_SEQUENCES}")
        check_header(path)
        self._path = path
        self._library = Library(passive)
        self._api = self._library.api
        self._context: Any = None
        self._interrupted = ctypes.create_string_buffer(2)
        self._model = self._load()
        try:
            self._make_context(threads, cells, sequences, batch_tokens)
            self._batch = self._api.llama_batch_init(batch_tokens, 0, 1)
            self._batch_tokens = batch_tokens
            self._sequences = sequences
            self.vocabulary = Tokens(self._api, self._model)
            self._canary()
        except BaseException:  # whatever it was, what is loaded by now must be freed
            self.close()
            raise

    @property
    def cells(self) -> int:
        """Tokens that the KV cache holds."""
        return int(self._api.llama_n_ctx(self._context))

    @property
    def trained_tokens(self) -> int:
        """Longest text that the model was trained for."""
        return int(self._api.llama_model_n_ctx_train(self._model))

    @property
    def shares_cells(self) -> bool:
        """Whether cells of one sequence can be cut and copied to another.

        With sliding windows and recurrent state the library says yes and computes wrong.
        """
        return not (
            self._api.llama_model_n_swa(self._model) > 0
            or self._api.llama_model_is_recurrent(self._model)
            or self._api.llama_model_is_hybrid(self._model)
        )

    def tokenize(self, parts: Sequence[Part]) -> tuple[int, ...]:
        """Return the tokens of a prompt; text parts hold no control tokens, whatever they say."""
        tokens: list[int] = []
        for part in parts:
            tokens += self.vocabulary.tokenize(part.text, part.control)
        return tuple(tokens)

    def decode(self, batch: Batch) -> Decoded:
        """Do a batch's moves and decode its rows.

        `interrupted` and `full` leave the cells as the moves left them. Raises InvalidInput
        for a batch that the library would abort over, CorefleetError when it fails.
        """
        self._move(batch)
        if not batch.rows:
            return "done"
        self._fill(batch)
        self._interrupted.raw = b"\0\0"
        code = self._api.llama_decode(self._context, self._batch)
        if code == 0:
            return "done"
        if code in (1, 2):
            return "full" if code == 1 else "interrupted"
        said = "; ".join(self._library.complaints)
        raise CorefleetError(f"llama_decode returned {code}: {said}")

    def logits(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Return the logits after `decode`: a row for each of `batch.sampling`, not copied."""
        rows = len(batch.sampling)
        pointer = self._api.llama_get_logits(self._context)
        if not rows or not pointer:
            raise InvalidInput("batch", rows, "a decoded batch with logits")
        return np.ctypeslib.as_array(pointer, shape=(rows, self.vocabulary.size))

    def warm(self) -> bool:
        """Prepare a little of what later steps need; True when there is no more to do."""
        return self.vocabulary.warm()

    def interrupt(self) -> None:
        """Make the decode call that runs now, in another thread, return soon."""
        self._interrupted.raw = b"\1\0"

    def close(self) -> None:
        """Free context and model."""
        if self._context is not None:
            self._api.llama_free(self._context)
            self._context = None
        if self._model is not None:
            self._api.llama_model_free(self._model)
            self._model = None

    def _load(self) -> Any:
        params = self._api.llama_model_default_params()
        params.n_gpu_layers = 0
        params.load_mode = self._api.LLAMA_LOAD_MODE_MMAP
        # Repacked weights are private memory, and slow down prompts of K-quants.
        params.use_extra_bufts = False
        model = self._api.llama_model_load_from_file(os.fsencode(self._path), params)
        if not model:
            said = "; ".join(self._library.complaints) or "llama.cpp gave no reason"
            raise ModelUnusable(f"{self._path}: {said}")
        return model

    def _make_context(self, threads: int, cells: int, sequences: int, batch_tokens: int) -> None:
        params = self._api.llama_context_default_params()
        params.n_ctx = cells
        params.n_batch = batch_tokens
        params.n_ubatch = batch_tokens  # one decode is one graph: interrupted as a whole
        params.n_seq_max = sequences
        params.n_outputs_max = sequences
        params.n_threads = threads
        params.n_threads_batch = threads
        params.kv_unified = True
        params.no_perf = True
        self._context = self._api.llama_init_from_model(self._model, params)
        if not self._context:
            self._context = None
            said = "; ".join(self._library.complaints) or "llama.cpp gave no reason"
            raise ModelUnusable(f"{self._path}: no context of {cells} cells: {said}")
        # strlen reads the flag without the interpreter's lock, which a callback in Python
        # would have to wait for a thousand times a decode.
        strlen = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p).value
        self._keep_callback = self._api.ggml_abort_callback(strlen)
        self._api.llama_set_abort_callback(
            self._context, self._keep_callback, ctypes.addressof(self._interrupted)
        )
        self._memory = self._api.llama_get_memory(self._context)

    def _canary(self) -> None:
        """Decode a few tokens: damaged weights load, and show in the logits."""
        tokens = self.vocabulary.tokenize("The quick brown fox", control=False)[:8]
        self._batch.n_tokens = len(tokens)
        for at, token in enumerate(tokens):
            self._put(at, token, at, 0, at + 1 == len(tokens))
        code = self._api.llama_decode(self._context, self._batch)
        if code != 0:
            raise ModelUnusable(f"{self._path}: a first decode returned {code}")
        row = np.ctypeslib.as_array(
            self._api.llama_get_logits(self._context), shape=(self.vocabulary.size,)
        )
        if not np.isfinite(row).all() or row.min() == row.max():
            raise ModelUnusable(f"{self._path}: its weights are damaged: logits are no numbers")
        self._api.llama_memory_clear(self._memory, False)

    def _move(self, batch: Batch) -> None:
        for move in batch.moves:
            if isinstance(move, Copy):
                self._check_sequence(move.source)
                self._check_sequence(move.target)
                self._api.llama_memory_seq_cp(
                    self._memory, move.source, move.target, 0, move.length
                )
                continue
            self._check_sequence(move.sequence)
            if not self._api.llama_memory_seq_rm(self._memory, move.sequence, move.length, -1):
                raise CorefleetError(f"the KV cache cannot be cut: {move}")

    def _fill(self, batch: Batch) -> None:
        if len(batch.rows) > self._batch_tokens:
            raise InvalidInput("batch", len(batch.rows), f"at most {self._batch_tokens} rows")
        if len(batch.sampling) != sum(row.logits for row in batch.rows):
            raise InvalidInput("batch", batch.sampling, "a job for each row with logits")
        if len(batch.sampling) > self._sequences:
            raise InvalidInput("batch", len(batch.sampling), f"at most {self._sequences} samples")
        for at, row in enumerate(batch.rows):
            self._check_sequence(row.sequence)
            if not 0 <= row.token < self.vocabulary.size:
                raise InvalidInput("token", row.token, f"0 to {self.vocabulary.size - 1}")
            self._put(at, row.token, row.position, row.sequence, row.logits)
        self._batch.n_tokens = len(batch.rows)

    def _put(self, at: int, token: int, position: int, sequence: int, logits: bool) -> None:
        self._batch.token[at] = token
        self._batch.pos[at] = position
        self._batch.n_seq_id[at] = 1
        self._batch.seq_id[at][0] = sequence
        self._batch.logits[at] = logits

    def _check_sequence(self, sequence: int) -> None:
        if not 0 <= sequence < self._sequences:
            raise InvalidInput("sequence", sequence, f"0 to {self._sequences - 1}")


class Tokens:
    """A model's vocabulary."""

    def __init__(self, api: Any, model: Any) -> None:
        self._api = api
        self._vocabulary = api.llama_model_get_vocab(model)
        self.size = int(api.llama_vocab_n_tokens(self._vocabulary))
        self._pieces: dict[int, bytes] = {}
        self._warmed = range(0)
        self._buffer = ctypes.create_string_buffer(_LONGEST_PIECE_BYTES)
        self._cached = lru_cache(_CACHED_PARTS)(self._tokenize_safely)

    def piece(self, token: int) -> bytes:
        """Return the token's text; b'' for control tokens."""
        found = self._pieces.get(token)
        if found is None:
            found = self._pieces[token] = self._text(token, control=False)
        return found

    def ends(self, token: int) -> bool:
        """Return whether an answer ends with this token: any control token."""
        return bool(self._api.llama_vocab_is_eog(self._vocabulary, token)) or self._is_control(
            token
        )

    @cached_property
    def first_bytes(self) -> npt.NDArray[np.int16]:
        """First byte of each token's text; -1 where it has none."""
        pieces = map(self.piece, range(self.size))
        return np.fromiter((piece[0] if piece else -1 for piece in pieces), np.int16, self.size)

    def warm(self) -> bool:
        """Look some more pieces up; True when all are known."""
        known = len(self._warmed)
        self._warmed = range(min(known + _WARM_TOKENS, self.size))
        for token in self._warmed[known:]:
            self.piece(token)
        if len(self._warmed) < self.size:
            return False
        return len(self.first_bytes) == self.size

    def tokenize(self, text: str, control: bool) -> tuple[int, ...]:
        """Return the tokens of `text`; control tokens in it count as such if `control`."""
        if len(text) <= _CACHED_PART_CHARS:
            return self._cached(text, control)
        return self._tokenize_safely(text, control)

    def _tokenize_safely(self, text: str, control: bool) -> tuple[int, ...]:
        data = text.encode(errors="replace")
        tokens = self._tokenize(data, control)
        return tuple(tokens) if control else tuple(self._disarm(tokens))

    def _tokenize(self, data: bytes, control: bool) -> list[int]:
        if not data:
            return []
        room = len(data) + 8
        buffer = (self._api.llama_token * room)()
        count = self._api.llama_tokenize(
            self._vocabulary, data, len(data), buffer, room, False, control
        )
        if count < 0:
            raise InvalidInput("text", len(data), "a text that can be tokenised")
        return list(buffer[:count])

    def _disarm(self, tokens: list[int]) -> list[int]:
        """Spell marks such as <tool_call> in pieces.

        The library takes control tokens for text when asked to, these never.
        """
        if not any(self._is_mark(token) for token in tokens):
            return tokens
        spelled: list[int] = []
        for token in tokens:
            if self._is_mark(token):
                text = self._text(token, control=True)
                spelled += self._tokenize(text[:1], False) + self._tokenize(text[1:], False)
            else:
                spelled.append(token)
        return spelled

    def _is_control(self, token: int) -> bool:
        attributes = self._api.llama_vocab_get_attr(self._vocabulary, token)
        return bool(
            attributes & (self._api.LLAMA_TOKEN_ATTR_CONTROL | self._api.LLAMA_TOKEN_ATTR_UNKNOWN)
        )

    def _is_mark(self, token: int) -> bool:
        attributes = self._api.llama_vocab_get_attr(self._vocabulary, token)
        if not attributes & self._api.LLAMA_TOKEN_ATTR_USER_DEFINED:
            return self._is_control(token)
        text = self._text(token, control=True)
        return text.startswith(b"<") and text.endswith(b">")

    def _text(self, token: int, control: bool) -> bytes:
        count = self._api.llama_token_to_piece(
            self._vocabulary, token, self._buffer, len(self._buffer), 0, control
        )
        if count < 0:  # longer than any token that can be of use
            return b""
        return self._buffer.raw[:count]
