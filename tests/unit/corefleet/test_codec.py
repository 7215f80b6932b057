"""Bytes that are no record are an error that names the record."""

from __future__ import annotations

import pytest

from corefleet import codec
from corefleet.errors import CorruptRecord
from corefleet.messages.records import OwnerMark

MARK = OwnerMark(shard=63, epoch=9, controld="c1")


def test_a_message_survives_the_round() -> None:
    assert codec.decode(codec.encode(MARK), OwnerMark) == MARK
    assert codec.decode(memoryview(codec.encode(MARK)), OwnerMark) == MARK


def test_records_are_maps_by_field_name() -> None:
    """An array would break at the first field that is added in the middle."""
    assert codec.decode(codec.encode(MARK), dict) == {"shard": 63, "epoch": 9, "controld": "c1"}


@pytest.mark.parametrize("cut", range(len(codec.encode(MARK))))
def test_every_truncation_is_an_error(cut: int) -> None:
    with pytest.raises(CorruptRecord, match="OwnerMark"):
        codec.decode(codec.encode(MARK)[:cut], OwnerMark)


@pytest.mark.parametrize(
    "data", [b"\xc1", b"\x01", codec.encode(MARK) + b"\x00", codec.encode({"shard": "63"})]
)
def test_other_bytes_are_an_error(data: bytes) -> None:
    with pytest.raises(CorruptRecord, match=rf"OwnerMark: .* in {len(data)} bytes"):
        codec.decode(data, OwnerMark)
