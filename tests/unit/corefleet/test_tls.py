"""Certificate files: what is refused and why, and what becomes of files that are replaced."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from corefleet.config import TlsConfig
from corefleet.errors import ConfigError
from corefleet.identity import Identity
from corefleet.tls import TlsFiles
from corefleet.tls_trouble import ask, speaks_tls, why
from tests.servers.authority import Authority

NODE = Identity("agentd", "n1")
SERVER = Identity("nats", "s1")


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def named(authority: Authority, tmp_path: Path) -> TlsConfig:
    return authority.write(tmp_path / "pki", NODE)


def opened(named: TlsConfig) -> TlsFiles:
    return TlsFiles(named.ca, named.cert, named.key)


def test_files_that_fit_give_their_bytes_and_both_contexts(named: TlsConfig) -> None:
    files = opened(named)
    material = files.current()
    assert material.cert == Path(named.cert).read_bytes()
    assert files.client_context().check_hostname
    assert files.server_context().verify_mode is ssl.CERT_REQUIRED
    assert files.client_context() is files.client_context()


def test_no_configuration_names_no_files() -> None:
    assert TlsFiles.of(None) is None


@pytest.mark.parametrize("part", ["ca", "cert", "key"])
def test_a_missing_file_is_named(named: TlsConfig, part: str) -> None:
    path = getattr(named, part)
    Path(path).unlink()
    with pytest.raises(ConfigError, match=f"{path}: not readable: No such file"):
        opened(named)


@pytest.mark.parametrize(
    ("part", "expected"), [("ca", "no certificate"), ("cert", "no certificate"), ("key", "no priv")]
)
def test_a_file_that_is_no_pem_is_named(named: TlsConfig, part: str, expected: str) -> None:
    path = getattr(named, part)
    Path(path).write_text("nothing of the kind")
    with pytest.raises(ConfigError, match=f"{path}: {expected}"):
        opened(named)


def test_a_key_that_belongs_to_another_certificate_is_refused(
    named: TlsConfig, authority: Authority
) -> None:
    Path(named.key).write_bytes(authority.issue(NODE).key_pem)
    with pytest.raises(ConfigError, match=f"{named.key}: does not fit the certificate"):
        opened(named)


def test_an_expired_certificate_is_refused(named: TlsConfig, authority: Authority) -> None:
    replace(named, authority, since_days=-3, days=2)
    with pytest.raises(ConfigError, match=f"{named.cert}: expired at 20"):
        opened(named)


def test_a_certificate_of_the_future_is_refused(named: TlsConfig, authority: Authority) -> None:
    replace(named, authority, since_days=1)
    with pytest.raises(ConfigError, match=r"not valid before .* clock"):
        opened(named)


def test_one_that_expires_soon_is_warned_of_once_a_day(
    named: TlsConfig, authority: Authority
) -> None:
    replace(named, authority, days=3)
    with capture_logs() as logs:
        files = opened(named)
        files.look()
    assert [log["event"] for log in logs] == ["certificate expires soon"]


def replace(
    named: TlsConfig, authority: Authority, since_days: float = -1, days: float = 30
) -> None:
    issued = authority.issue(NODE, since_days=since_days, days=days)
    for path, content in ((named.key, issued.key_pem), (named.cert, issued.cert_pem)):
        new = Path(f"{path}.new")
        new.write_bytes(content)
        os.replace(new, path)


def test_replaced_files_are_taken_up_as_one(named: TlsConfig, authority: Authority) -> None:
    files = opened(named)
    before, context = files.current(), files.client_context()
    assert not files.look()
    replace(named, authority)
    assert files.look()
    after = files.current()
    assert after.number == before.number + 1
    assert after.cert == Path(named.cert).read_bytes() != before.cert
    assert files.client_context() is not context


def test_half_a_pair_is_never_taken_up(named: TlsConfig, authority: Authority) -> None:
    files = opened(named)
    before = files.current()
    issued = authority.issue(NODE)
    Path(named.key).write_bytes(issued.key_pem)
    with capture_logs() as logs:
        assert not files.look()
        assert not logs, "the other half may come at any moment"
        assert not files.look()
        assert not files.look()
    assert [log["event"] for log in logs] == ["certificates not taken up: the former stay"]
    assert "does not fit" in logs[0]["reason"]
    assert files.current() is before
    Path(named.cert).write_bytes(issued.cert_pem)
    assert files.look()
    assert files.current().cert == issued.cert_pem


def test_files_that_go_away_leave_what_they_held(named: TlsConfig) -> None:
    files = opened(named)
    before = files.current()
    Path(named.ca).unlink()
    assert not files.look()
    assert files.current() is before


def test_the_same_bytes_in_new_files_are_no_news(named: TlsConfig) -> None:
    files = opened(named)
    before = files.current()
    copy = Path(f"{named.cert}.new")
    copy.write_bytes(before.cert)
    os.replace(copy, named.cert)
    assert not files.look()
    assert files.current() is before


@asynccontextmanager
async def server(files: TlsFiles | None) -> AsyncIterator[str]:
    """A server that reads one byte of each connection, which a refused client has closed."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read(1)
        except OSError:
            pass
        finally:
            writer.transport.abort()

    context = None if files is None else files.server_context()
    if context is not None:
        context.set_alpn_protocols(["h2"])
    served = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"127.0.0.1:{served.sockets[0].getsockname()[1]}"
    finally:
        served.close()
        await served.wait_closed()


async def test_what_is_wrong_with_a_server_is_said_in_words(
    authority: Authority, named: TlsConfig, tmp_path: Path
) -> None:
    mine = opened(named)
    foreign = opened(Authority("foreign").write(tmp_path / "foreign", SERVER))
    async with server(foreign) as address:
        assert await ask(address, mine) == (
            f"the certificate of {address} is not signed by {named.ca}"
        )
    elsewhere = authority.write(tmp_path / "server", SERVER, hosts=["10.1.2.3"])
    async with server(opened(elsewhere)) as address:
        assert f"certificate of {address} is for another hostname" in await ask(address, mine)
    async with server(None) as address:
        assert not await speaks_tls(address)


async def test_a_server_that_refuses_us_is_told_of_with_the_certificate(
    authority: Authority, named: TlsConfig, tmp_path: Path
) -> None:
    other = Authority("other")
    strange = opened(other.write(tmp_path / "client", NODE, trusted=[authority]))
    async with server(opened(authority.write(tmp_path / "server", SERVER))) as address:
        assert await ask(address, opened(named)) == ""
        told = await ask(address, strange)
        assert told.startswith((f"{address} refuses us", f"{address} closes the connection"))
        assert f"our certificate {strange.cert}" in told
        assert await speaks_tls(address)


def test_an_expired_server_is_named() -> None:
    error = ssl.SSLCertVerificationError("bad")
    error.verify_code, error.verify_message = 10, "certificate has expired"
    assert why(error, "h:1", None) == "the certificate of h:1 has expired"
