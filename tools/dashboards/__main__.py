"""Grafana's dashboards and the list of metrics, made from one source.

\b
python -m tools.dashboards write           configs/grafana/*.json and docs/metrics.md
python -m tools.dashboards check           exit code 1 if one of them is not up to date
python -m tools.dashboards render          docs/images/dashboard-*.png from a real run
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import click

from tools.dashboards import catalogue, grafana


@click.group(help=__doc__)
def main() -> None:
    """Choose."""


@main.command()
def write() -> None:
    """Write all files that are made here."""
    for path, text in made().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@main.command()
def check() -> None:
    """Name what is not up to date."""
    old = stale()
    for path in old:
        print(f"{path}: not up to date; run: python -m tools.dashboards write", file=sys.stderr)
    raise SystemExit(1 if old else 0)


@main.command()
@click.option("--seconds", default=75.0, show_default=True, type=click.FloatRange(min=10.0))
@click.argument("names", nargs=-1)
def render(seconds: float, names: tuple[str, ...]) -> None:
    """Draw dashboards (all, or those of NAMES) from a run of so many seconds."""
    try:
        # Only this needs matplotlib, which is an extra.
        renderer = import_module("tools.dashboards.render")
    except ImportError as error:
        raise click.ClickException(f"{error}; install the extra `dashboards`") from error
    print(renderer.show(renderer.render(seconds, names)))


def made() -> dict[Path, str]:
    """Return all files that are made here, with their text."""
    return grafana.files() | {catalogue.FILE: catalogue.text()}


def stale() -> list[Path]:
    """Return those that are missing or differ."""
    return [
        path
        for path, text in made().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]


if __name__ == "__main__":
    main()
