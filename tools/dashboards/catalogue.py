"""docs/metrics.md: what each metric means, made from the programs' registries."""

from __future__ import annotations

from pathlib import Path

from tools.dashboards.families import PREFIX, Exposed, exposed

FILE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"

_HEAD = """# Metrics

Made by `python -m tools.dashboards write` from what the programs register; a test compares. Each
program serves its own at `metrics` of its configuration. How to scrape, alert and draw:
[observability](observability.md). A histogram `NAME` has the series `NAME_bucket`, `NAME_sum` and
`NAME_count`. A controld counts what it does for its own shards and racks: sum over controlds.
"""

_TITLES = {"controld": "controld", "agentd": "agentd", "": "Both"}


def text() -> str:
    """Return the file."""
    parts = [_HEAD]
    families = exposed()
    programs: dict[str, set[str]] = {}
    for each in families:
        programs.setdefault(each.name, set()).add(each.program)
    for program, title in _TITLES.items():
        wanted = {program} if program else {"controld", "agentd"}
        found = {each.name: each for each in families if programs[each.name] == wanted}
        parts.append(_table(title, list(found.values())))
    return "\n".join(parts)


def _table(title: str, families: list[Exposed]) -> str:
    rows = [
        f"| `{each.name}` | {each.kind} | {', '.join(each.labels)} | {each.help} |"
        for each in families
        if each.name.startswith(PREFIX)
    ]
    others = [f"`{each.name}`" for each in families if not each.name.startswith(PREFIX)]
    lines = [f"## {title}", "", "| metric | kind | labels | |", "|---|---|---|---|", *rows]
    if others:
        lines += ["", f"And of the process itself: {', '.join(others)}."]
    return "\n".join([*lines, ""])
