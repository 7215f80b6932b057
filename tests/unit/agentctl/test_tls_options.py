"""Where agentctl takes its certificates from."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from agentctl.options import address_option, connect
from corefleet.config import TlsConfig
from corefleet.errors import InvalidInput
from corefleet.identity import Identity
from tests.servers.authority import Authority


@pytest.fixture
def files(tmp_path: Path) -> TlsConfig:
    return Authority().write(tmp_path, Identity("operator", "op"))


@click.command()
@address_option
def verb(addresses: tuple[str, ...]) -> None:
    """Print the certificate that a verb would use."""
    tls = connect(addresses)._tls
    click.echo("none" if tls is None else tls.cert)


def test_without_any_there_is_no_tls() -> None:
    assert CliRunner().invoke(verb, []).output == "none\n"


def test_they_come_from_the_command_line(files: TlsConfig) -> None:
    options = ["--tls-ca", files.ca, "--tls-cert", files.cert, "--tls-key", files.key]
    assert CliRunner().invoke(verb, options).output == f"{files.cert}\n"


def test_they_come_from_the_environment(files: TlsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("ca", "cert", "key"):
        monkeypatch.setenv(f"COREFLEET_TLS_{part.upper()}", getattr(files, part))
    assert CliRunner().invoke(verb, []).output == f"{files.cert}\n"


def test_the_command_line_counts_more(
    files: TlsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COREFLEET_TLS_CA", str(tmp_path / "none.pem"))
    options = ["--tls-ca", files.ca, "--tls-cert", files.cert, "--tls-key", files.key]
    assert CliRunner().invoke(verb, options).output == f"{files.cert}\n"


def test_some_without_the_others_are_named(files: TlsConfig) -> None:
    ran = CliRunner().invoke(verb, ["--tls-ca", files.ca, "--tls-key", files.key])
    assert isinstance(ran.exception, InvalidInput)
    assert "--tls-cert" in str(ran.exception)
