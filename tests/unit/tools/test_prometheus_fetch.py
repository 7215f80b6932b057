"""Which ways prometheus_fetch goes to Prometheus and promtool."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import prometheus_fetch
from tools.etcd_fetch import FetchError
from tools.prometheus_fetch import PROGRAMS, fetch


def fake_programs(directory: Path, version: str, *, names: tuple[str, ...] = PROGRAMS) -> None:
    directory.mkdir(exist_ok=True)
    for name in names:
        program = directory / name
        program.write_text(f"#!/bin/sh\necho '{name}, version {version}+ds (branch: x)'\n")
        program.chmod(0o755)


def no_package(target: Path) -> None:
    raise FetchError("no package")


def test_what_the_cache_holds_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_programs(tmp_path / "bin", "2.42.0")
    monkeypatch.setenv("PATH", "/nowhere:/bin:/usr/bin")
    monkeypatch.setattr(prometheus_fetch, "_unpack_package", no_package)
    assert fetch(tmp_path / "bin") == "2.42.0"


def test_programs_on_path_are_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_programs(tmp_path / "there", "3.1.0")
    monkeypatch.setenv("PATH", f"{tmp_path / 'there'}:/bin:/usr/bin")
    monkeypatch.setattr(prometheus_fetch, "_unpack_package", no_package)

    assert fetch(tmp_path / "bin") == "3.1.0"
    assert (tmp_path / "bin" / "promtool").resolve() == tmp_path / "there" / "promtool"


def test_every_way_that_failed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(prometheus_fetch, "_unpack_package", no_package)
    with pytest.raises(FetchError, match="no prometheus and promtool on PATH\n  no package"):
        fetch(tmp_path / "bin")


def test_programs_of_two_versions_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_programs(tmp_path / "bin", "2.42.0", names=("prometheus",))
    fake_programs(tmp_path / "bin", "3.0.0", names=("promtool",))
    fake_programs(tmp_path / "there", "3.1.0")
    monkeypatch.setenv("PATH", f"{tmp_path / 'there'}:/bin:/usr/bin")
    monkeypatch.setattr(prometheus_fetch, "_unpack_package", no_package)
    assert fetch(tmp_path / "bin") == "3.1.0"
