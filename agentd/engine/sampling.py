"""Choosing the next token from a row of logits."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from agentd.engine.output import Output
from corefleet.errors import CorefleetError, ModelUnusable

Row = npt.NDArray[np.float32]

CANDIDATES = 64
"""Tokens that sampling with a temperature chooses from, the likeliest."""


class Vocabulary(Protocol):
    """What is known of a model's tokens."""

    @property
    def first_bytes(self) -> npt.NDArray[np.int16]:
        """First byte of each token's text; -1 where it has none."""

    def piece(self, token: int) -> bytes:
        """Return the token's text; b'' for control tokens."""

    def ends(self, token: int) -> bool:
        """Return whether the token is a control token: each ends an answer."""


def choose(
    row: Row, vocabulary: Vocabulary, output: Output, temperature: float, random: Any
) -> int:
    """Return the next token: the likeliest at temperature 0, else drawn with `random`.

    Only the chosen token is checked against the grammar; on a miss the likely ones are, and
    at last all that begin with a byte that may follow. `random` is a numpy Generator.
    Raises ModelUnusable when the logits are no numbers.
    """
    if temperature <= 0:
        token = int(row.argmax())
        _require_number(row[token])
        if _allowed(token, vocabulary, output):
            return token
        for other in _likeliest(row):
            if _allowed(other, vocabulary, output):
                return other
        return _search(row, vocabulary, output)
    likeliest = _likeliest(row)
    _require_number(row[likeliest[0]])
    weights = np.exp((row[likeliest].astype(np.float64) - row[likeliest[0]]) / temperature)
    while likeliest:
        at = int(np.searchsorted(weights.cumsum(), random.random() * weights.sum(), side="right"))
        at = min(at, len(likeliest) - 1)
        if _allowed(likeliest[at], vocabulary, output):
            return likeliest[at]
        del likeliest[at]
        weights = np.delete(weights, at)
    return _search(row, vocabulary, output)


def _likeliest(row: Row) -> list[int]:
    count = min(CANDIDATES, len(row))
    best = np.argpartition(row, len(row) - count)[-count:]
    order: list[int] = best[np.argsort(-row[best], kind="stable")].tolist()
    return order


def _search(row: Row, vocabulary: Vocabulary, output: Output) -> int:
    """Return the likeliest token of all that the grammar allows."""
    wanted = [*output.next_bytes(), *((-1,) if output.allows_end() else ())]
    fitting = np.flatnonzero(np.isin(vocabulary.first_bytes, wanted))
    for token in fitting[np.argsort(-row[fitting], kind="stable")].tolist():
        if _allowed(token, vocabulary, output):
            return int(token)
    raise CorefleetError("no token of the vocabulary continues the document")


def _allowed(token: int, vocabulary: Vocabulary, output: Output) -> bool:
    if vocabulary.ends(token):
        return output.allows_end()
    return output.allows(vocabulary.piece(token))


def _require_number(value: np.float32) -> None:
    if not np.isfinite(value):
        raise ModelUnusable(f"the model's logits are {value}: its weights are damaged")
