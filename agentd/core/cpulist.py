"""CPU and node lists as the kernel writes them, `0-3,8`, and masks. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from corefleet.errors import InvalidInput

_PART = re.compile(r"(\d+)(?:-(\d+)(?::(\d+)/(\d+))?)?\Z")
_PLAIN = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?\Z")
"""Nearly all lists are one range: read without sets."""
_MASK = re.compile(r"(?:0x)?[0-9a-fA-F]+(?:,[0-9a-fA-F]{8})*\Z")
_MOST = 1 << 16
_MOST_DIGITS = _MOST // 4


def parse_list(text: str, field: str) -> tuple[int, ...]:
    """Return the sorted numbers that `text` lists; '' lists none.

    Raises InvalidInput naming `field` for anything but `a`, `a-b` and `a-b:used/group`
    separated by commas.
    """
    if match := _PLAIN.match(text.strip()):
        first, last = int(match[1]), int(match[2] or match[1])
        if first <= last < _MOST:
            return tuple(range(first, last + 1))
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if not part.strip():
            continue
        match = _PART.match(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or last < first or last >= _MOST:
            raise InvalidInput(field, text, "a list such as 0-3,8")
        used, group = int(match[3] or 1), int(match[4] or 1)
        if group < 1 or not 1 <= used <= group:
            raise InvalidInput(field, text, "groups such as 0-31:2/4")
        numbers.update(n for n in range(first, last + 1) if (n - first) % group < used)
    return tuple(sorted(numbers))


def parse_mask(text: str, field: str) -> tuple[int, ...]:
    """Return the sorted numbers of the bits set in a mask such as `000f,ff000fff`.

    Groups are 32 bits wide, the highest first; only the first may be shorter. '' has none.
    Raises InvalidInput naming `field` for anything else.
    """
    mask = text.strip()
    if not mask:
        return ()
    if len(mask) > _MOST_DIGITS or not _MASK.match(mask):
        raise InvalidInput(field, mask[:80], "a mask such as 000f,ff000fff")
    bits = int(mask.replace(",", ""), 16)
    numbers = []
    while bits:
        lowest = bits & -bits
        numbers.append(lowest.bit_length() - 1)
        bits ^= lowest
    return tuple(numbers)


def format_list(numbers: Iterable[int]) -> str:
    """Return `numbers` as the shortest list: `0-3,8`."""
    parts: list[str] = []
    start = end = -2
    for number in (*sorted(set(numbers)), -1):
        if number == end + 1:
            end = number
            continue
        if start >= 0:
            parts.append(str(start) if start == end else f"{start}-{end}")
        start = end = number
    return ",".join(parts)
