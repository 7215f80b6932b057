"""Pictures of the dashboards from the data of a real run, drawn with matplotlib.

Grafana itself is not needed: each panel's queries are put to a real Prometheus, as Grafana
puts them.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
import uvloop
from matplotlib.figure import Figure

from corefleet import logs
from corefleet.config import LogConfig
from tools.bench.machine import progress
from tools.dashboards import load
from tools.dashboards.panels import DASHBOARDS, RATE, Dashboard, Panel, Unit
from tools.dashboards.server import Prometheus, Series

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"

_RATE_WINDOW = "10s"
_COLUMNS, _WIDTH, _ROW, _DPI = 2, 11.0, 2.3, 80
_GAP_S = 2.5
_LEGENDS = 6
"""Lines of a legend at most: more hide the picture."""
_UNITS: dict[Unit, str] = {
    "short": "", "s": "s", "percentunit": "share", "ops": "1/s", "Bps": "B/s", "bytes": "B",
}  # fmt: skip

Drawn = dict[str, list[tuple[str, Series]]]
"""Named series by the panel's title."""


def render(seconds: float, names: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """Run a fleet for `seconds`, draw into docs/images; return panels without data."""
    logs.configure(LogConfig(level="warning"), "dashboards")
    wanted = [each for each in DASHBOARDS if not names or each.name in names]
    found = uvloop.run(_collect(wanted, seconds))
    empty = {}
    for dashboard in wanted:
        drawn = found[dashboard.name]
        _draw(dashboard, drawn)
        empty[dashboard.name] = [each.title for each in dashboard.panels if not drawn[each.title]]
    return empty


async def _collect(dashboards: list[Dashboard], seconds: float) -> dict[str, Drawn]:
    with tempfile.TemporaryDirectory(prefix="corefleet-dashboards-") as scratch:
        async with load.fleet(Path(scratch) / "fleet") as fleet:
            targets: dict[str, dict[str, str]] = {"controld": {}, "agentd": {}}
            for name, address in fleet.metrics.items():
                targets["controld" if name in fleet.controlds else "agentd"][name] = address
            monitoring = Path(scratch) / "prometheus"
            monitoring.mkdir()
            async with Prometheus(monitoring, targets) as prometheus:
                start = time.time()
                await load.play(fleet, seconds)
                end = time.time()
                return {
                    each.name: await asyncio.to_thread(_ask, prometheus, each, start, end)
                    for each in dashboards
                }


def _ask(prometheus: Prometheus, dashboard: Dashboard, start: float, end: float) -> Drawn:
    drawn: Drawn = {}
    for panel in dashboard.panels:
        drawn[panel.title] = [
            (_legend(query.legend, series.labels), series)
            for query in panel.queries
            for series in prometheus.series(_filled(dashboard, query.expr), start, end)
            if not all(math.isnan(value) for value in series.values)
        ]
    return drawn


def _filled(dashboard: Dashboard, expr: str) -> str:
    """Return `expr` with Grafana's variables replaced, each by all of its values."""
    for variable in dashboard.variables:
        expr = expr.replace(f"${variable.name}", ".+")
    return expr.replace(RATE, _RATE_WINDOW)


def _legend(form: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), form)


def _draw(dashboard: Dashboard, drawn: Drawn) -> None:
    rows = -(-len(dashboard.panels) // _COLUMNS)
    with mpl.rc_context({"font.size": 8, "axes.titlesize": 9, "lines.linewidth": 1.1}):
        figure = Figure(figsize=(_WIDTH, _ROW * rows + 0.4), layout="constrained")
        figure.suptitle(f"{dashboard.title} (x: seconds)")
        axes = figure.subplots(rows, _COLUMNS, squeeze=False).flat
        began = min(
            (series.times[0] for lines in drawn.values() for _, series in lines), default=0.0
        )
        for panel, axis in zip(dashboard.panels, axes, strict=False):
            _draw_panel(panel, axis, drawn[panel.title], began)
        for axis in list(axes)[len(dashboard.panels) :]:
            axis.set_axis_off()
        IMAGES.mkdir(parents=True, exist_ok=True)
        target = IMAGES / f"dashboard-{dashboard.name}.png"
        figure.savefig(target, dpi=_DPI, metadata={"Software": None})
    progress(f"{target.name}: {target.stat().st_size // 1024} kB")


def _draw_panel(panel: Panel, axis: Any, lines: list[tuple[str, Series]], began: float) -> None:
    axis.set_title(panel.title, loc="left")
    axis.set_ylabel(_UNITS[panel.unit])
    axis.grid(alpha=0.3)
    if not lines:
        axis.text(0.5, 0.5, "no data in this fleet", ha="center", transform=axis.transAxes)
        axis.set_xticks([])
        axis.set_yticks([])
        return
    for number, (name, series) in enumerate(lines):
        axis.plot(*_points(series, began), label=name if number < _LEGENDS else None)
    known = [v for _, series in lines for v in series.values if not math.isnan(v)]
    high = max(known)
    low = min(0.0, *known)
    # Room above for the legend.
    top = 1.35 * high if high > 0 else 1.0
    axis.set_ylim(1.1 * low - 0.02 * top, top)
    axis.legend(loc="upper left", fontsize=6, ncols=3, framealpha=0.6)


def _points(series: Series, began: float) -> tuple[list[float], list[float]]:
    """Return where a line goes through; it is broken where nothing was scraped."""
    times: list[float] = []
    values: list[float] = []
    for at, value in zip(series.times, series.values, strict=True):
        if times and at - began - times[-1] > _GAP_S:
            times.append(at - began)
            values.append(math.nan)
        times.append(at - began)
        values.append(value)
    return times, values


def show(empty: dict[str, list[str]]) -> str:
    """Return one line of JSON: panels without data by dashboard."""
    return json.dumps({"without_data": empty})
