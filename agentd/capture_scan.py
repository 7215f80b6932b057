"""Looks for what must not be in a capture: whose machine it is. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_ANY = re.IGNORECASE
_PATTERNS = (
    # Four groups or more: Ethernet and InfiniBand addresses, and IPv6.
    ("a network address", re.compile(r"(?<![\w:])(?:[0-9a-f]{1,4}::?){3,}[0-9a-f]{1,4}\b", _ANY)),
    ("a MAC address", re.compile(r"\b[0-9a-f]{2}(?:-[0-9a-f]{2}){5}\b", _ANY)),
    ("a UUID", re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", _ANY)),
    ("a machine or container id", re.compile(r"(?<![0-9a-f])[0-9a-f]{32,}(?![0-9a-f])", _ANY)),
    ("an IP address", re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])")),
)  # fmt: skip

# A host that is called as the kernel calls its own parts cannot be told from them.
_KERNEL_WORD = re.compile(r"(cpu|node|core|socket|package|mc|memory|linux|localhost)?[\d-]*\Z")
_NO_SERIAL = re.compile(
    r"(0+|none|n/?a|unknown|default string|system serial number|not (specified|applicable|"
    r"available|present|settable)|to be filled.*|(o\.?e\.?m\.?|chassis|board).*|0?123456789.*)\Z",
    re.IGNORECASE,
)
_SHORTEST_SERIAL = 5
_SHORTEST_NAME = 2


@dataclass(slots=True, frozen=True)
class Identity:
    """Words that tell whose machine it is: what each is, and the word."""

    words: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(
        cls, host_names: Iterable[str], serials: Iterable[str], addresses: Iterable[str]
    ) -> Identity:
        """Return those of the words that name one machine; placeholders do not."""
        words: dict[str, str] = {}
        for name in host_names:
            for word in {name.strip().lower(), name.strip().lower().partition(".")[0]}:
                if len(word) >= _SHORTEST_NAME and not _KERNEL_WORD.match(word):
                    words[word] = "the host name"
        for serial in serials:
            word = serial.strip().lower()
            if len(word) >= _SHORTEST_SERIAL and not _NO_SERIAL.match(word):
                words[word] = "a serial number of this machine"
        for address in addresses:
            word = address.strip().lower()
            if word.strip("0:"):
                words[word] = "a network address of this machine"
        return cls(tuple((what, word) for word, what in sorted(words.items())))


def telltales(files: Mapping[str, str], identity: Identity) -> list[str]:
    """Return a line for each file that tells whose machine it is: its path and what it holds.

    `files` maps path to text; the paths are looked through, too.
    """
    known = {word: what for what, word in identity.words}
    # Longest first: of two words that begin alike, the whole one is found.
    either = "|".join(re.escape(word) for word in sorted(known, key=len, reverse=True))
    own = re.compile(rf"(?<![a-z0-9])(?:{either})(?![a-z0-9])") if either else None
    found = []
    for path, text in files.items():
        for part in (path, text):
            hit = own.search(part.lower()) if own else None
            if hit:
                found.append(f"{path}: {known[hit.group()]}, {hit.group()!r}")
            for what, pattern in _PATTERNS:
                match = pattern.search(part)
                if match and len(set(match.group().lower())) > 1:
                    found.append(f"{path}: {what}, {match.group()!r}")
    return found
