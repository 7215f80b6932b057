"""Where server programs are looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from corefleet.adapters.servers import find_etcd, find_nats_server
from corefleet.errors import NotFound


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(0o755)
    return path


def test_etcd_of_the_cache_comes_before_that_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COREFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    with pytest.raises(NotFound, match=r"tools\.etcd_fetch"):
        find_etcd()
    on_path = program(tmp_path / "path" / "etcd")
    assert find_etcd() == on_path
    cached = program(tmp_path / "cache" / "bin" / "etcd")
    assert find_etcd() == cached


def test_nats_server_is_that_of_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert find_nats_server().name == "nats-server"
