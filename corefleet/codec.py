"""Encoding of every message on NATS, on Unix sockets and in the stores: MessagePack.

Records are maps keyed by field name, so that version N reads what N+1 wrote
(unknown fields are skipped) and N+1 reads what N wrote (missing fields default).
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import msgspec

from corefleet.errors import CorruptRecord

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


def encode(message: object) -> bytes:
    """Return `message` (a msgspec Struct) as MessagePack bytes."""
    return _encoder.encode(message)


_decoders: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {}


def _decoder(kind: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    return decoder


def decode(data: bytes | memoryview, kind: type[T]) -> T:
    """Return the `kind` that `data` holds; raises CorruptRecord naming both."""
    try:
        return cast(T, _decoder(kind).decode(data))
    except msgspec.DecodeError as error:
        raise CorruptRecord(f"{kind.__name__}: {error} in {len(data)} bytes") from error
