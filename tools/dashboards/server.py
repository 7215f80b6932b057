"""A real Prometheus with this project's configuration, and questions to it."""

from __future__ import annotations

import json
import shutil
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentctl.local.processes import Child, free_port
from corefleet.config import cache_dir
from tools.prometheus_fetch import fetch

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "prometheus"
SCRAPE_S = 1
_READY_S = 60.0
_ANSWER_S = 30.0


@dataclass(slots=True)
class Series:
    """One line of a panel."""

    labels: dict[str, str]
    times: list[float]
    values: list[float]


class Prometheus:
    """Scrapes `targets` (addresses by job) each second; use as an async context manager."""

    def __init__(self, directory: Path, targets: dict[str, dict[str, str]]) -> None:
        self._directory = directory
        self._targets = targets
        self._url = ""
        self._child: Child | None = None

    async def __aenter__(self) -> Prometheus:
        fetch(cache_dir() / "bin")
        config = self._configure()
        address = f"127.0.0.1:{free_port()}"
        self._url = f"http://{address}"
        self._child = await Child.start(
            "prometheus",
            [
                str(cache_dir() / "bin" / "prometheus"), f"--config.file={config}",
                f"--storage.tsdb.path={self._directory / 'data'}",
                f"--web.listen-address={address}",
            ],
            self._directory / "prometheus.log",
        )  # fmt: skip
        await self._child.wait_line(lambda line: "Server is ready" in line, _READY_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._child is not None:
            await self._child.stop()

    def series(self, query: str, start: float, end: float) -> list[Series]:
        """Return what a panel would draw. Blocks."""
        found = self._ask("query_range", query=query, start=start, end=end, step=SCRAPE_S)
        return [
            Series(
                each["metric"],
                [float(at) for at, _ in each["values"]],
                [float(value) for _, value in each["values"]],
            )
            for each in found["result"]
        ]

    def _ask(self, what: str, **parameters: str | float) -> Any:
        url = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
            return json.load(answer)["data"]

    def _configure(self) -> Path:
        """Copy the configuration, made quicker, with the targets; return its file."""
        target = self._directory / "config"
        shutil.copytree(CONFIGS, target)
        main = target / "prometheus.yml"
        text = main.read_text(encoding="utf-8")
        for slow in ("scrape_interval: 15s", "evaluation_interval: 15s"):
            text = text.replace(slow, slow.replace("15s", f"{SCRAPE_S}s"))
        for slow in ("scrape_timeout: 10s", "scrape_timeout: 5s"):
            text = text.replace(slow, f"scrape_timeout: {SCRAPE_S}s")
        main.write_text(text, encoding="utf-8")
        (target / "targets").mkdir()
        for job, addresses in self._targets.items():
            groups = [
                {"targets": [address], "labels": {"instance": name}}
                for name, address in addresses.items()
            ]
            (target / "targets" / f"{job}.json").write_text(json.dumps(groups), encoding="utf-8")
        return main
