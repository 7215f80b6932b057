"""How `agentctl pki` prints what it did and saw."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from agentctl.output import as_json, data, say
from corefleet.identity import Identity
from corefleet.pki import CertificateAuthority, index
from corefleet.pki.batch import Change, Lack
from corefleet.pki.inspection import Seen

DAY_S = 86_400


def show_outcome(
    changes: Sequence[Change], bundle_changed: bool, unchanged: int, json_out: bool
) -> None:
    """Print what was made and why."""
    if json_out:
        as_json(
            {
                "changed": bool(changes) or bundle_changed,
                "bundle_changed": bundle_changed,
                "issued": [
                    entry_json(index.entry_of(each.issued))
                    | {"reason": each.reason, "cert": str(each.cert)}
                    for each in changes
                ],
                "unchanged": unchanged,
            }
        )
        return
    for each in changes:
        data(f"{each.issued.identity}: {each.cert}, until {date(each.issued.not_after_s)}")
        say(f"{each.issued.identity}: {each.reason}")
    say(f"{len(changes)} made, {unchanged} good already")


def show_plan(
    missing: Sequence[Lack], bundle_differs: bool, unchanged: int, json_out: bool
) -> None:
    """Print what would be made and why."""
    if json_out:
        as_json(
            {
                "changed": bool(missing) or bundle_differs,
                "would_issue": [
                    {"role": each.want.identity.role, "name": each.want.identity.name,
                     "hosts": list(each.want.hosts), "reason": each.reason}
                    for each in missing
                ],
                "unchanged": unchanged,
            }
        )  # fmt: skip
        return
    for each in missing:
        data(f"{each.want.identity}: {each.reason}")
    say(f"{len(missing)} would be made, {unchanged} are good")


def entry_json(entry: index.Entry) -> dict[str, Any]:
    """Return an entry of the index as plain data."""
    return {
        "role": entry.role, "name": entry.name, "hosts": list(entry.hosts), "ca": entry.ca,
        "serial": entry.serial, "not_before": date(entry.not_before_s),
        "not_after": date(entry.not_after_s), "not_after_s": entry.not_after_s,
    }  # fmt: skip


def _who(seen: Seen) -> Identity | str:
    return seen.facts.identity or seen.facts.subject


def seen_row(seen: Seen) -> tuple[object, ...]:
    """Return a certificate as a row: file, who, issuer, hosts, end, days left, problems."""
    return (
        seen.file, _who(seen), seen.facts.issuer, " ".join(seen.facts.hosts) or "-",
        date(seen.facts.not_after_s), whole_days(seen.left_s), ", ".join(seen.problems) or "-",
    )  # fmt: skip


def seen_json(seen: Seen) -> dict[str, Any]:
    """Return a certificate as plain data."""
    return {
        "file": str(seen.file), "who": str(_who(seen)), "subject": seen.facts.subject,
        "issuer": seen.facts.issuer, "ca": seen.facts.issuer_ca, "is_ca": seen.facts.is_ca,
        "hosts": list(seen.facts.hosts), "serial": seen.facts.serial,
        "not_after": date(seen.facts.not_after_s), "days_left": whole_days(seen.left_s),
        "problems": list(seen.problems),
    }  # fmt: skip


def date(seconds: float) -> str:
    """Return seconds since 1970 as a date that sorts, UTC."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


def whole_days(seconds: float) -> int:
    """Return whole days, rounded down."""
    return int(seconds // DAY_S)


def show_state(ca: CertificateAuthority, changed: bool, json_out: bool) -> None:
    """Print which CA signs, and who still has only the old one's certificates."""
    state = ca.state
    old = state.other if state.phase == "switched" else ""
    left = ca.left_behind(old) if old else []
    if json_out:
        holders = [f"{entry.role}/{entry.name}" for entry in left]
        as_json(
            {"changed": changed, "phase": state.phase, "signer": state.signer,
             "other": state.other, "left_behind": holders}
        )  # fmt: skip
        return
    other = f", {state.other} is trusted too" if state.other else ""
    data(f"{state.phase}: {state.signer} signs{other}")
    if old:
        say(f"{len(left)} holders have only certificates of the old CA")
