"""The golden file: for each message type the forms it ever had, as bytes and meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from corefleet import codec
from corefleet.errors import CorruptRecord

PATH = Path(__file__).with_name("messages.json")


class Form(msgspec.Struct, frozen=True):
    """Bytes as some version wrote them (hex), and the fields that they set."""

    bytes: str
    means: dict[str, Any]


def form_of(message: msgspec.Struct) -> Form:
    return Form(codec.encode(message).hex(), _meaning(message))


def broken(form: Form, kind: type[msgspec.Struct] | None) -> str | None:
    """Return why the form is not read as it was meant, or None if it is."""
    if kind is None:
        return "the message type is gone"
    try:
        read = codec.decode(bytes.fromhex(form.bytes), kind)
    except CorruptRecord as error:
        return str(error)
    means = _meaning(read)
    return None if means == form.means else f"read as {means}; meant {form.means}"


def load() -> dict[str, list[Form]]:
    return msgspec.json.decode(PATH.read_bytes(), type=dict[str, list[Form]])


def dump(forms: dict[str, list[Form]]) -> str:
    return json.dumps(msgspec.to_builtins(forms), indent=1, sort_keys=True) + "\n"


def _meaning(message: msgspec.Struct) -> dict[str, Any]:
    return msgspec.json.decode(msgspec.json.encode(message), type=dict[str, Any])
