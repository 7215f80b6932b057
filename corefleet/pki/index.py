"""The index of issued certificates: JSON lines, appended and synced before any is handed out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from corefleet.errors import CorruptRecord
from corefleet.identity import Role
from corefleet.pki.certificates import Issued
from corefleet.pki.files import SECRET

_NEWLINE = b"\n"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One certificate that was issued. Times are seconds since 1970, UTC."""

    serial: str
    role: Role
    name: str
    hosts: tuple[str, ...]
    not_before_s: int
    not_after_s: int
    ca: str
    """Id of the CA that signed it."""


def entry_of(issued: Issued) -> Entry:
    """Return what the index keeps of a certificate."""
    return Entry(
        serial=issued.serial,
        role=issued.identity.role,
        name=issued.identity.name,
        hosts=issued.hosts,
        not_before_s=issued.not_before_s,
        not_after_s=issued.not_after_s,
        ca=issued.ca,
    )


def append(path: Path, entries: Iterable[Entry]) -> None:
    """Append and sync. A line that a crash left unfinished goes: its certificate never left."""
    encode = msgspec.json.encode
    lines = b"".join(encode(entry) + _NEWLINE for entry in entries)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, SECRET), "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if file.read(1) != _NEWLINE:
                file.seek(0)
                file.truncate(file.read().rfind(_NEWLINE) + 1)
                file.seek(0, os.SEEK_END)
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Entry]:
    """Return all entries, oldest first; raises CorruptRecord naming file and line."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    decoder = msgspec.json.Decoder(Entry)
    entries = []
    for number, line in enumerate(content.split(_NEWLINE)[:-1], 1):
        try:
            entries.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise CorruptRecord(f"{path}, line {number}: {error}; expected an entry") from None
    return entries


def newest(entries: Sequence[Entry]) -> list[Entry]:
    """Return the last entry of each identity, in the order of roles and names."""
    last = {(entry.role, entry.name): entry for entry in entries}
    return [last[key] for key in sorted(last)]
