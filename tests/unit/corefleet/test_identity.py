"""Identities in certificates."""

from __future__ import annotations

import pytest

from corefleet.errors import InvalidInput
from corefleet.identity import ROLES, Identity, find_identity, parse_identity


@pytest.mark.parametrize("role", ROLES)
def test_an_identity_is_read_as_it_was_spelled(role: str) -> None:
    identity = parse_identity(f"n-1.{role}.corefleet")
    assert (identity.role, identity.name) == (role, "n-1")
    assert parse_identity(identity.dns_name) == identity


OTHERS = (
    "",
    "n1",
    "n1.agentd",
    "n1.root.corefleet",
    "a.n1.agentd.corefleet",
    ".agentd.corefleet",
    "n1.agentd.corefleet.example.org",
    "*.agentd.corefleet",
)


@pytest.mark.parametrize("name", OTHERS)
def test_other_names_are_no_identity(name: str) -> None:
    with pytest.raises(InvalidInput):
        parse_identity(name)


def test_the_identity_is_found_among_hosts() -> None:
    me = Identity("controld", "c1")
    assert find_identity(["c1.rack.example.org", me.dns_name, "localhost"]) == me


def test_none_or_two_identities_are_nobody() -> None:
    assert find_identity(["c1.example.org"]) is None
    assert find_identity(["c1.controld.corefleet", "n1.agentd.corefleet"]) is None
