"""The audit log: one record of every call that changes something, and of every one denied.

Records are lines of the logger `corefleet.audit`, in the journal entries with AUDIT=1; no
log level silences them. They never hold inputs, tokens, or messages of errors.
"""

from __future__ import annotations

from collections.abc import Sequence

from corefleet.logs import audit

OK = "OK"

_LONGEST = 300
_IDS_A_RECORD = 256


class Audit:
    """Writes the records of one call; `who` is '' when nobody knows."""

    __slots__ = ("_beside", "_peer", "_who")

    def __init__(self, who: str, peer: str, beside: str = "") -> None:
        self._who = _shown(who)
        self._peer = peer
        self._beside = {"identity": beside} if beside else {}

    def ended(self, method: str, verb: str, result: str, ms: float, facts: dict[str, str]) -> None:
        """Write that a call ended: `result` is OK or the name of a gRPC code."""
        shown = {key: _shown(value) for key, value in facts.items() if value}
        audit(
            method, who=self._who, **self._beside, peer=self._peer, verb=verb,
            **shown, result=result, ms=round(ms, 3),
        )  # fmt: skip

    def submissions(self, pool: str, result: str, ms: float, ids: Sequence[str]) -> None:
        """Write what became of submissions of a stream to one pool; `ms` is the slowest one's.

        `ids` are tasks, or request ids when the submissions were refused.
        """
        key = "tasks" if result == OK else "requests"
        for start in range(0, len(ids), _IDS_A_RECORD):
            part = ids[start : start + _IDS_A_RECORD]
            audit(
                "SubmitStream", who=self._who, **self._beside, peer=self._peer,
                verb="submit", pool=_shown(pool), result=result, ms=round(ms, 3),
                count=len(part), **{key: " ".join(map(_shown, part))},
            )  # fmt: skip


def _shown(value: str) -> str:
    """Return a text from outside so that it stays one word of one line."""
    if len(value) <= _LONGEST and value.isprintable() and " " not in value:
        return value
    return ascii(value[:_LONGEST]).replace(" ", "\\x20")
