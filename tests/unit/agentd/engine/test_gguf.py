"""Model files that the library would abort over are found by their header."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from agentd.engine.gguf import check_header
from corefleet.errors import ModelUnusable


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(*entries: bytes, version: int = 3, tensors: int = 1, count: int | None = None) -> bytes:
    number = len(entries) if count is None else count
    return b"GGUF" + struct.pack("<IQQ", version, tensors, number) + b"".join(entries)


def layers(count: int) -> bytes:
    return text("llama.block_count") + struct.pack("<II", 4, count)


NAME = text("general.name") + struct.pack("<I", 8) + text("model")
SIZE = text("general.size") + struct.pack("<IQ", 10, 1)
WORDS = text("general.tags") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
NUMBERS = text("general.n") + struct.pack("<IIQ", 9, 4, 2) + struct.pack("<II", 1, 2)
TOKENIZER = text("tokenizer.ggml.model") + b"whatever follows"


@pytest.mark.parametrize(
    "data",
    [
        header(NAME, SIZE, WORDS, NUMBERS, layers(24)),
        header(layers(512), TOKENIZER, count=90),
        header(NAME, version=2),
    ],
)
def test_a_good_header_passes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    check_header(path)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "does not begin with GGUF"),
        (b"PK\x03\x04 a zip file", "does not begin with GGUF"),
        (b"GGUF\x03\x00", "damaged"),
        (header(NAME, version=1), "version 1; expected 2 or 3"),
        (header(NAME, tensors=0), "0 tensors"),
        (header(NAME, count=1 << 40), "entries"),
        (header(layers(100_000)), "block_count is 100000; expected 1 to 512"),
        (header(layers(0)), "block_count is 0"),
        (header(NAME, count=2), "damaged"),
        (header(NAME[:-2]), "ends within"),
        (header(text("x" * 8) + struct.pack("<I", 77)), "unknown type 77"),
        (header(struct.pack("<Q", 1 << 60)), "a text of"),
        (header(text("a") + struct.pack("<IIQ", 9, 4, 1 << 60)), "an array of"),
        (header(struct.pack("<Q", 2) + b"\xff\xff"), "damaged"),
    ],
)
def test_a_bad_header_is_named(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelUnusable, match=reason) as caught:
        check_header(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match="no such file"):
        check_header(tmp_path / "absent.gguf")
    with pytest.raises(ModelUnusable, match="not readable"):
        check_header(tmp_path)
