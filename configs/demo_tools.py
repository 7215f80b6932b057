"""A tool in Python: this file is all that it takes."""

from __future__ import annotations

from corefleet.errors import ToolFailed
from corefleet.tool import tool


@tool
def count_letter(word: str, letter: str) -> int:
    """Count how often a letter occurs in a word.

    Args:
        word: The word to look at.
        letter: One letter; upper and lower case count the same.
    """
    if len(letter) != 1:
        raise ToolFailed(f"letter: {letter!r}; expected exactly one")
    return word.lower().count(letter.lower())
