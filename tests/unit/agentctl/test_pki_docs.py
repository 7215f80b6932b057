"""docs/pki.md: every command in it runs, in its order, and does what it says."""

from __future__ import annotations

import grp
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentctl import pki_options
from agentctl.main import main

DOCUMENT = (Path(__file__).parents[3] / "docs/pki.md").read_text()
_BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def blocks(kind: str) -> list[str]:
    return [text for found, text in _BLOCK.findall(DOCUMENT) if found == kind]


def command_lines() -> Iterator[list[str]]:
    for block in blocks("sh"):
        for line in block.splitlines():
            yield shlex.split(line)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What stands for the document's places and groups here."""
    [fleet] = blocks("text")
    (tmp_path / "fleet.tsv").write_text(fleet)
    monkeypatch.chdir(tmp_path)
    return {
        "/root/corefleet-ca": str(tmp_path / "ca"),
        "/etc/corefleet/pki": str(tmp_path / "host"),
        "corefleet-controld": grp.getgrgid(os.getgid()).gr_name,
    }


def test_every_command_of_the_document_runs(here: dict[str, str]) -> None:
    host = Path(here["/etc/corefleet/pki"])
    ran = []
    for words in command_lines():
        for shown, real in here.items():
            words = [word.replace(shown, real) for word in words]
        if words[0] == "agentctl":
            # The place of a host's files is a default that only root may use.
            at_default = words[2] in ("request", "install")
            result = CliRunner().invoke(
                main, [*words[1:], *(["--dir", str(host)] if at_default else [])]
            )
            assert result.exit_code == 0, f"{shlex.join(words)}: {result.output}"
            ran.append(words[2])
        else:
            subprocess.run(words, check=True)
    assert set(ran) == {
        "init", "request", "sign", "install", "issue", "renew", "show", "list", "rotate-ca",
    }  # fmt: skip
    assert (host / "agentd.key").exists()


def test_the_place_of_a_host_s_files_is_the_document_s() -> None:
    assert f"`{pki_options.HOST_DIRECTORY}`" in DOCUMENT
