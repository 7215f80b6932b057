"""Adds the present form of new and changed messages to messages.json.

    python -m tests.unit.corefleet.golden

Never removes or changes an old form: those are what older programs wrote, and what is
stored. Refuses when an old form is no longer read as it was meant.
"""

from __future__ import annotations

import sys

from tests.unit.corefleet.golden.forms import PATH, Form, broken, dump, form_of, load
from tests.unit.corefleet.golden.samples import SAMPLES, message_types, name_of


def main() -> int:
    forms = load() if PATH.exists() else {}
    kinds = message_types()
    faults = [
        f"{name}: form {number}: {fault}"
        for name, known in forms.items()
        for number, form in enumerate(known)
        if (fault := broken(form, kinds.get(name))) is not None
    ]
    if faults:
        listed = "".join(f"\n  {fault}" for fault in faults)
        sys.stderr.write(f"not written: old bytes are no longer read as they were meant{listed}\n")
        return 1
    added = 0
    for sample in SAMPLES:
        known: list[Form] = forms.setdefault(name_of(type(sample)), [])
        form = form_of(sample)
        if form not in known:
            known.append(form)
            added += 1
    PATH.write_text(dump(forms), encoding="utf-8")
    sys.stdout.write(f"{added} forms added, {sum(map(len, forms.values()))} in all\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
