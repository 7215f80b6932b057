"""Rules, alerts and dashboards: on metrics that exist, and each alert with its run book."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from corefleet.config import cache_dir
from tools.dashboards.__main__ import stale
from tools.dashboards.families import exposed
from tools.dashboards.grafana import document
from tools.dashboards.panels import DASHBOARDS, RATE, Dashboard
from tools.prometheus_fetch import fetch

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "configs" / "prometheus"
TESTS = CONFIGS / "tests" / "alerts.yml"


def groups(name: str) -> list[dict[str, Any]]:
    loaded: dict[str, list[dict[str, Any]]] = yaml.safe_load((CONFIGS / name).read_text())
    return [rule for group in loaded["groups"] for rule in group["rules"]]


RECORDED = {rule["record"]: rule["expr"] for rule in groups("corefleet.rules.yml")}
ALERTS = {rule["alert"]: rule for rule in groups("alerts.yml")}
PANELS = {
    f"{dashboard.name}: {panel.title} {number}": (dashboard, query.expr)
    for dashboard in DASHBOARDS
    for panel in dashboard.panels
    for number, query in enumerate(panel.queries)
}


def queries() -> Iterator[tuple[str, str]]:
    yield from RECORDED.items()
    yield from ((name, rule["expr"]) for name, rule in ALERTS.items())
    yield from ((name, expr) for name, (_, expr) in PANELS.items())


def metrics_in(expr: str) -> set[str]:
    """Return the names of all series that a query asks for."""
    text = re.sub(r'"[^"]*"', '""', expr)
    words = re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", text)
    return {word for word in words if re.match(r"(.*:)?(corefleet|process)_|up$", word)}


@pytest.mark.parametrize(("name", "expr"), list(queries()), ids=[name for name, _ in queries()])
def test_only_metrics_that_exist_are_asked_for(name: str, expr: str) -> None:
    known = {series for family in exposed() for series in family.series} | RECORDED.keys() | {"up"}
    asked = metrics_in(expr)
    assert asked, f"{name} asks for nothing"
    assert asked <= known


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_to_do(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("page", "warning")
    assert rule["annotations"]["summary"].endswith(".")
    assert rule["annotations"]["description"].endswith(".")
    file, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    sections = re.split(r"^## ", (ROOT / file).read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = {section.split("\n", 1)[0].lower(): section for section in sections}
    assert anchor == name.lower()
    assert f"**{rule['labels']['severity']}**" in found[anchor]
    assert "See:\n\n```\n" in found[anchor]
    assert "\nDo: " in found[anchor]


def test_the_run_book_tells_of_no_other_alert() -> None:
    text = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    assert set(re.findall(r"Corefleet[A-Z]\w+", text)) == ALERTS.keys()


def test_each_alert_is_seen_to_fire_and_not_to_fire() -> None:
    seen: dict[str, set[bool]] = {}
    for test in yaml.safe_load(TESTS.read_text())["tests"]:
        for each in test["promql_expr_test"]:
            found = re.fullmatch(
                r'count\(ALERTS\{alertname="(\w+)",alertstate="firing"\}\)', each["expr"]
            )
            assert found, each["expr"]
            seen.setdefault(found[1], set()).add(bool(each["exp_samples"]))
    assert seen == {name: {True, False} for name in ALERTS}


def promtool(*arguments: str | Path) -> str:
    """Return what promtool said; fails the test when it found something."""
    fetch(cache_dir() / "bin")
    done = subprocess.run(
        [cache_dir() / "bin" / "promtool", *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_takes_the_configuration_and_its_rules() -> None:
    said = promtool("check", "config", CONFIGS / "prometheus.yml")
    assert f"{len(ALERTS)} rules found" in said
    assert f"{len(RECORDED)} rules found" in said


def test_promtool_sees_alerts_fire_and_not_fire() -> None:
    assert "SUCCESS" in promtool("test", "rules", TESTS)


def test_promtool_can_read_the_queries_of_all_panels(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": with_values(dashboard, expr)}
        for number, (dashboard, expr) in enumerate(PANELS.values())
    ]
    file = tmp_path / "panels.json"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))

    assert f"{len(PANELS)} rules found" in promtool("check", "rules", file)


def with_values(dashboard: Dashboard, expr: str) -> str:
    for variable in dashboard.variables:
        assert f'=~"${variable.name}"' in expr
        expr = expr.replace(f"${variable.name}", ".+")
    expr = expr.replace(RATE, "1m")
    assert "$" not in expr
    return expr


def test_files_of_dashboards_and_metrics_are_up_to_date() -> None:
    """docs/metrics.md and configs/grafana: `python -m tools.dashboards write`."""
    assert stale() == []


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.name)
def test_a_dashboard_is_as_grafana_wants_it(dashboard: Dashboard) -> None:
    made: dict[str, Any] = document(dashboard)
    panels = made["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    cells = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(cells) == len(panels)
    assert all(x in (0, 12) and y % 8 == 0 for x, y in cells)
    variables = {each["name"] for each in made["templating"]["list"]}
    for panel in panels:
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= variables
            assert target["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.name)
def test_a_dashboard_has_its_picture(dashboard: Dashboard) -> None:
    picture = ROOT / "docs" / "images" / f"dashboard-{dashboard.name}.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 150_000
    text = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
    assert f"images/{picture.name}" in text
