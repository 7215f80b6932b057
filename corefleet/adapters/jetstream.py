"""JetStream's JSON: answers, error codes, and the configuration that streams must have."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar, cast

import msgspec

from corefleet.errors import CorefleetError, Fenced, Incompatible, StoreFull, Unavailable

T = TypeVar("T")

NO_MESSAGE = 10037

_FENCED = frozenset({10070, 10071, 10164})
"""Wrong last message id, wrong last sequence, and the same while another is in flight."""
_FULL = frozenset({10002, 10023, 10028, 10047})
"""Account, server, memory and storage resources exceeded."""
_STORE_FAILED = 10077
_SWITCHED_OFF = frozenset({10111, 10166, 10174})
"""Roll-up, time to live and atomic batches are not allowed on the stream."""


class ApiError(msgspec.Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = ""


class Ack(msgspec.Struct, frozen=True):
    """Answer to a publish."""

    seq: int = 0
    error: ApiError | None = None


class StreamState(msgspec.Struct, frozen=True):
    bytes: int = 0


class StreamAnswer(msgspec.Struct, frozen=True):
    """Answer to STREAM.INFO and STREAM.CREATE."""

    config: dict[str, Any] = {}
    state: StreamState = StreamState()
    error: ApiError | None = None


class StoredMessage(msgspec.Struct, frozen=True):
    subject: str
    seq: int
    data: bytes = b""


class MessageAnswer(msgspec.Struct, frozen=True):
    """Answer to STREAM.MSG.GET."""

    message: StoredMessage | None = None
    error: ApiError | None = None


class ConsumerAnswer(msgspec.Struct, frozen=True):
    """Answer to CONSUMER.CREATE."""

    error: ApiError | None = None


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def decode_answer(data: bytes, kind: type[T]) -> T:
    """Return the `kind` that `data` holds; raises Unavailable when it is something else."""
    try:
        return cast(T, _decoder(cast(Any, kind)).decode(data))
    except msgspec.DecodeError as error:
        raise Unavailable(f"JetStream: unreadable answer {data[:80]!r}: {error}") from error


def answer_error(error: ApiError, what: str) -> CorefleetError:
    """Return the exception for an error that JetStream answered about `what`."""
    story = f"{what}: {error.description} (JetStream {error.err_code})"
    if error.err_code in _FENCED:
        return Fenced(story)
    full = error.err_code == _STORE_FAILED and (
        "maximum" in error.description or "no space" in error.description
    )
    if full or error.err_code in _FULL:
        return StoreFull(story)
    if error.err_code in _SWITCHED_OFF:
        return Incompatible(story)
    return Unavailable(story)


def stream_config(name: str, subjects: str, replicas: int, max_bytes: int) -> dict[str, object]:
    """Return how a stream is created: it drops nothing that it accepted.

    docs/architecture.md, rules 3 and 5.
    """
    return {
        "name": name,
        "subjects": [subjects],
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "num_replicas": replicas,
        "max_bytes": max_bytes,
        "max_age": 0,
        "max_msgs": -1,
        "max_msgs_per_subject": -1,
        "max_consumers": -1,
        "allow_direct": True,
        "allow_rollup_hdrs": True,
        "allow_msg_ttl": True,
        "allow_atomic": True,
        "deny_purge": False,
        "sealed": False,
    }


def wrong_setting(found: dict[str, Any], expected: dict[str, object]) -> str | None:
    """Name the first setting of a stream that cannot be worked with, or None.

    A size limit and more replicas than asked for are the operator's to choose.
    """
    for key, wanted in expected.items():
        if key == "max_bytes":
            continue
        value = found.get(key, type(wanted)())
        if value != wanted and not (
            key == "num_replicas" and isinstance(wanted, int) and value > wanted
        ):
            return f"{key} is {value!r}; expected {wanted!r}"
    return None
