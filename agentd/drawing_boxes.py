"""Boxes, wrapped lists and folded repetitions for drawings in plain text. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from agentd.core.cpulist import format_list

FOLD_ABOVE = 4
"""A run of equal blocks longer than this is folded."""
SHOWN_OF_RUN = 2
"""Blocks of a folded run that are drawn."""

_TO_ASCII = str.maketrans({"╭": "+", "╮": "+", "╰": "+", "╯": "+", "─": "-", "│": "|", "┼": "+"})


@dataclass(slots=True, frozen=True)
class Block:
    """A drawn part of the machine. Blocks of one `shape` differ in numbers alone."""

    noun: str
    """In the plural, e.g. `domains`."""
    names: tuple[str, ...]
    cpus: tuple[int, ...]
    lines: tuple[str, ...]
    shape: Hashable
    bytes_each: tuple[int, ...] = field(default=())


def in_ascii(text: str) -> str:
    """Return `text` with the characters that this module draws with replaced by ASCII ones."""
    return text.translate(_TO_ASCII).encode("ascii", "replace").decode()


def shortened(text: str, width: int) -> str:
    """Return `text` in one line of at most `width` printable characters."""
    clean = "".join(letter if letter.isprintable() else "?" for letter in text)
    return clean if len(clean) <= width else f"{clean[: max(width - 2, 0)]}.."[:width]


def box(title: str, lines: Sequence[str], width: int) -> tuple[str, ...]:
    """Return `lines` in a box `width` wide; they are cut at `width` - 4."""
    head = f"─ {shortened(title, width - 6)} "
    inner = width - 4
    return (
        f"╭{head:─<{width - 2}}╮",
        *(f"│ {shortened(line, inner):<{inner}} │" for line in lines),
        f"╰{'':─<{width - 2}}╯",
    )


def wrapped(head: str, items: Sequence[str], width: int, separator: str = " ") -> list[str]:
    """Return `items` after `head`; further lines are indented as deep as `head`."""
    lines = [head]
    fresh = True
    for item in items:
        part = item if fresh else separator + item
        if not fresh and len(lines[-1]) + len(part.rstrip()) > width:
            lines[-1] = lines[-1].rstrip() + separator.rstrip()
            lines.append(" " * len(head) + item)
        else:
            lines[-1] += part
        fresh = False
    return lines


def prose(head: str, text: str, width: int) -> list[str]:
    """Return the words of `text` after `head`, wrapped; a longer word is cut."""
    words = [shortened(word, width - len(head)) for word in text.split()]
    return wrapped(head, words, width)


def cpu_text(cpus: Sequence[int], width: int, noun: str = "CPUs") -> str:
    """Return `cpus` as a kernel list, or its beginning and the number of them."""
    text = format_list(cpus)
    if len(text) <= width:
        return text
    tail = f",.. ({len(cpus)} {noun})"
    return text[: max(width - len(tail), 1)].rpartition(",")[0] + tail


def size_text(size: int) -> str:
    """Return a number of bytes in the largest unit that fits: `31.2 GiB`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.1f} {unit}" if unit != "B" else f"{size} B"
        value /= 1024
    return f"{value:.1f} TiB"


def page_text(kilobytes: int) -> str:
    """Return a page size: `4 KiB`, `2 MiB`, `1 GiB`."""
    for factor, unit in ((1 << 20, "GiB"), (1 << 10, "MiB")):
        if kilobytes >= factor and kilobytes % factor == 0:
            return f"{kilobytes // factor} {unit}"
    return f"{kilobytes} KiB"


def folded(blocks: Sequence[Block], width: int) -> list[str]:
    """Return the lines of all blocks; of a long run of one shape, the first and a count."""
    lines: list[str] = []
    for _, run in groupby(blocks, key=lambda block: block.shape):
        alike = list(run)
        shown = alike if len(alike) <= FOLD_ABOVE else alike[:SHOWN_OF_RUN]
        for block in shown:
            lines += block.lines
        rest = alike[len(shown) :]
        if rest:
            lines.append(shortened(_more(rest, width), width))
    return lines


def _more(rest: Sequence[Block], width: int) -> str:
    names = [name for block in rest for name in block.names]
    plain = all(name.isdecimal() for name in names)
    which = cpu_text([*map(int, names)], width // 4, rest[0].noun) if plain else ""
    parts = [f"  x {len(rest)} more like this: {rest[0].noun} {which}".rstrip()]
    sizes = [size for block in rest for size in block.bytes_each]
    if sizes:
        low, high = size_text(min(sizes)), size_text(max(sizes))
        parts.append(f"{low} each" if low == high else f"{low} to {high} each")
    cpus = [cpu for block in rest for cpu in block.cpus]
    if cpus:
        parts.insert(1, f"CPUs {cpu_text(cpus, width // 4)}")
    return ", ".join(parts)
