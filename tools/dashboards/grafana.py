"""Grafana's files, made from the panels."""

from __future__ import annotations

import json
from pathlib import Path

from tools.dashboards.panels import DASHBOARDS, Dashboard, Panel, Variable

DIRECTORY = Path(__file__).resolve().parents[2] / "configs" / "grafana"

_SCHEMA_VERSION = 38
"""Of Grafana 10; newer ones migrate it when they load it."""
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _COLUMNS = 12, 8, 2


def files() -> dict[Path, str]:
    """Return the text of each dashboard's file."""
    return {
        DIRECTORY / f"corefleet-{each.name}.json": json.dumps(document(each), indent=2) + "\n"
        for each in DASHBOARDS
    }


def document(dashboard: Dashboard) -> dict[str, object]:
    """Return a dashboard as Grafana's JSON model.

    https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/
    """
    source = {"name": "datasource", "label": "Data source", "type": "datasource"}
    return {
        "uid": f"corefleet-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["corefleet"],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "templating": {
            "list": [
                source | {"query": "prometheus"},
                *(_variable(each) for each in dashboard.variables),
            ]
        },
        "panels": [_panel(number, each) for number, each in enumerate(dashboard.panels)],
    }


def _variable(variable: Variable) -> dict[str, object]:
    return {
        "name": variable.name,
        "type": "query",
        "datasource": _SOURCE,
        "query": f"label_values({variable.series}, {variable.label})",
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
        "sort": 1,
    }


def _panel(number: int, panel: Panel) -> dict[str, object]:
    row, column = divmod(number, _COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.what,
        "datasource": _SOURCE,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": row * _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": _SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
            }
            for place, query in enumerate(panel.queries)
        ],
    }
