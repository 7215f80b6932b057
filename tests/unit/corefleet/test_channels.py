"""Plain text is asked for by name, and stays on the machine."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from corefleet.channels import Channel, check_channels, is_loopback, warn_of_plain_text
from corefleet.config import TlsConfig
from corefleet.errors import InvalidInput

TLS = TlsConfig(ca="/p/ca.pem", cert="/p/agentd.pem", key="/p/agentd.key")


def nats(*servers: str, tls: TlsConfig | None = None) -> list[Channel]:
    return [Channel("nats.servers", servers, "nats.tls", tls)]


def test_tls_needs_nothing_else() -> None:
    check_channels(False, nats("nats://10.0.0.1:4222", tls=TLS))


def test_plain_text_must_be_asked_for() -> None:
    with pytest.raises(InvalidInput, match=r"^nats\.tls: None .*`insecure = true`"):
        check_channels(False, nats("nats://127.0.0.1:4222"))
    check_channels(True, nats("nats://127.0.0.1:4222", "localhost:4222", "[::1]:4222"))


def test_a_channel_without_addresses_is_none() -> None:
    check_channels(False, nats())


def test_plain_text_stays_on_the_machine() -> None:
    with pytest.raises(InvalidInput, match=r"^nats\.servers: 'nats://10.0.0.1:4222' .*loopback"):
        check_channels(True, nats("nats://127.0.0.1:4222", "nats://10.0.0.1:4222"))


def test_a_closed_network_of_test_machines_can_be_vouched_for() -> None:
    channels = nats("nats://10.0.0.1:4222", "nats://127.0.0.1:4222")
    check_channels("any-address", channels)
    with capture_logs() as logs:
        warn_of_plain_text(channels)
        warn_of_plain_text(nats("nats://10.0.0.1:4222", tls=TLS))
    assert [(log["key"], log["addresses"]) for log in logs] == [
        ("nats.servers", ["nats://10.0.0.1:4222"])
    ]


@pytest.mark.parametrize("part", ["ca", "cert", "key"])
def test_paths_are_absolute(part: str) -> None:
    """The heartbeat program has another working directory."""
    paths = {"ca": "/ca.pem", "cert": "/a.pem", "key": "/a.key", part: "pki/x"}
    with pytest.raises(InvalidInput, match=rf"^nats\.tls\.{part}: 'pki/x' .*absolute"):
        check_channels(False, nats("nats://n:4222", tls=TlsConfig(**paths)))


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("127.0.0.1:1", True),
        ("127.8.8.8:1", True),
        ("[::1]:1", True),
        ("nats://user:word@localhost:4222", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("localhost.example.com:1", False),
        ("127.0.0.1.example.com:1", False),
        ("nats://127.0.0.1@10.0.0.1:4222", False),
        ("", False),
    ],
)
def test_what_is_this_machine(address: str, here: bool) -> None:
    assert is_loopback(address) is here
