"""How etcd_fetch reads apt's sources and which ways to an etcd it goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import etcd_fetch
from tools.etcd_fetch import FetchError, fetch, link_from_path, parse_line, parse_stanza

STANZA = """\
# the archive
Types: deb
URIs: http://archive.example/debian
Suites: bookworm
 bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/archive.gpg
"""


def fake_etcd(directory: Path, version: str) -> None:
    directory.mkdir(exist_ok=True)
    program = directory / "etcd"
    program.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\n")
    program.chmod(0o755)


def test_stanza_is_moved_to_another_suite() -> None:
    source = parse_stanza(STANZA)
    assert source is not None
    assert source.suites == ("bookworm", "bookworm-updates")
    assert source.components == ("main", "contrib")
    assert source.for_suite("trixie").text == (
        "Types: deb\nURIs: http://archive.example/debian\nSuites: trixie\n"
        "Components: main contrib\nSigned-By: /usr/share/keyrings/archive.gpg\n"
    )


@pytest.mark.parametrize(
    "stanza", ["", STANZA + "Enabled: no\n", STANZA.replace("deb\n", "deb-src\n")]
)
def test_stanza_without_packages_is_none(stanza: str) -> None:
    assert parse_stanza(stanza) is None


def test_line_is_moved_to_another_suite() -> None:
    line = "deb [arch=amd64 signed-by=/k.gpg] http://archive.example/debian bookworm main"
    source = parse_line(f"{line} contrib # ours")
    assert source is not None
    assert (source.suites, source.components) == (("bookworm",), ("main", "contrib"))
    assert source.for_suite("trixie").text == (
        line.replace("bookworm", "trixie") + " contrib # ours\n"
    )
    assert parse_line(f"# {line}") is None
    assert parse_line(line.replace("deb ", "deb-src ")) is None


def test_etcd_on_path_is_linked_if_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_etcd(tmp_path / "path", "3.6.1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    target = tmp_path / "target"
    assert fetch(target) == (3, 6, 1)
    assert (target / "etcd").resolve() == tmp_path / "path" / "etcd"
    assert fetch(target) == (3, 6, 1)
    fake_etcd(tmp_path / "path", "3.4.23")
    with pytest.raises(FetchError, match=r"3\.4\.23; 3\.5\.0 or newer"):
        link_from_path(target, (3, 5, 0))


def test_all_reasons_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("COREFLEET_CACHE", str(tmp_path / "cache"))
    assert etcd_fetch.main() == 1
    shown = capsys.readouterr().err
    assert "no etcd on PATH" in shown
    assert "no apt-get and dpkg here" in shown
    assert str(tmp_path / "cache" / "bin" / "etcd") in shown
