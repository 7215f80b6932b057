"""What must not leave a site in a bug report: secrets, wherever they stand in a text.

Names of hosts, nodes, pools and sessions stay: without them nothing can be found out. Inputs
and answers of tasks are in none of the sources that are collected.
"""

from __future__ import annotations

import re

MARK = "<redacted>"

_SECRET_WORDS = (
    r"password|passwd|passphrase|secret|token(?!s)|credential|api[_-]?key|authorization|cookie"
)
_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    # A whole block, or what a log has cut of it.
    (
        re.compile(
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
            re.DOTALL,
        ),
        MARK,
    ),
    # scheme://user:password@host
    (re.compile(r"(?<=://)[^/\s\"'@]+@"), f"{MARK}@"),
    # JSON Web Tokens: three parts of base64url, the first one of an object.
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?"), MARK),
    (re.compile(r"\b([Bb]earer|[Bb]asic)\s+[\w.~+/=-]{8,}"), rf"\1 {MARK}"),
    # key = "value", key: value, "key": "value", --key value, KEY=value
    (
        re.compile(
            rf"(?i)((?<![\w])[\w.-]*(?:{_SECRET_WORDS})(?![\w-]*(?:file|path|ttl|_s\b))[\w-]*[\"']?"
            rf"(?:\s*[=:]\s*|\s+(?=[\"'])))(\"[^\"\n]*\"|'[^'\n]*'|[^\s,}}\]]+)"
        ),
        rf"\1{MARK}",
    ),
)


def redact(text: str) -> str:
    """Return `text` without its secrets. Applied again it changes nothing."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text
