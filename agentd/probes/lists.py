"""Reads a kernel list or mask and survives one that is nonsense."""

from __future__ import annotations

from collections.abc import Callable

from agentd.core.cpulist import parse_list, parse_mask
from agentd.core.fold import Facts
from agentd.hostfs import HostFs
from corefleet.errors import InvalidInput

_NOTHING = frozenset({"", "(null)", "\0"})
"""What kernels print for an unset list: 4.x to 6.x print `(null)` for nohz_full."""


def read_list(host: HostFs, path: str, facts: Facts) -> tuple[int, ...] | None:
    """Return the numbers listed in the file at `path`; None, with a warning, for nonsense."""
    text = host.attribute(path)
    return None if text is None else list_in(text, path, facts)


def list_in(text: str, where: str, facts: Facts) -> tuple[int, ...] | None:
    """Return the numbers that `text` lists; None, with a warning naming `where`."""
    if text.strip() in _NOTHING:
        return ()
    return _survived(parse_list, text, where, facts)


def read_mask(host: HostFs, path: str, facts: Facts) -> tuple[int, ...] | None:
    """Return the bits set in the mask at `path`; None, with a warning, for nonsense."""
    text = host.attribute(path)
    return None if text is None else mask_in(text, path, facts)


def mask_in(text: str, where: str, facts: Facts) -> tuple[int, ...] | None:
    """Return the bits set in the mask `text`; None, with a warning naming `where`."""
    return _survived(parse_mask, text, where, facts)


def _survived(
    parse: Callable[[str, str], tuple[int, ...]], text: str, where: str, facts: Facts
) -> tuple[int, ...] | None:
    try:
        return parse(text, where)
    except InvalidInput as error:
        facts.warnings.append(str(error))
        return None
