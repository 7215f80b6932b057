"""What is heard on the bus, or nothing: one that cannot be read must not stop the others."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import structlog

from corefleet.bus import Incoming
from corefleet.codec import decode
from corefleet.errors import CorruptRecord

_log = structlog.get_logger(__name__)

M = TypeVar("M", bound=msgspec.Struct)


def heard(message: Incoming, kind: type[M], what: str) -> M | None:
    """Return the message as a `kind`; None, with a word in the log, when it is none.

    `what` names it for people.
    """
    try:
        return decode(message.payload, kind)
    except CorruptRecord as error:
        _log.warning(f"{what} is not usable", subject=message.subject, error=str(error))
        return None
