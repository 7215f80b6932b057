"""The view of `agentctl top` as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

MOST_CONTROLDS = 12
"""Shown one by one: the busiest, and first those that did not answer."""


def screen(view: dict[str, Any]) -> Group:
    """Return a view (agentctl.overview) for people: three parts, one under the other."""
    parts: list[RenderableType] = [_head(view), _pools(view["pools"])]
    return Group(*parts, Text(""), _controlds(view["controlds"]))


def _head(view: dict[str, Any]) -> Text:
    nodes, total, controlds = view["nodes"], view["total"], view["controlds"]
    states = ", ".join(f"{count} {state}" for state, count in nodes["states"].items())
    lines = (
        (
            f"nodes {nodes['total']} ({states or 'none'})  slots {nodes['slots_used']}/"
            f"{nodes['slots_total']}  balance {nodes['balance']:.2f}"
        ),
        (
            f"tasks queued {total['queued']}, in flight {total['in_flight']}  "
            f"placed/s {_number(total['placed_per_s'])}  "
            f"finished/s {_number(total['finished_per_s'])}  "
            f"refused/s {_number(total['refused_per_s'])}"
        ),
        (
            f"controlds {controlds['answered']} of {controlds['living']} answered, "
            f"asked through {view['answered_by']}"
        ),
    )
    return Text("\n".join(lines) + "\n")


def _pools(pools: list[dict[str, Any]]) -> Table:
    table = _table(
        *("POOL", "QUEUED", "FLIGHT", "SLOTS", "PLACED/S", "DONE/S", "LIMITED/S", "REFUSED/S"),
        *("HOME", "WAIT P50", "P99", "BALANCE", "REQUEUES/S"),
    )
    for pool in pools:
        causes = pool["requeued_per_s"] or {}
        table.add_row(
            pool["pool"],
            str(pool["queued"]),
            str(pool["in_flight"]),
            f"{pool['slots_used']}/{pool['slots_total']}",
            _number(pool["placed_per_s"]),
            _number(pool["finished_per_s"]),
            _number(pool["not_admitted_per_s"]),
            _number(pool["refused_per_s"]),
            _share(pool["home_share"]),
            _time(pool["wait_p50_s"]),
            _time(pool["wait_p99_s"]),
            f"{pool['balance']:.2f}",
            ", ".join(f"{cause} {_number(rate)}" for cause, rate in causes.items()) or "-",
        )
    return table


def _controlds(controlds: dict[str, Any]) -> Table:
    table = _table("CONTROLD", "SHARDS", "RACKS", "CPU", "LOOP LAG")
    listed = sorted(controlds["list"], key=lambda each: (each["answered"], -(each["cpu"] or 0.0)))
    for each in listed[:MOST_CONTROLDS]:
        if each["answered"]:
            told = (str(each["shards"]), _share(each["cpu"]), f"{each['loop_lag_ms']:.1f} ms")
        else:
            told = ("no answer", "-", "-")
        table.add_row(each["controld"], told[0], str(each["racks"]), told[1], told[2])
    if len(listed) > MOST_CONTROLDS:
        table.add_row(f"and {len(listed) - MOST_CONTROLDS} more", "", "", "", "")
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def _number(rate: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate:.0f}" if rate >= 100 or rate == 0 else f"{rate:.1f}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f} ms" if seconds < 1.0 else f"{seconds:.1f} s"
