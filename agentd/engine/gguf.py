"""A look at a model file before the library maps it.

The library aborts the process over some headers; these are found here instead. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from corefleet.errors import ModelUnusable

MAX_LAYERS = 512
_MAX_COUNT = 1 << 20
_MAX_TEXT_BYTES = 1 << 20
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_INTEGERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
_TEXT, _ARRAY = 8, 9


def check_header(path: Path) -> None:
    """Raise ModelUnusable, naming the file and why, unless `path` begins as a model does."""
    try:
        with path.open("rb") as file:
            _check(file)
    except FileNotFoundError:
        raise ModelUnusable(f"{path}: no such file") from None
    except OSError as error:
        raise ModelUnusable(f"{path}: not readable: {error.strerror}") from error
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise ModelUnusable(f"{path}: the file's header is damaged: {error}") from error


def _check(file: BinaryIO) -> None:
    if file.read(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version, tensors, entries = _read(file, "<I"), _read(file, "<Q"), _read(file, "<Q")
    if version not in (2, 3):
        raise ValueError(f"version {version}; expected 2 or 3")
    if not 0 < tensors < _MAX_COUNT or not 0 < entries < _MAX_COUNT:
        raise ValueError(f"{tensors} tensors and {entries} entries")
    for _ in range(entries):
        key = _read_text(file)
        if key.startswith("tokenizer."):
            return  # long, and after what matters here
        kind = _read(file, "<I")
        if key.endswith(".block_count"):
            layers = _read(file, _INTEGERS.get(kind, "<I"))
            if not 0 < layers <= MAX_LAYERS:
                raise ValueError(f"{key} is {layers}; expected 1 to {MAX_LAYERS}")
        else:
            _skip(file, kind)


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == _TEXT:
        _read_text(file)
        return
    if kind != _ARRAY:
        file.seek(_size(kind), 1)
        return
    inner, count = _read(file, "<I"), _read(file, "<Q")
    if count > _MAX_COUNT:
        raise ValueError(f"an array of {count} values")
    if inner == _TEXT:
        for _ in range(count):
            _read_text(file)
    else:
        file.seek(_size(inner) * count, 1)


def _size(kind: int) -> int:
    if kind not in _SIZES:
        raise ValueError(f"a value of unknown type {kind}")
    return _SIZES[kind]


def _read(file: BinaryIO, form: str) -> int:
    value: int = struct.unpack(form, file.read(struct.calcsize(form)))[0]
    return value


def _read_text(file: BinaryIO) -> str:
    length = _read(file, "<Q")
    if length > _MAX_TEXT_BYTES:
        raise ValueError(f"a text of {length} bytes")
    data = file.read(length)
    if len(data) < length:
        raise ValueError("the file ends within it")
    return data.decode()
